"""Settings of a server, read by ``marsray serve CONFIG.yaml``."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_platform.checkpoint.metadata import pin_model, pin_path
from mars_platform.cluster.settings import ClusterSettings
from mars_platform.config import Settings
from mars_platform.method.mode import Mode
from mars_serve.config.key_file import KeyEntries, KeyEntry, parse_keys
from mars_serve.engine.settings import EngineSettings

_MOST_SLOTS = 8
"""Most slots for LoRA adapters that settings get which give no number."""


def _absolute(path: Path) -> Path:
    """Resolve a path against the current directory, because Ray's processes may run in another."""
    return path.expanduser().absolute()


class AuditSettings(Settings):
    """The audit of what was served with several tokens a pass.

    While an engine is idle, it decodes a sample of such outputs again in mode exact and counts what
    differs. Outputs of requests and keys that opt out are left alone.
    """

    share: float = Field(default=0.05, ge=0, le=1)
    """Share of the outputs to audit, in [0, 1]; 0 for none."""


class TierSettings(Settings):
    """Floors of τ for each ``service_tier``.

    Tier ``priority`` is decoded without loss and served first; tier ``flex`` is served last.
    """

    default_min_threshold: float = Field(default=0.9, gt=0, le=1)
    """Lowest τ for requests of tier ``default`` that set none."""
    flex_min_threshold: float = Field(default=0.7, gt=0, le=1)
    """Lowest τ for requests of tier ``flex`` that set none."""


class AutoscalingSettings(OuterSettings):
    """Scaling of replicas and live τ with the load; the floors in ``tiers`` apply as well."""

    max_replicas: int = Field(ge=1)
    """Largest number of replicas."""
    target_threshold: float = Field(default=1.0, gt=0, le=1)
    """τ under normal load; its speed determines the number of replicas. It must be one of
    frontier.json's thresholds and no lower than the floors of tier default."""
    inner: InnerSettings = InnerSettings()
    """Constants of the inner loop, which runs in each replica."""


class LoraSettings(Settings):
    """A LoRA adapter, which acts at all positions of the requests that name it."""

    name: str = Field(min_length=1, max_length=128)
    """Name that requests give as ``model``."""
    path: str
    """Directory of the adapter in peft's format, on each machine that runs replicas."""


ReasoningField = Literal["reasoning_content", "reasoning"]


class ModelSettings(Settings):
    """A served model."""

    name: str = Field(min_length=1, max_length=128)
    """Name that requests give as ``model``."""
    path: str
    """Checkpoint directory, or Hugging Face hub id, with a branch, tag or commit after an ``@`` if
    need be. A deployment keeps the directory that a link led to when it was made, and the commit
    that a hub id meant, also in replicas that start later."""
    adapter: str | None = None
    """Directory of an adapter of the model, by ``marsray train``, that acts at masks only: modes ar
    and exact give the output of the model itself. Files of ``marsray calibrate`` lie there."""
    loras: list[LoraSettings] = Field(default_factory=list)
    """LoRA adapters of the model, each of which requests name like a model. Further ones may be
    loaded while the server runs."""
    lora_directories: list[str] = Field(default_factory=list)
    """Directories below which LoRA adapters may be loaded from while the server runs; by default
    none may."""
    mode: Mode | None = None
    """Decoding mode of requests that name neither a mode nor a τ. By default it is ``exact``, whose
    output is that of one-token decoding, or ``threshold`` if ``confidence_threshold`` is set here
    or autoscaling moves τ; a plain AR checkpoint always uses ``ar``."""
    confidence_threshold: float = Field(default=0.95, gt=0, le=1)
    """τ of requests in mode ``threshold`` that set none, until it is changed on the running server.
    If autoscaling moves τ, set ``autoscaling.target_threshold`` instead."""
    tiers: TierSettings = TierSettings()
    audit: AuditSettings = AuditSettings()
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """How thinking is told from answers: ``think`` by the tokens ``<think>`` and ``</think>``,
    ``auto`` the same if the chat template mentions one of them, and ``none`` not at all."""
    reasoning_fields: tuple[ReasoningField, ...] = Field(("reasoning_content",), min_length=1)
    """Names under which chats return thinking; ``reasoning`` is vLLM's, and both may be given."""
    num_replicas: int = Field(default=1, ge=1)
    """Number of replicas, each with its own engine."""
    autoscaling: AutoscalingSettings | None = None
    """Scales the number of replicas with the load; by default the number is fixed."""
    num_cpus: float = Field(default=1, ge=0)
    """CPUs that Ray reserves for a replica."""
    num_gpus: float = Field(default=0, ge=0, le=1)
    """GPUs of a replica; 0 runs it on the CPU."""
    num_threads: int | None = Field(default=None, ge=1, le=4096)
    """Number of CPU threads of a replica; by default an equal share of the machine's cores, and one
    thread less for a model of under 30 million parameters. Where other programs need the cores,
    fewer threads are faster."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of weights, keys and values; ``auto`` is the one that the checkpoint is stored
    in."""
    engine: EngineSettings = Field(default=EngineSettings(), validate_default=True)

    @field_validator("engine")
    @classmethod
    def _with_slots(cls, engine: EngineSettings, info: ValidationInfo) -> EngineSettings:
        """Give as many slots as there are LoRA adapters, if the settings give no number."""
        loras = info.data.get("loras", [])
        if not loras or "max_loras" in engine.model_fields_set:
            return engine
        return engine.model_copy(update={"max_loras": min(len(loras), _MOST_SLOTS)})

    @model_validator(mode="after")
    def _consistent(self) -> ModelSettings:
        if self.loras and not self.engine.max_loras:
            raise ValueError("engine.max_loras: it is 0, and there are loras; raise it")
        if self.autoscaling is not None:
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
    def names_threshold(self) -> bool:
        """Whether these settings choose a τ for requests that name none, or let it be moved."""
        return self.autoscaling is not None or "confidence_threshold" in self.model_fields_set

    @property
    def initial_threshold(self) -> float:
        """τ of requests that set none, before load or an administrator has changed it."""
        if self.autoscaling is not None:
            return self.autoscaling.target_threshold
        return self.confidence_threshold

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas at once."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas


class LimitSettings(Settings):
    """Limits on a single request; a request beyond them is refused before it reaches a model."""

    body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Largest request body, in bytes."""
    body_values: int = Field(default=150_000, ge=1000)
    """Largest number of names and values in the JSON of a large request body; of a prompt's token
    ids each counts as one."""
    body_wait_s: float = Field(default=60, gt=0, allow_inf_nan=False)
    """Seconds within which a request's body must have arrived."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens per prompt; by default the model's limit."""
    output_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens per output; by default the model's limit."""
    choices: int = Field(default=128, ge=1)
    """Largest number of outputs per request: ``n`` times its prompts."""
    stop_strings: int = Field(default=16, ge=0)
    """Largest number of stop strings per request."""
    stop_characters: int = Field(default=256, ge=1)
    """Longest stop string, in characters."""
    choices_per_key: int | None = Field(default=None, ge=1)
    """Largest number of outputs of one key that wait or run at once, for each model and ingress
    replica. By default there is no limit for a single key; of several, one may have as many as
    the model's queue has free places, so that alone it fills half of the queue."""
    queue_wait_s: float | None = Field(default=120, gt=0)
    """Seconds in the queue after which a request is given up; null lets it wait forever."""


class KeySettings(Settings):
    """API keys of the server. Without any key it is open to all, and listens on loopback only."""

    file: Annotated[Path, AfterValidator(_absolute)] | None = None
    """File with key entries; changes take effect while the server runs. Every replica of the
    ingress reads it on its own machine."""
    environment: str = Field(default="MARSRAY_API_KEYS", min_length=1)
    """Environment variable with key entries, used if no file is set. An ingress replica without the
    variable uses the entries that ``marsray serve`` found in its own environment."""
    entries: KeyEntries | None = None
    """Key entries, used if neither file nor variable is set."""
    reload_s: float = Field(default=2, gt=0)
    """Seconds between two checks of the file for changes."""

    @property
    def are_given(self) -> bool:
        """Whether requests need a key."""
        return self.file is not None or self.current_entries() is not None

    def current_entries(self) -> list[KeyEntry] | None:
        """Return the keys from the environment, else from ``entries``; None if there are neither.

        Raises:
            UserError: the variable cannot be read; the message names it.
        """
        text = os.environ.get(self.environment)
        return self.entries if text is None else parse_keys(text, self.environment)

    def captured(self) -> KeySettings:
        """Return these settings with the keys (as hashes) of this process's environment as entries,
        for a process on another machine.
        """
        return self.model_copy(update={"entries": self.current_entries()})


class ProxySettings(Settings):
    """How Ray Serve receives HTTP requests.

    On a running cluster its environment decides, but for ``num_replicas``: set on all nodes the
    variables below, and ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` to
    ``mars_serve.deploy.guard:guard_behind_haproxy``, or ``mars_serve.deploy.guard:guard`` with
    Serve's Python proxy.
    """

    kind: Literal["auto", "haproxy", "python"] = "auto"
    """Kind of proxy; ``auto`` is haproxy if its package is installed (Linux only), else python.
    Only haproxy closes a connection on which a client takes nothing of its answer for 60 s."""
    num_replicas: int = Field(default=1, ge=1)
    """Number of ingress replicas, which check requests, tokenize and stream. Rate limits of keys
    are divided evenly among them."""
    connections: int = Field(default=16384, ge=64)
    """Largest number of clients' connections, fewer where the limit on open files is low. With
    haproxy further ones wait, with python they are closed. Variable: MARSRAY_PROXY_CONNECTIONS."""
    connections_per_address: int = Field(default=8192, ge=0)
    """Largest number of connections of one IPv4 address or IPv6 network of 64 bits, never more than
    three quarters of all; 0 for no such limit, as behind a load balancer, whose address all clients
    have. Variable: MARSRAY_PROXY_CONNECTIONS_PER_ADDRESS."""
    request_wait_s: float = Field(default=10, gt=0, le=3600)
    """Seconds within which the headers of a request, and a body of up to 16 KB, must have arrived.
    Variable: MARSRAY_PROXY_REQUEST_WAIT_S."""


def _absolute_or_url(path: str) -> str:
    return path if "://" in path else str(_absolute(Path(path)))


class StorageSettings(Settings):
    """Place and limits of what the server keeps for keys: files, batches and stored responses.

    Keys of one tenant share what they keep, and their limits.
    """

    path: Annotated[str, AfterValidator(_absolute_or_url)] | None = None
    """Directory that all ingress replicas share, or fsspec URL of an object store, such as
    ``s3://bucket/marsray``; by default nothing is kept."""
    lifetime_days: float = Field(default=30, gt=0, le=3650)
    """Days after which what is kept is deleted."""
    bytes_per_key: int = Field(default=2 * 2**30, ge=2**20)
    """Largest size of all that is kept for a key, in bytes. Outputs of batches count, but are
    always kept."""
    objects_per_key: int = Field(default=10_000, ge=1)
    """Largest number of files, of batches and of stored responses of a key, each."""
    file_bytes: int = Field(default=200 * 2**20, ge=1024)
    """Largest file, in bytes."""
    batch_concurrency: int = Field(default=64, ge=1, le=4096)
    """Largest number of lines of batches that each ingress replica has answered at a time."""

    @property
    def lifetime_s(self) -> float:
        """Seconds after which what is kept is deleted."""
        return self.lifetime_days * 86_400


class TelemetrySettings(Settings):
    """Logs and traces of requests."""

    log_requests: bool = True
    """Log each request as a line of JSON, without its text."""
    tracing: bool = False
    """Send OpenTelemetry spans to the destination in the standard OTEL_ variables; needs
    marsray[tracing]."""


class ServeSettings(Settings):
    """A server: some models behind one address."""

    models: list[ModelSettings] = Field(min_length=1)
    host: str = "127.0.0.1"
    """Address to listen on."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Further names by which a server without keys on loopback may be addressed, such as that of a
    local proxy. Web pages could otherwise reach it by names of their own."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    insecure: bool = False
    """Allow other addresses than loopback without keys."""
    pages: bool = True
    """Serve the playground at / and the other web pages. They need no key, but show nothing without
    one."""
    keys: KeySettings = KeySettings()
    limits: LimitSettings = LimitSettings()
    proxy: ProxySettings = ProxySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    storage: StorageSettings = StorageSettings()
    drain_s: float = Field(default=600, gt=0)
    """Seconds in which a stopping replica may finish its requests; set it longer than the longest
    generation."""
    surge_percent: int = Field(default=25, ge=0, le=100)
    """Share of a deployment's replicas, in percent and rounded up, that an update starts before it
    stops old ones; 0 stops old ones first, for clusters without spare capacity."""
    cluster: ClusterSettings = ClusterSettings()

    @model_validator(mode="after")
    def _consistent(self) -> ServeSettings:
        names = [model.name for model in self.models]
        names += [lora.name for model in self.models for lora in model.loras]
        if len(set(names)) < len(names):
            raise ValueError(f"models: names must differ, also of loras, got {names}")
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

    @property
    def share_of_cores(self) -> int:
        """How many of this machine's cores there are for each replica, at least 1."""
        num_replicas = sum(model.most_replicas for model in self.models)
        return max(1, (os.cpu_count() or 1) // num_replicas)

    def pinned(self) -> ServeSettings:
        """Return settings with the checkpoints that links and hub ids lead to here and now.

        Replicas that start after a promotion have to fit the tokenizer of the ingress. `pin_model`
        tells of errors.
        """
        return self.model_copy(update={"models": [_pinned(model) for model in self.models]})


def _pinned(model: ModelSettings) -> ModelSettings:
    adapter = None if model.adapter is None else pin_path(model.adapter)
    loras = [each.model_copy(update={"path": pin_path(each.path)}) for each in model.loras]
    parts = {"path": pin_model(model.path), "adapter": adapter, "loras": loras}
    return model.model_copy(update=parts)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
