"""Settings of a server, as ``marsray serve CONFIG.yaml`` reads them."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mars_autoscale.policy.decide import OuterSettings
from mars_autoscale.policy.inner_loop import LocalSettings
from mars_platform.cluster.settings import ClusterSettings
from mars_platform.config import Settings
from mars_platform.method.mode import Mode
from mars_serve.config.key_file import KeyEntry, parse_keys, refuse_duplicates
from mars_serve.engine.settings import EngineSettings


def _absolute(path: Path) -> Path:
    """Against the directory of who wrote it: Ray's processes may run in another."""
    return path.expanduser().absolute()


class DraftSettings(Settings):
    """A second, smaller model that proposes tokens for a served one to check."""

    path: str
    """Checkpoint directory or hub id, MARS or plain AR, with the served model's tokenizer."""
    num_tokens: int = Field(default=4, ge=1, le=64)
    """Tokens that it proposes for a request and step."""
    confidence_threshold: float = Field(default=0.8, gt=0, le=1)
    """τ of its own decoding, where it is a MARS checkpoint."""


class RehearsalSettings(Settings):
    """Slows a model's steps down to the times in its checkpoint's ``frontier.json``, so that
    scaling can be rehearsed on a machine too small for it. What is decoded stays the same.
    """

    cold_start_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Seconds that a replica's start takes at the least."""


class TierSettings(Settings):
    """What each ``service_tier`` may be served with.

    Requests of tier ``priority`` are decoded without loss and go first, those of ``flex`` go last.
    """

    default_min_threshold: float = Field(default=0.9, gt=0, le=1)
    """Lowest τ to which a request of tier ``default`` may be moved while it gives none itself."""
    flex_min_threshold: float = Field(default=0.7, gt=0, le=1)
    """The same for tier ``flex``."""


class AutoscalingSettings(OuterSettings):
    """Number of replicas and live τ, moved together by load; see `OuterSettings` for most of it.

    The floors of ``tiers`` hold, too.
    """

    max_replicas: int = Field(ge=1)
    """Replicas at the most."""
    policy: Literal["joint", "ongoing_requests"] = "joint"
    """``joint`` moves τ and replicas; ``ongoing_requests`` leaves τ alone and has Ray Serve's own
    policy choose the replicas."""
    target_threshold: float = Field(default=1.0, gt=0, le=1)
    """τ while there is no need to hurry; replicas are sized by its speed. It has to be one that
    frontier.json has, and no lower than the floors of class default."""
    objective_ttft_s: float = Field(default=1.0, gt=0)
    """Seconds to the first token that are promised. Once nothing is left to give, requests that
    would wait longer are refused, those of tier flex first."""
    inner: LocalSettings = LocalSettings()
    """Constants of a replica's own part."""
    target_ongoing_requests: float = Field(default=8, gt=0)
    """Of a replica, for policy ``ongoing_requests``."""


class ModelSettings(Settings):
    """One served model."""

    name: str = Field(min_length=1, max_length=128)
    """Name that requests give as ``model``."""
    path: str
    """Checkpoint directory or Hugging Face hub id."""
    mode: Mode = Mode.THRESHOLD
    """Mode of requests that name none; a plain AR checkpoint always uses ``ar``."""
    confidence_threshold: float = Field(default=0.95, gt=0, le=1)
    """τ of requests that name none, until it is changed on the running server. Where autoscaling
    moves τ, it is ``autoscaling.target_threshold`` that says so."""
    tiers: TierSettings = TierSettings()
    num_replicas: int = Field(default=1, ge=1)
    """Replicas, each with an engine of its own."""
    autoscaling: AutoscalingSettings | None = None
    """Where given, there are as many replicas as the load needs."""
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
    rehearsal: RehearsalSettings | None = None
    """Where given, the model's speed is that of the hardware its frontier was measured on."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelSettings:
        if self.autoscaling is not None and self.is_governed:
            self._check_target(self.autoscaling)
        elif self.confidence_threshold < (floor := self.tiers.default_min_threshold):
            raise ValueError(
                f"confidence_threshold: {self.confidence_threshold} is below {floor}, the lowest "
                "that requests without a τ of their own get; lower tiers.default_min_threshold, too"
            )
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                "num_replicas: autoscaling chooses it; leave it out, or give "
                "autoscaling.min_replicas and autoscaling.max_replicas alone"
            )
        if self.rehearsal is not None and self.draft is not None:
            raise ValueError(
                "rehearsal: frontier.json knows no times of steps with a draft model; leave draft "
                "or rehearsal out"
            )
        return self

    def _check_target(self, autoscaling: AutoscalingSettings) -> None:
        target, given = autoscaling.target_threshold, self.confidence_threshold
        if "confidence_threshold" in self.model_fields_set and given != target:
            raise ValueError(
                f"confidence_threshold: {given} has no effect where autoscaling moves τ, down from "
                f"its target, {target}; leave it out, and if {given} is to be that target, give "
                f"autoscaling.target_threshold: {given}"
            )
        floors = {
            "tiers.default_min_threshold": self.tiers.default_min_threshold,
            "autoscaling.floor_threshold": autoscaling.floor_threshold,
        }
        for name, floor in floors.items():
            if target < floor:
                raise ValueError(
                    f"autoscaling.target_threshold: {target} is below {name}, {floor}; raise the "
                    "target or lower that one, too"
                )

    @property
    def initial_threshold(self) -> float:
        """τ of requests that name none, while neither the load nor anybody has changed it."""
        if self.autoscaling is not None and self.is_governed:
            return self.autoscaling.target_threshold
        return self.confidence_threshold

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at once."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas

    @property
    def is_governed(self) -> bool:
        """Whether replicas choose τ themselves, within what the governor allows."""
        return self.autoscaling is not None and self.autoscaling.policy == "joint"


class LimitSettings(Settings):
    """What one request may ask for; more is refused before it reaches a model."""

    body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Bytes of a request's body."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of each prompt; by default what the model takes."""
    output_tokens: int | None = Field(default=None, ge=1)
    """Tokens of each output; by default what the model takes."""
    choices: int = Field(default=128, ge=1)
    """Outputs of one request, ``n`` times its prompts."""
    stop_strings: int = Field(default=16, ge=0)
    stop_characters: int = Field(default=256, ge=1)
    """Characters of each stop string."""
    queue_wait_s: float | None = Field(default=None, gt=0)
    """Seconds after which a request that has not begun to run is given up; by default never."""


class KeySettings(Settings):
    """Who may use the server. Without any key, it is open, and listens on loopback only."""

    file: Annotated[Path, AfterValidator(_absolute)] | None = None
    """Keys, by hash, with what each may do; read again when the file changes. Every replica of the
    ingress reads it, wherever it runs."""
    environment: str = Field(default="MARSRAY_API_KEYS", min_length=1)
    """Variable that holds the same, where no file is given. A replica of the ingress that does not
    have it uses what ``marsray serve`` found in its own environment."""
    entries: list[KeyEntry] | None = None
    """The same, given here; used where there is neither file nor variable."""
    reload_s: float = Field(default=2, gt=0)
    """Seconds between two looks at the file."""

    @field_validator("entries")
    @classmethod
    def _distinct(cls, entries: list[KeyEntry] | None) -> list[KeyEntry] | None:
        refuse_duplicates(entries or [])
        return entries

    @property
    def are_given(self) -> bool:
        """Whether requests need a key."""
        return self.file is not None or self.current_entries() is not None

    def current_entries(self) -> list[KeyEntry] | None:
        """Keys that are not in a file, of this process' environment first; None without any.

        Raises:
            UserError: the variable cannot be read; the message names it.
        """
        text = os.environ.get(self.environment)
        return self.entries if text is None else parse_keys(text, self.environment)

    def captured(self) -> KeySettings:
        """These with what the environment holds now, hashes only, for a process elsewhere."""
        return self.model_copy(update={"entries": self.current_entries()})


class ProxySettings(Settings):
    """How Ray Serve takes HTTP requests in."""

    kind: Literal["auto", "haproxy", "python"] = "auto"
    """Serve's proxies: ``auto`` is haproxy where its package is installed, which is on Linux. On a
    cluster that runs already, it is the cluster's environment that decides."""
    num_replicas: int = Field(default=1, ge=1)
    """Replicas of the ingress, which checks, tokenises and streams. Limits by key are shared out
    evenly among them."""


class TelemetrySettings(Settings):
    """What the server tells about itself."""

    log_requests: bool = True
    """Write one line of JSON for each request, without its text."""
    tracing: bool = False
    """Send OpenTelemetry spans, where the standard OTEL_ variables say; needs marsray[tracing]."""


class ServeSettings(Settings):
    """A server: some models behind one address."""

    models: list[ModelSettings] = Field(min_length=1)
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    insecure: bool = False
    """Allow an address other than loopback without keys."""
    keys: KeySettings = KeySettings()
    limits: LimitSettings = LimitSettings()
    proxy: ProxySettings = ProxySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    drain_s: float = Field(default=600, gt=0)
    """Seconds that running requests get to end in when a replica is taken down; choose more than
    the longest generation takes."""
    surge_percent: int = Field(default=25, ge=0, le=100)
    """Percent of a deployment's replicas, rounded up, that an update starts before it ends old
    ones; 0 ends old ones first, for clusters without room for one more."""
    cluster: ClusterSettings = ClusterSettings()

    @model_validator(mode="after")
    def _consistent(self) -> ServeSettings:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"models: names must differ, got {names}")
        if not (self.keys.are_given or self.insecure or self.is_local):
            raise ValueError(
                f"host: {self.host} is reachable from other machines and there are no keys; use "
                "127.0.0.1, give keys.file or the variable that keys.environment names (marsray "
                "key makes keys), or allow everybody in with insecure: true (--insecure)"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine and reachable from nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
