"""Tells from audits whether a frontier still holds for what is served.

A frontier goes wrong when the weights or the prompts change. One figure of it can be checked on
served outputs: how many of their tokens are the first to differ from mode exact. It is watched by
Shiryaev-Roberts detectors

    R = (1 + R before) * e,    alarm when R >= A

where e is a likelihood ratio that gains nothing on average while the frontier holds, whatever it is
within its interval. Then R minus the number of audits gains nothing on average either, and the mean
number of audits until a false alarm is at least A, however long one watches (Shin, Ramdas and
Rinaldo, "E-detectors", arXiv 2203.03532, theorem 2.4). Losses of twice what the frontier says and
more are found within hundreds of audits, those that exceed it by a third within thousands.

Nobody may raise the alarm with prompts of their own choice. So it takes the evidence of all audits,
and as much without those of any one tenant. Each is a detector as above, and of several that have
to agree, the false alarms are as far apart at least as those of one. Only while hardly anything of
others has been audited, one tenant's outputs are all that there is, and count alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mars_autoscale.audit.counts import AuditCounts, AuditTally, added, of_all_groups
from mars_autoscale.model.expectations import Expectation, expectation_of

_AUDITS_TO_FALSE_ALARM = 1e7
"""Mean number of audits until a false alarm, at least: one a second makes that 2,800 hours."""
_FACTORS = (2.0, 4.0)
"""Multiples of the expected rate of divergence that the detector looks for."""
_PRIOR_DIVERGED = 10.0
"""Expected divergences as which the frontier's own word counts against that of the audits."""
_HALF_LIFE_DIVERGED = 50.0
"""Expected divergences after which earlier ones count half, as prompts and weights change."""
_FEW = 20
"""Audits of others below which one tenant's may raise an alarm alone."""
_NONE = -math.inf
"""Logarithm of a detector that has seen nothing."""


@dataclass(frozen=True)
class Evidence:
    """The evidence of some audits against a frontier."""

    log_divergence: tuple[float, ...] = (_NONE,) * len(_FACTORS)
    """Natural logarithm of the detector of each factor."""
    recent_diverged: float = 0.0
    """Divergences, the latest with the highest weight."""
    recent_expected: float = 0.0
    """Divergences that the frontier let expect at the most, weighted alike."""
    num_outputs: int = 0
    has_alarmed: bool = False
    """Whether a detector has reached its limit at some time."""

    def and_of(self, counts: AuditCounts, expectation: Expectation) -> Evidence:
        """Return this and that of further audits."""
        events = counts.num_tokens * expectation.divergence
        divergence = _moved(self.log_divergence, _log_ratios(counts.num_diverged, events))
        weight = 0.5 ** (events / _HALF_LIFE_DIVERGED)
        return Evidence(
            divergence,
            self.recent_diverged * weight + counts.num_diverged,
            self.recent_expected * weight + events,
            self.num_outputs + counts.num_outputs,
            self.has_alarmed or _log_mean(divergence) >= _ALARM,
        )

    @property
    def log(self) -> float:
        """Natural logarithm of the mean of the detectors, at least 0."""
        return max(_log_mean(self.log_divergence), 0.0)

    @property
    def loss_factor(self) -> float:
        """Ratio of the divergences that were found to those that were expected at the most, with
        the frontier's own word among the evidence; at least 1.
        """
        found = self.recent_diverged + _PRIOR_DIVERGED
        return max(found / (self.recent_expected + _PRIOR_DIVERGED), 1.0)


@dataclass(frozen=True)
class Drift:
    """Holds what the audits have said about one frontier; plain data that can be pickled."""

    expectations: tuple[Expectation, ...] = ()
    """The frontier's own words, see `mars_autoscale.model.expectations`."""
    tally: AuditTally = field(default_factory=dict)
    """All audited outputs, without regard to groups."""
    whole: Evidence = Evidence()
    """The evidence of all audits."""
    without: Mapping[int, Evidence] = field(default_factory=dict)
    """The evidence of all audits but those of one group of tenants, by group."""
    refuted_s: float | None = None
    """Time of the alarm in seconds since 1970; None before it. The alarm stays, unless it came
    from one tenant alone and others are audited now."""

    def heard(self, new: AuditTally, now_s: float) -> Drift:
        """Take in newly audited outputs."""
        if not new:
            return self
        # nothing of a group that is new belongs to the evidence so far
        groups = {*self.without, *(key.group for key in new)}
        whole, without = self.whole, {each: self.without.get(each, self.whole) for each in groups}
        for group, counts, expectation in self._comparable(new):
            whole = whole.and_of(counts, expectation)
            for other in groups - {group}:
                without[other] = without[other].and_of(counts, expectation)
        found = replace(
            self, tally=added(self.tally, of_all_groups(new)), whole=whole, without=without
        )
        is_refuted = all(each.has_alarmed for each in found._decisive)
        refuted_s = now_s if self.refuted_s is None else self.refuted_s
        return replace(found, refuted_s=refuted_s if is_refuted else None)

    def expecting(self, expectations: tuple[Expectation, ...]) -> Drift:
        """Return this, or a new start if the frontier says something else."""
        return self if expectations == self.expectations else Drift(expectations)

    @property
    def is_refuted(self) -> bool:
        """Whether the audits contradict the frontier."""
        return self.refuted_s is not None

    @property
    def loss_factor(self) -> float:
        """Factor, at least 1, by which what is served loses more than the frontier says."""
        return min(each.loss_factor for each in self._decisive)

    @property
    def evidence(self) -> float:
        """How far the detectors are on the way to an alarm: 0 at the start, 1 at the alarm."""
        return min(each.log for each in self._decisive) / _ALARM

    @property
    def _decisive(self) -> list[Evidence]:
        """The evidence that has to agree: of all, and without each group if others have some."""
        others = self.without.values()
        return [self.whole, *(each for each in others if each.num_outputs >= _FEW)]

    def _comparable(self, tally: AuditTally) -> Iterable[tuple[int, AuditCounts, Expectation]]:
        """Yield the groups and counts that the frontier says something about: of plain outputs."""
        for key, counts in tally.items():
            expectation = expectation_of(self.expectations, key.threshold)
            if expectation is not None and key.is_plain:
                yield key.group, counts, expectation


def _log_ratios(num_diverged: int, expected: float) -> list[float]:
    """Return the logarithm of each factor's likelihood ratio.

    An output's tokens diverge at a constant rate r or k * r until the first one does. The ratio is
    k^d * exp(-(k - 1) * expected), which gains nothing on average at r and loses below it.
    """
    return [num_diverged * math.log(k) - (k - 1) * expected for k in _FACTORS]


def _moved(logs: Sequence[float], steps: Sequence[float]) -> tuple[float, ...]:
    """Return the logarithm of (1 + R) * e for each detector."""
    return tuple(_log_1_plus_exp(log) + step for log, step in zip(logs, steps, strict=True))


def _log_1_plus_exp(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def _log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of detectors."""
    highest = max(logs)
    if highest == _NONE:
        return _NONE
    return highest + math.log(sum(math.exp(log - highest) for log in logs) / len(logs))


_ALARM = math.log(_AUDITS_TO_FALSE_ALARM)
"""Logarithm of the detectors' limit."""
