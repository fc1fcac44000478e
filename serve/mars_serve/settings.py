"""Settings of a server, as ``marsray serve CONFIG.yaml`` reads them."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, model_validator

from mars_platform.cluster import ClusterSettings
from mars_platform.config import Settings
from mars_platform.mode import Mode
from mars_serve.engine.settings import EngineSettings


class DraftSettings(Settings):
    """A second, smaller model that proposes tokens for a served one to check."""

    path: str
    """Checkpoint directory or hub id, MARS or plain AR, with the served model's tokenizer."""
    num_tokens: int = Field(default=4, ge=1, le=64)
    """Tokens that it proposes for a request and step."""
    confidence_threshold: float = Field(default=0.8, gt=0, le=1)
    """τ of its own decoding, where it is a MARS checkpoint."""


class ModelSettings(Settings):
    """One served model."""

    name: str = Field(min_length=1, max_length=128)
    """Name that requests give as ``model``."""
    path: str
    """Checkpoint directory or Hugging Face hub id."""
    mode: Mode = Mode.THRESHOLD
    """Mode of requests that name none; a plain AR checkpoint always uses ``ar``."""
    confidence_threshold: float = Field(default=0.95, gt=0, le=1)
    """τ of requests that name none."""
    num_replicas: int = Field(default=1, ge=1)
    """Replicas, each with an engine of its own."""
    num_cpus: float = Field(default=1, ge=0)
    """CPUs that Ray reserves for a replica."""
    num_gpus: float = Field(default=0, ge=0, le=1)
    """GPUs of a replica; 0 runs it on the CPU."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the CPU kernels; by default the machine's cores, shared by the replicas."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights, keys and values."""
    engine: EngineSettings = EngineSettings()
    draft: DraftSettings | None = None
    """Used for requests in modes exact and threshold."""


class ServeSettings(Settings):
    """A server: some models behind one address."""

    models: list[ModelSettings] = Field(min_length=1)
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    insecure: bool = False
    """Allow an address other than loopback: there is no authentication."""
    cluster: ClusterSettings = ClusterSettings()

    @model_validator(mode="after")
    def _consistent(self) -> ServeSettings:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"models: names must differ, got {names}")
        if not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} is reachable from other machines and requests are not "
                "authenticated; use 127.0.0.1, or allow it with insecure: true (--insecure)"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
