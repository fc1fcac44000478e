"""Knows a model's replicas and ingress replicas by their reports, and sums up what they count.

Imports no Ray.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mars_autoscale.policy.reports import IngressReport, Phase, ReplicaReport
from mars_platform.method.mode import LiveDecoding
from mars_serve.control.quantiles import increments

SILENT_S = 5.0
"""Seconds without a report after which a replica counts as silent."""
_GONE_S = 15.0
"""Seconds without a report after which a replica is forgotten."""
_DRAINED_S = 3.0
"""Seconds without a report after which one that drains has ended."""
_COUNTED = ("ended", "rejected", "endpoints", "batch_lines")
"""Fields of `IngressReport` whose increments are those of `Sums`."""
_SUMMED = ("num_prompt_tokens", "num_prefix_hit_tokens", "num_generated_tokens", "num_row_passes")


@dataclass(frozen=True)
class Change:
    """A change at a replica that the dashboard reports."""

    before: ReplicaReport | None
    after: ReplicaReport | None
    """Its report since; None for one that has gone."""

    @property
    def is_of_state(self) -> bool:
        """Whether the replica came, went, or does something else now."""
        if self.before is None or self.after is None:
            return True
        return self.before.phase is not self.after.phase


@dataclass
class Heard:
    """A replica's latest report, and when it came."""

    report: ReplicaReport
    heard_s: float
    since_s: float
    """Time of its first report in its present phase."""


@dataclass
class Sums:
    """Counts of all replicas and ingress replicas within one second."""

    replicas: Counter[str] = field(default_factory=Counter)
    """Increments by the name of the field of `EngineStatus`."""
    first_token: Counter[int] = field(default_factory=Counter)
    token_gap: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    batch_lines: Counter[str] = field(default_factory=Counter)
    arrived: int = 0


class ReplicaRegistry:
    """A model's replicas and ingress replicas, as they have reported lately."""

    def __init__(self) -> None:
        self._replicas: dict[str, Heard] = {}
        self._ingresses: dict[str, tuple[IngressReport, float]] = {}
        self._sums = Sums()
        self._changes = list[Change]()

    def hear(self, report: ReplicaReport, now_s: float) -> None:
        """Take a replica's report in.

        What a replica has counted before its first report is left out: a governor that was started
        again has not seen when.
        """
        known = self._replicas.get(report.replica)
        if known is None:
            self._replicas[report.replica] = Heard(report, now_s, now_s)
            self._changes.append(Change(None, report))
            return
        before = known.report
        self._add(report, before)
        if before.phase is not report.phase:
            known.since_s = now_s
            self._changes.append(Change(before, report))
        elif before.decoding.live != report.decoding.live:
            self._changes.append(Change(before, report))
        known.report, known.heard_s = report, now_s

    def hear_ingress(self, report: IngressReport, now_s: float) -> None:
        """Take an ingress replica's report in."""
        known = self._ingresses.get(report.ingress)
        self._ingresses[report.ingress] = report, now_s
        if known is None:
            return
        before = known[0]
        # a replica's name is never used again, so counts do not fall
        self._sums.arrived += report.arrived - before.arrived
        for name in _COUNTED:
            added = Counter(getattr(report, name)) - Counter(getattr(before, name))
            getattr(self._sums, name).update(added)

    def forget_gone(self, now_s: float) -> None:
        """Forget those that have been silent for long."""
        for name, each in list(self._replicas.items()):
            drains = each.report.phase is Phase.DRAINING
            if now_s - each.heard_s > (_DRAINED_S if drains else _GONE_S):
                del self._replicas[name]
                self._changes.append(Change(each.report, None))
        for name, (_, heard_s) in list(self._ingresses.items()):
            if now_s - heard_s > _GONE_S:
                del self._ingresses[name]

    def take_sums(self) -> Sums:
        """Return what was counted since the last call."""
        sums, self._sums = self._sums, Sums()
        return sums

    def take_changes(self) -> list[Change]:
        """Return what has changed since the last call."""
        changes, self._changes = self._changes, []
        return changes

    @property
    def replicas(self) -> list[Heard]:
        """All replicas by name."""
        return [self._replicas[name] for name in sorted(self._replicas)]

    def serving(self) -> list[ReplicaReport]:
        """Return the reports of the replicas whose engines run, those that drain included."""
        found = (each.report for each in self._replicas.values())
        return [each for each in found if each.phase is not Phase.STARTING]

    def waiting_by_tier(self) -> Counter[str]:
        """Return the number of requests that no engine has begun, by tier."""
        waiting = Counter[str]()
        for report, _ in self._ingresses.values():
            waiting.update({tier.value: num for tier, num in report.waiting.items()})
        return waiting

    def lives(self) -> Iterator[LiveDecoding]:
        """Yield the live decoding of each replica that takes requests."""
        for report in self.serving():
            if report.phase is Phase.READY:
                yield report.decoding.live

    def _add(self, now: ReplicaReport, before: ReplicaReport) -> None:
        if now.engine.num_generated_tokens < before.engine.num_generated_tokens:
            before = ReplicaReport(now.replica)  # the engine was started again
        for name in _SUMMED:
            added = getattr(now.engine, name) - getattr(before.engine, name)
            self._sums.replicas[name] += max(added, 0)
        counts, old = now.requests, before.requests
        self._sums.first_token.update(increments(counts.first_token, old.first_token))
        self._sums.token_gap.update(increments(counts.token_gap, old.token_gap))
