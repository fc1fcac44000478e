"""The reports of replicas and ingress replicas, which policy, dashboard and metrics read.

Counts are totals since the sender's start, so that a report that is lost costs nothing. All other
figures are those of the moment. Imports no Ray, torch or HTTP library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mars_autoscale.audit.counts import AuditTally
from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.policy.lengths import LengthCounts
from mars_autoscale.policy.observe import ReplicaLoad
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier

REPORT_VERSION = 1
"""Version of `ReplicaReport`. A field that is added with a default leaves it as it is."""


_AT_ONE = InnerLoopDecision(LiveDecoding(1.0))


class Phase(StrEnum):
    """How far a replica is in its life."""

    STARTING = "starting"
    """It loads the model and warms up."""
    READY = "ready"
    DRAINING = "draining"
    """It ends once its requests have."""
    OVERDUE = "overdue"
    """Its engine shows no sign of life."""


@dataclass(frozen=True)
class EngineStatus:
    """How full an engine is, and what it has done since its start."""

    num_requests: int = 0
    """Requests that wait or run."""
    num_running: int = 0
    num_waiting: int = 0
    """Requests that wait in the engine, and its share of those that wait before it."""
    num_pages: int = 0
    num_free_pages: int = 0
    """Pages that no request holds, including those that cache a prefix."""
    num_prefix_hit_tokens: int = 0
    """Tokens found in the prefix cache instead of being computed, over all admissions."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that have begun, prefix hits included."""
    num_generated_tokens: int = 0
    num_forward_passes: int = 0
    """Number of steps."""
    num_out_of_memory: int = 0
    """Number of steps that ran out of the device's memory and were run again in parts."""
    num_row_passes: int = 0
    """Number of rows, over all steps, that gave their request a token."""
    busy_s: float = 0.0
    """Seconds for which the engine had requests, up to the end of the last step."""
    num_held_states: int = 0
    """Slots for states of recurrent layers that requests hold."""
    num_state_snapshots: int = 0
    """Snapshots of such states by which prefixes are found."""
    num_computed_again: int = 0
    """Tokens whose pages were found in the prefix cache, but that were computed again since no
    state or no window behind them was."""

    @property
    def kv_share(self) -> float | None:
        """Share of the pages that requests hold, 0 to 1; None if the number of pages is unknown."""
        return 1 - self.num_free_pages / self.num_pages if self.num_pages else None


@dataclass(frozen=True)
class RequestCounts:
    """Counts of a replica's requests since its start."""

    prompt_tokens: int = 0
    """Prompt tokens of the requests that came to the engine, prefix hits included."""
    prefix_hit_tokens: int = 0
    """Prompt tokens among them that were found in the prefix cache."""
    lengths: LengthCounts = field(default_factory=LengthCounts)
    """Outputs, those of running requests included."""
    first_token: tuple[int, ...] = ()
    """Times to the first token, by the bucket of the metric's fine histogram."""
    token_gap: tuple[int, ...] = ()
    """Times between two tokens, likewise."""
    audits: AuditTally = field(default_factory=dict)
    """Audited outputs."""

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean number of prompt tokens of a request that have to be computed."""
        computed = self.prompt_tokens - self.prefix_hit_tokens
        return computed / max(self.lengths.num_begun, 1)


@dataclass(frozen=True)
class ReplicaReport:
    """A replica's state, load and counts, which it reports twice a second."""

    replica: str
    """Name of the replica, unique among all that ever ran."""
    node: str = ""
    """Address of the replica's node."""
    phase: Phase = Phase.READY
    engine: EngineStatus = EngineStatus()
    requests: RequestCounts = field(default_factory=RequestCounts)
    decoding: InnerLoopDecision = _AT_ONE
    """The live decoding that the next step uses, and its gain and loss by the inner loop."""
    live_version: int = 0
    """Version of the governor's value that the replica has applied."""
    is_pinned: bool = False
    """Whether τ was set by hand."""
    age_s: float = 0.0
    """Seconds for which the engine has shown no progress although it has work, or has been dead."""
    pace: float = 0.0
    """Speed as a multiple of the frontier's, see `mars_autoscale.policy.pace`; 0 if unknown."""
    version: int = REPORT_VERSION

    def load(self, now_s: float) -> ReplicaLoad:
        """Return the part of the report that decisions use; it came at ``now_s``."""
        gain, loss = self.decoding.gain, self.decoding.loss
        if self.is_pinned:  # replicas must not pay for a τ that was set by hand
            gain, loss = 1.0, 0.0
        return ReplicaLoad(
            observed_s=now_s - self.age_s,
            num_running=self.engine.num_running,
            num_waiting=self.engine.num_waiting,
            gain=gain,
            loss=loss,
            is_lowest=self.decoding.is_lowest,
            pace=self.pace,
        )


@dataclass(frozen=True)
class IngressReport:
    """An ingress replica's figures of a model's requests, which it reports twice a second."""

    ingress: str
    """Name of the ingress replica, unique among all that ever ran."""
    arrived: int = 0
    """Requests that have arrived since its start, whether or not they began."""
    prompt_tokens: int = 0
    """Prompt tokens of those."""
    waiting: Mapping[Tier, int] = field(default_factory=dict)
    """Requests that no engine has begun, by tier."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Requests that have ended since its start, by outcome; see the metric
    ``marsray_requests_total``."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Requests that were refused, by HTTP status and error code such as "503 queue_full"."""
    endpoints: Mapping[str, int] = field(default_factory=dict)
    """Requests that have ended, by endpoint such as "/v1/responses"."""
    batch_lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of batches that were answered, by outcome: "completed" or "failed"."""
