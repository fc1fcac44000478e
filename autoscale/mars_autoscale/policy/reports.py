"""The reports of replicas to the outer loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mars_autoscale.audit.counts import AuditTally
from mars_autoscale.policy.lengths import NUM_SPANS, LengthCounts
from mars_autoscale.policy.observe import ReplicaLoad


@dataclass(frozen=True)
class Totals:
    """Counts of a replica since its start."""

    arrived: int = 0
    """Requests that have arrived."""
    prompt_tokens: int = 0
    """Prompt tokens of those requests, prefix hits not counted."""
    lengths: LengthCounts = field(default_factory=LengthCounts)
    """Outputs, those of running requests included."""

    def stats(self) -> dict[str, float]:
        """Return the totals as numbers alone."""
        content = asdict(self)
        lengths = content.pop("lengths")
        for name in _SPANS:
            numbers = lengths.pop(name)
            content |= {f"{name}_{i}": number for i, number in enumerate(numbers)}
        return {key: float(value) for key, value in (content | lengths).items()}

    @classmethod
    def of_stats(cls, stats: Mapping[str, float]) -> Totals:
        """Return the totals from which `stats` made these numbers.

        Raises:
            KeyError: one is missing.
        """
        spans = {name: tuple(stats[f"{name}_{i}"] for i in range(NUM_SPANS)) for name in _SPANS}
        lengths = LengthCounts(stats["num_begun"], stats["limits"], **spans)
        return cls(int(stats["arrived"]), int(stats["prompt_tokens"]), lengths)


_SPANS = ("tokens", "passed", "ended")
"""Fields of `LengthCounts` that are numbers for each span."""
_TOTALS = frozenset(Totals().stats())
"""Names of the numbers of `Totals.stats`."""


@dataclass(frozen=True)
class LoadReport:
    """A replica's report, which it sends twice a second."""

    replica: str
    """Name of the replica, unique among all that ever ran."""
    age_s: float
    """Seconds for which the engine has shown no progress although it has work."""
    num_running: float
    num_waiting: float
    threshold: float
    """τ of tier default."""
    flex_threshold: float
    """τ of tier flex."""
    gain: float
    """Speed as a multiple of the base's at the present number of rows."""
    loss: float
    """Points of quality that a token of tier default loses now, beyond those at the target τ."""
    is_lowest: bool
    """Whether no lower τ is allowed or of any use."""
    totals: Totals
    audits: AuditTally | None = None
    """Audited outputs since the replica's start; None if the report does not tell."""

    def stats(self, now_s: float) -> dict[str, float]:
        """Return the report as numbers alone, which is what Ray Serve carries.

        Args:
            now_s: seconds since 1970, on a clock that the reader shares.
        """
        content = self.totals.stats()
        for name in _NUMBERS:
            content[name] = float(getattr(self, name))
        return {**content, "observed_s": now_s - self.age_s}

    @classmethod
    def of_stats(cls, replica: str, stats: Mapping[str, float], now_s: float) -> LoadReport | None:
        """Return the report from which `stats` made these numbers; None if one is not finite."""
        names = (*_TOTALS, *_NUMBERS, "observed_s")
        if not all(math.isfinite(stats.get(name, math.nan)) for name in names):
            return None
        numbers: dict[str, Any] = {name: stats[name] for name in _NUMBERS}
        numbers["is_lowest"] = bool(numbers["is_lowest"])
        age_s = max(now_s - stats["observed_s"], 0.0)
        return cls(replica, age_s, **numbers, totals=Totals.of_stats(stats))

    def load(self, now_s: float) -> ReplicaLoad:
        """Return the part of the report that decisions use.

        Args:
            now_s: time at which the report came.
        """
        return ReplicaLoad(
            observed_s=now_s - self.age_s,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            gain=self.gain,
            loss=self.loss,
            is_lowest=self.is_lowest,
        )


_NUMBERS = {each.name for each in fields(LoadReport)} - {"replica", "age_s", "totals", "audits"}
"""Fields of a `LoadReport` that are numbers and do not depend on the time."""
