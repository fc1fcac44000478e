"""Knows a model's replicas and ingress replicas by their reports, and sums up what they count.

Imports no Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from mars_platform.method.live import LiveDecoding
from mars_serve.control.quantiles import increments
from mars_serve.observability.figures import (
    IngressFigures,
    ReplicaCounts,
    ReplicaFigures,
    ReplicaState,
)

SILENT_S = 5.0
"""Seconds without a report after which a replica counts as silent."""
_GONE_S = 15.0
"""Seconds without a report after which a replica is forgotten."""
_DRAINED_S = 3.0
"""Seconds without a report after which one that drains has ended."""
_SUMMED = [each.name for each in fields(ReplicaCounts) if each.type == "int"]


@dataclass(frozen=True)
class Change:
    """A change at a replica that the dashboard reports."""

    before: ReplicaFigures | None
    """Its figures before the change; None for a replica that has come."""
    after: ReplicaFigures | None
    """Its figures since; None for one that has gone."""

    @property
    def is_of_state(self) -> bool:
        """Whether the replica came, went, or does something else now."""
        if self.before is None or self.after is None:
            return True
        return self.before.state is not self.after.state


@dataclass
class Heard:
    """A replica's latest figures, and when they came."""

    figures: ReplicaFigures
    heard_s: float
    since_s: float
    """Time of its first report in its present state."""


@dataclass
class Sums:
    """Counts of all replicas and ingress replicas within one second."""

    replicas: Counter[str] = field(default_factory=Counter)
    """Increments by the name of the field of `ReplicaCounts`."""
    first_token: Counter[int] = field(default_factory=Counter)
    token_gap: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    moves: int = 0


class Members:
    """A model's replicas and ingress replicas, as they have reported lately."""

    def __init__(self) -> None:
        self._replicas: dict[str, Heard] = {}
        self._ingresses: dict[str, tuple[IngressFigures, float]] = {}
        self._sums = Sums()
        self._changes = list[Change]()

    def hear(self, figures: ReplicaFigures, now_s: float) -> None:
        """Take a replica's report in.

        What a replica has counted before its first report is left out: a governor that was started
        again has not seen when.
        """
        known = self._replicas.get(figures.replica)
        if known is None:
            self._replicas[figures.replica] = Heard(figures, now_s, now_s)
            self._changes.append(Change(None, figures))
            return
        before = known.figures
        self._add(figures.counts, before.counts)
        if before.state is not figures.state:
            known.since_s = now_s
            self._changes.append(Change(before, figures))
        elif before.live != figures.live:
            self._changes.append(Change(before, figures))
        known.figures, known.heard_s = figures, now_s

    def hear_ingress(self, figures: IngressFigures, now_s: float) -> None:
        """Take an ingress replica's report in."""
        known = self._ingresses.get(figures.ingress)
        self._ingresses[figures.ingress] = figures, now_s
        if known is None:
            return
        before = known[0]
        # a replica's name is never used again, so counts do not fall
        self._sums.ended += Counter(figures.ended) - Counter(before.ended)
        self._sums.rejected += Counter(figures.rejected) - Counter(before.rejected)
        self._sums.moves += max(figures.moves - before.moves, 0)

    def forget_gone(self, now_s: float) -> None:
        """Forget those that have been silent for long."""
        for name, each in list(self._replicas.items()):
            drains = each.figures.state is ReplicaState.DRAINING
            if now_s - each.heard_s > (_DRAINED_S if drains else _GONE_S):
                del self._replicas[name]
                self._changes.append(Change(each.figures, None))
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

    def serving(self) -> list[ReplicaFigures]:
        """Return the figures of the replicas whose engines run, those that drain included."""
        found = (each.figures for each in self._replicas.values())
        return [each for each in found if each.state is not ReplicaState.STARTING]

    def waiting_by_tier(self) -> Counter[str]:
        """Return the number of requests that no engine has begun, by tier."""
        waiting = Counter[str]()
        for figures, _ in self._ingresses.values():
            waiting.update({tier.value: num for tier, num in figures.waiting.items()})
        return waiting

    def lives(self) -> Iterator[LiveDecoding]:
        """Yield the live decoding of each replica that takes requests."""
        for figures in self.serving():
            if figures.state is ReplicaState.READY:
                yield figures.live

    def _add(self, now: ReplicaCounts, before: ReplicaCounts) -> None:
        is_new = now.arrived < before.arrived or now.generated_tokens < before.generated_tokens
        if is_new:  # an engine that was started again under the same name
            before = ReplicaCounts()
        for name in _SUMMED:
            self._sums.replicas[name] += max(getattr(now, name) - getattr(before, name), 0)
        self._sums.first_token.update(increments(now.first_token, before.first_token))
        self._sums.token_gap.update(increments(now.token_gap, before.token_gap))
