"""One model's outer loop between its replicas' reports and its decisions.

Reports come at any time; a decision uses the latest ones. The state that has to survive the process
is one plain value, `SavedState`, that others may keep and hand back.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mars_autoscale.audit.counts import since
from mars_autoscale.audit.drift import Drift
from mars_autoscale.model.capacity import Capacity
from mars_autoscale.model.expectations import Expectation
from mars_autoscale.policy import budget
from mars_autoscale.policy.decide import decide, hold
from mars_autoscale.policy.decision import (
    AT_TARGET,
    AutoscalerDecision,
    Decision,
    OuterState,
    Reason,
)
from mars_autoscale.policy.lengths import LengthCounts
from mars_autoscale.policy.observe import RATE_WINDOW_S, Arrivals, Snapshot
from mars_autoscale.policy.reports import IngressReport, ReplicaReport, RequestCounts
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.tier import Tier

NUM_RECORDS = 100
"""Number of latest decisions that are kept for inspection."""

_SILENT_S = 60.0
"""Seconds without a report after which a replica is forgotten, if the cluster says nothing."""

DecisionAndState = tuple[Decision, OuterState]
Decide = Callable[[Snapshot, OuterState, Capacity, OuterSettings], DecisionAndState]


@dataclass(frozen=True)
class AutoscalingBasis:
    """The basis of a model's autoscaling: a replica's speed on each rung, and the settings.

    All of its replicas have the same one, except during an update.
    """

    capacity: Capacity
    settings: OuterSettings
    refused: str | None = None
    """Why the frontier is not used; the ladder is then τ = 1 alone. None if it is used."""
    made_s: float = 0.0
    """Seconds since 1970 at which it was made; the one with the latest time replaces others."""
    mismatch: str | None = None
    """Hardware and number type that the frontier was measured on and the replica runs on, if they
    differ."""
    expectations: tuple[Expectation, ...] = ()
    """The frontier's word about each τ that audits can check, with falling τ."""


@dataclass(frozen=True)
class ClusterView:
    """The cluster controller's view of a model's replicas."""

    ready: frozenset[str]
    """Names of the replicas that serve."""
    num_target: int
    """Replicas that are ordered, including those that are starting."""


@dataclass(frozen=True)
class SavedState:
    """The part of an outer loop that survives a restart."""

    outer: OuterState = field(default_factory=OuterState)
    lengths: LengthCounts = field(default_factory=LengthCounts)
    """Outputs of all replicas, the latest with the highest weight."""
    drift: Drift = field(default_factory=Drift)
    """Audits of what was served, and what they say about the frontier."""


_Totals = deque[tuple[float, ...]]
"""(time in s, totals) of each report of a sender within the rate window, the oldest first."""


@dataclass
class _KnownReplica:
    """A replica's latest report, and its prefix hits within the rate window."""

    report: ReplicaReport
    basis: AutoscalingBasis
    heard_s: float
    hits: _Totals = field(default_factory=_Totals)


class OuterLoop:
    """One model's outer loop, which takes its decisions by the policy ``decide``."""

    def __init__(self, decide: Decide = decide) -> None:
        self._decide = decide
        self._replicas: dict[str, _KnownReplica] = {}
        self._arrivals: dict[str, _Totals] = {}
        """Requests and prompt tokens that have arrived, by ingress replica."""
        self._cluster: ClusterView | None = None
        self._served = frozenset[str]()
        """Replicas that the cluster has called ready at some time."""
        self.basis: AutoscalingBasis | None = None
        """The latest basis among the staying replicas; None until a replica has reported."""
        self.state = SavedState()
        self.records: deque[AutoscalerDecision] = deque(maxlen=NUM_RECORDS)
        self.range = AT_TARGET
        self.counts = Counter[Reason]()

    def hear(self, now_s: float, report: ReplicaReport, basis: AutoscalingBasis) -> None:
        """Take a replica's report in."""
        if self.basis is None:
            self.basis = basis
        known = self._replicas.setdefault(report.replica, _KnownReplica(report, basis, now_s))
        before, counts = known.report.requests, report.requests
        known.report, known.basis = report, basis
        known.heard_s = now_s
        _note(known.hits, now_s, counts.prefix_hit_tokens)
        self._note_lengths(counts.lengths - before.lengths)
        self._note_audits(now_s, known, before)

    def hear_ingress(self, now_s: float, report: IngressReport) -> None:
        """Take an ingress replica's report in."""
        totals = self._arrivals.setdefault(report.ingress, _Totals())
        _note(totals, now_s, report.arrived, report.prompt_tokens)

    def see(self, cluster: ClusterView) -> None:
        """Take in what the cluster says."""
        if self._cluster is None:  # replicas that have not reported yet are ordered all the same
            outer = replace(self.state.outer, num_replicas=cluster.num_target)
            self.state = replace(self.state, outer=outer)
        self._cluster = cluster
        self._served |= cluster.ready

    def restore(self, state: SavedState) -> None:
        """Continue from another outer loop's state.

        Without effect once this one has seen the cluster. Decisions that it took before are
        dropped, because they were taken on too little.
        """
        if self._cluster is None:
            self.state = state

    def question(self, now_s: float) -> tuple[Snapshot, OuterState, AutoscalingBasis]:
        """Return the arguments for `answer`, and forget replicas that have gone.

        At least one replica must have reported.
        """
        assert self.basis is not None, "a replica has reported"
        self._forget_gone(now_s, self.basis.settings)
        staying = self._staying()
        # old replicas go on reporting during an update, and a withdrawn update's replicas vanish
        self.basis = max(
            (each.basis for each in staying), key=lambda basis: basis.made_s, default=self.basis
        )
        drift = self.state.drift.expecting(self.basis.expectations)
        self.state = replace(self.state, drift=drift)
        num_starting = 0
        if self._cluster is not None:  # a replica reports before the cluster calls it ready
            num_there = max(len(self._cluster.ready), len(staying))
            num_starting = max(0, self._cluster.num_target - num_there)
        latest_s = max((each[-1][0] for each in self._arrivals.values()), default=now_s)
        snapshot = Snapshot(
            now_s=now_s,
            replicas=[
                replace(load, loss=load.loss * drift.loss_factor)
                for each in staying
                for load in (each.report.load(each.heard_s),)
            ],
            num_starting=num_starting,
            arrivals=self._rates(now_s),
            arrivals_observed_s=min(latest_s, now_s),
            is_refuted=drift.is_refuted,
        )
        return snapshot, self.state.outer, self.basis

    def answer(
        self, snapshot: Snapshot, state: OuterState, basis: AutoscalingBasis
    ) -> DecisionAndState:
        """Decide. It changes nothing, and may run in another thread."""
        return self._decide(snapshot, state, basis.capacity, basis.settings)

    def commit(
        self, snapshot: Snapshot, decision: Decision, state: OuterState, problem: str | None = None
    ) -> AutoscalerDecision:
        """Make a decision the current one, and record it."""
        replicas_before = (
            self.state.outer.num_replicas or len(snapshot.replicas) + snapshot.num_starting
        )
        self.state = replace(self.state, outer=state)
        reports = [each.report for each in self._staying()]
        lives = [report.decoding.live for report in reports]
        arrivals = snapshot.arrivals
        if arrivals is not None and not arrivals.is_valid:
            arrivals = None
        self.range = decision.range
        record = AutoscalerDecision(
            **vars(decision.range),
            **{name: value for name, value in vars(decision).items() if name != "range"},
            time_s=snapshot.now_s,
            replicas_before=replicas_before,
            num_ready=len(snapshot.replicas),
            num_starting=snapshot.num_starting,
            num_running=sum(report.engine.num_running for report in reports),
            num_waiting=sum(report.engine.num_waiting for report in reports),
            threshold=_mean([each.threshold for each in lives]),
            flex_threshold=_mean([each.threshold_of(Tier.FLEX) for each in lives]),
            requests_per_s=arrivals.requests_per_s if arrivals else None,
            prompt_tokens_per_s=arrivals.prompt_tokens_per_s if arrivals else None,
            mean_output_tokens=arrivals.mean_output_tokens if arrivals else None,
            problem=problem,
        )
        self.records.append(record)
        self.counts[decision.reason] += 1
        return record

    def hold(self, snapshot: Snapshot, problem: str) -> AutoscalerDecision:
        """Record that the replicas stay and τ goes to the target, and why."""
        assert self.basis is not None, "a replica has reported"
        decision, state = hold(snapshot, self.state.outer, self.basis.settings)
        return self.commit(snapshot, decision, state, problem)

    @property
    def spent_share(self) -> float | None:
        """Share of the loss budget that was spent within the last hour; None if it is unknown."""
        if self.basis is None:
            return None
        return budget.spent_share(self.state.outer.losses, self.basis.settings.loss_budget)

    def trust_frontier(self) -> None:
        """Forget what audits have said about the frontier, such as an alarm."""
        self.state = replace(self.state, drift=Drift(self.state.drift.expectations))

    def _staying(self) -> list[_KnownReplica]:
        """Return the replicas that are not being stopped.

        Stopped ones go on reporting until they are empty, but get no new requests.
        """
        ready = self._cluster.ready if self._cluster is not None else None
        if not ready:  # a restarted cluster controller knows no replica for a moment
            return list(self._replicas.values())
        leaving = self._served - ready
        return [each for name, each in self._replicas.items() if name not in leaving]

    def _forget_gone(self, now_s: float, settings: OuterSettings) -> None:
        """Forget silent replicas, except those that the cluster says serve.

        A silent replica that serves may be a busy one; while it is known, none is stopped.
        """
        ready = self._cluster.ready if self._cluster is not None else frozenset()
        longest_s = _SILENT_S if self._cluster is None else 2 * settings.period_s
        for name, each in list(self._replicas.items()):
            silent_s = abs(now_s - each.heard_s)  # the clock may have been put back
            if silent_s > longest_s and name not in ready:
                del self._replicas[name]
        self._served &= self._replicas.keys() | ready
        for name, totals in list(self._arrivals.items()):
            if abs(now_s - totals[-1][0]) > _SILENT_S:
                del self._arrivals[name]

    def _rates(self, now_s: float) -> Arrivals | None:
        """Return the rates over the window; None if no ingress has reported for long enough."""
        arrivals = [_growth(each, now_s) for each in self._arrivals.values()]
        span = max((seconds for seconds, *_ in arrivals), default=0.0)
        if span < 1.0:
            return None
        requests = sum(num for _, num, _ in arrivals)
        prompts = sum(tokens for *_, tokens in arrivals)
        hits = sum(_growth(each.hits, now_s)[1] for each in self._replicas.values())
        # a prompt's hits are known after it has arrived, so the difference may be below 0
        return Arrivals(requests / span, max(prompts - hits, 0) / span, self.state.lengths.mean)

    def _note_audits(self, now_s: float, known: _KnownReplica, before: RequestCounts) -> None:
        """Take in a replica's audits, unless they are of another model than the latest one."""
        drift = self.state.drift
        if known.basis.expectations == drift.expectations:
            new = since(known.report.requests.audits, before.audits)
            self.state = replace(self.state, drift=drift.heard(new, now_s))

    def _note_lengths(self, new: LengthCounts) -> None:
        if new.is_valid:  # others would spoil the mean for long
            self.state = replace(self.state, lengths=self.state.lengths.followed_by(new))


def _note(kept: _Totals, now_s: float, *totals: float) -> None:
    """Add a report, and forget those that have left the rate window."""
    new = (now_s, *totals)
    if kept and any(after < before for before, after in zip(kept[-1], new, strict=True)):
        kept.clear()  # the clock was put back, or the sender counts anew
    kept.append(new)
    while len(kept) > 2 and kept[1][0] < now_s - RATE_WINDOW_S:
        kept.popleft()


def _growth(kept: _Totals, now_s: float) -> list[float]:
    """Return the seconds between the first and the latest report, and how much each total grew.

    Nothing has grown if the latest report is older than the rate window.
    """
    is_silent = abs(now_s - kept[-1][0]) > RATE_WINDOW_S
    first = kept[-1] if is_silent else kept[0]
    return [after - before for before, after in zip(first, kept[-1], strict=True)]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
