"""One model's outer loop between its replicas' reports and its decisions. Knows no Ray.

Reports come in whenever they come; a decision is taken on what is there. What has to outlive the
process is one plain value, `ControlState`, that others may keep and hand back.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.decide import Decision, OuterSettings, OuterState, Reason, decide, held
from mars_autoscale.policy.observe import Arrivals, ReplicaLoad, Snapshot

NUM_RECORDS = 100
"""Decisions that are kept to be looked at."""
RATE_WINDOW_S = 10.0
"""Over which arrivals are averaged."""

_GONE_S = 60.0
"""A replica that has not reported for so long is forgotten, where nobody says whether it serves."""
_ENDED_WEIGHT = 0.01
"""Of one request that has ended in the mean number of output tokens."""

_NUMBERS = (
    "num_running",
    "num_waiting",
    "threshold",
    "flex_threshold",
    "gain",
    "loss",
    "is_lowest",
)
"""Of a `LoadReport`, beside its totals."""

Answer = tuple[Decision, OuterState]
Decide = Callable[[Snapshot, OuterState, Capacity, OuterSettings], Answer]


@dataclass(frozen=True)
class Totals:
    """What a replica has counted since it started."""

    arrived: int = 0
    """Requests."""
    prompt_tokens: int = 0
    """Of those, but for what was found stored."""
    ended: int = 0
    """Requests that have had output and are not there any more."""
    output_tokens: int = 0
    """Of those."""


@dataclass(frozen=True)
class LoadReport:
    """What a replica tells twice a second."""

    replica: str
    """Name, unique among all replicas that ever ran."""
    age_s: float
    """Seconds for which its engine has shown nothing new although it has work."""
    num_running: float
    num_waiting: float
    threshold: float
    """τ of class default."""
    flex_threshold: float
    gain: float
    """See `mars_autoscale.policy.inner_loop.Stage`."""
    loss: float
    """Points of quality that a token of class default loses now, beyond those at the target τ."""
    is_lowest: bool
    totals: Totals

    def stats(self, now_s: float) -> dict[str, float]:
        """As numbers alone, which is what Ray Serve carries.

        Args:
            now_s: seconds since 1970, where replicas and whoever reads this agree on them.
        """
        content = {key: float(value) for key, value in asdict(self.totals).items()}
        for name in _NUMBERS:
            content[name] = float(getattr(self, name))
        return {**content, "observed_s": now_s - self.age_s}

    @classmethod
    def of_stats(cls, replica: str, stats: Mapping[str, float], now_s: float) -> LoadReport:
        """What `stats` was made of.

        Raises:
            KeyError: it is not whole.
        """
        totals = Totals(*(int(stats[each.name]) for each in fields(Totals)))
        numbers: dict[str, Any] = {name: stats[name] for name in _NUMBERS}
        numbers["is_lowest"] = bool(numbers["is_lowest"])
        return cls(replica, max(now_s - stats["observed_s"], 0.0), **numbers, totals=totals)

    def load(self, now_s: float) -> ReplicaLoad:
        """As decisions see it."""
        return ReplicaLoad(
            now_s - self.age_s,
            self.num_running,
            self.num_waiting,
            self.gain,
            self.loss,
            self.is_lowest,
        )


@dataclass(frozen=True)
class Plan:
    """What a model's decisions go by; all its replicas have the same, but during an update."""

    capacity: Capacity
    settings: OuterSettings
    refused: str | None = None
    """Why the frontier is not used, where it is not: then there is τ = 1 alone."""
    made_s: float = 0.0
    """When, since 1970: an update's is later than what it replaces."""
    mismatch: str | None = None
    """What the frontier was measured on, where the replica runs on something else."""


@dataclass(frozen=True)
class Cluster:
    """What the cluster says about a model's replicas."""

    ready: frozenset[str]
    """Names of those that serve."""
    num_target: int
    """That were asked for, those included that start."""


@dataclass(frozen=True)
class ControlState:
    """What has to outlive a restart."""

    outer: OuterState = field(default_factory=OuterState)
    mean_output_tokens: float = 0.0


@dataclass(frozen=True)
class Record:
    """A decision with the numbers behind it."""

    time_s: float
    """Since 1970."""
    replicas_before: int
    decision: Decision
    num_ready: int
    num_starting: int
    num_running: float
    num_waiting: float
    threshold: float | None
    """Mean τ of class default over the replicas that report; None where none does."""
    flex_threshold: float | None
    requests_per_s: float | None
    """None where it is not known."""
    prompt_tokens_per_s: float | None
    mean_output_tokens: float | None
    problem: str | None = None
    """What went wrong, where something did."""

    def as_dict(self) -> dict[str, Any]:
        """Flat, as JSON may have it."""
        content = asdict(self)
        decision: dict[str, Any] = content.pop("decision")
        return decision | content


@dataclass
class _Heard:
    """A replica's latest report, and its counts within the window."""

    report: LoadReport
    plan: Plan
    heard_s: float
    counts: deque[tuple[float, Totals]] = field(default_factory=deque)


class Control:
    """One model's outer loop."""

    def __init__(self, decide: Decide = decide) -> None:
        self._decide = decide
        self._replicas: dict[str, _Heard] = {}
        self._cluster: Cluster | None = None
        self._served = frozenset[str]()
        """Replicas that the cluster has called ready at some time."""
        self.plan: Plan | None = None
        """Of the replicas that stay, that of the latest; None until one has told it."""
        self.state = ControlState()
        self.records: deque[Record] = deque(maxlen=NUM_RECORDS)
        """The oldest first."""
        self.counts = Counter[Reason]()
        """Of all decisions."""

    @property
    def decision(self) -> Decision | None:
        """The last one."""
        return self.records[-1].decision if self.records else None

    def hear(self, now_s: float, report: LoadReport, plan: Plan) -> None:
        """Take a replica's report in."""
        if self.plan is None:
            self.plan = plan
        heard = self._replicas.setdefault(report.replica, _Heard(report, plan, now_s))
        if heard.counts and _has_jumped(heard.counts[-1], now_s, report.totals):
            heard.counts.clear()
        before = heard.counts[-1][1] if heard.counts else report.totals
        heard.report, heard.plan, heard.heard_s = report, plan, now_s
        heard.counts.append((now_s, report.totals))
        while len(heard.counts) > 2 and heard.counts[1][0] < now_s - RATE_WINDOW_S:
            heard.counts.popleft()
        self._note_ended(before, report.totals)

    def overhear(self, now_s: float, replica: str, stats: Mapping[str, float]) -> None:
        """Take in what a known replica told somebody else, if it has been silent here."""
        heard = self._replicas.get(replica)
        if heard is None or self.plan is None or not _is_whole(stats):
            return
        is_silent = now_s - heard.heard_s > 2 * self.plan.settings.period_s
        if is_silent and stats["observed_s"] > heard.heard_s:
            self.hear(now_s, LoadReport.of_stats(replica, stats, now_s), heard.plan)

    def see(self, cluster: Cluster) -> None:
        """Take in what the cluster says."""
        if self._cluster is None:  # replicas that have not reported yet were asked for, too
            outer = replace(self.state.outer, num_replicas=cluster.num_target)
            self.state = replace(self.state, outer=outer)
        self._cluster = cluster
        self._served |= cluster.ready

    def restore(self, state: ControlState) -> None:
        """Go on where another one was; without effect once this one has seen the cluster.

        What was decided before that knew too little to keep.
        """
        if self._cluster is None:
            self.state = state

    def question(self, now_s: float) -> tuple[Snapshot, OuterState, Plan]:
        """What `answer` needs; the model must have a plan. Leaves out what has gone."""
        assert self.plan is not None, "a replica has reported"
        self._forget_gone(now_s, self.plan.settings)
        staying = self._staying()
        # old ones go on reporting during an update; one that is taken back goes with its replicas
        self.plan = max((each.plan for each in staying), key=_made_s, default=self.plan)
        loads = [each.report.load(each.heard_s) for each in staying]
        starting = 0
        if self._cluster is not None:  # a replica reports before the cluster calls it ready
            num_there = max(len(self._cluster.ready), len(staying))
            starting = max(0, self._cluster.num_target - num_there)
        arrivals = self._arrivals(now_s)
        latest_s = max((each.heard_s for each in self._replicas.values()), default=now_s)
        snapshot = Snapshot(now_s, loads, starting, arrivals, min(latest_s, now_s))
        return snapshot, self.state.outer, self.plan

    def answer(self, snapshot: Snapshot, state: OuterState, plan: Plan) -> Answer:
        """Decide. Pure, so that it may run beside everything else."""
        return self._decide(snapshot, state, plan.capacity, plan.settings)

    def commit(
        self, snapshot: Snapshot, decision: Decision, state: OuterState, problem: str | None = None
    ) -> Record:
        """Write a decision down; it holds from now on."""
        before = self.state.outer.num_replicas or len(snapshot.replicas) + snapshot.num_starting
        self.state = replace(self.state, outer=state)
        reports = [each.report for each in self._staying()]
        arrivals = snapshot.arrivals
        if arrivals is not None and not arrivals.is_valid:
            arrivals = None
        record = Record(
            snapshot.now_s,
            before,
            decision,
            len(snapshot.replicas),
            snapshot.num_starting,
            sum(_finite(report.num_running for report in reports)),
            sum(_finite(report.num_waiting for report in reports)),
            _mean(_finite(report.threshold for report in reports)),
            _mean(_finite(report.flex_threshold for report in reports)),
            arrivals.requests_per_s if arrivals else None,
            arrivals.prompt_tokens_per_s if arrivals else None,
            arrivals.mean_output_tokens if arrivals else None,
            problem,
        )
        self.records.append(record)
        self.counts[decision.reason] += 1
        return record

    def hold(self, snapshot: Snapshot, problem: str) -> Record:
        """Write down that nothing changes, and why: τ goes to the target."""
        assert self.plan is not None, "a replica has reported"
        decision, state = held(snapshot, self.state.outer, self.plan.settings)
        return self.commit(snapshot, decision, state, problem)

    def _staying(self) -> list[_Heard]:
        """The replicas that are not being taken down: those go on reporting until they are empty,
        but what arrives does not go to them.
        """
        ready = self._cluster.ready if self._cluster is not None else None
        if not ready:  # a cluster's controller that has begun again knows none for a moment
            return list(self._replicas.values())
        leaving = self._served - ready
        return [each for name, each in self._replicas.items() if name not in leaving]

    def _forget_gone(self, now_s: float, settings: OuterSettings) -> None:
        """Forget the silent, but for those that the cluster says serve: they may be the busy ones,
        and until they have gone no replica is ended.
        """
        ready = self._cluster.ready if self._cluster is not None else frozenset()
        longest_s = _GONE_S if self._cluster is None else 2 * settings.period_s
        for name, each in list(self._replicas.items()):
            silent_s = abs(now_s - each.heard_s)  # the clock may have been put back
            if silent_s > longest_s and name not in ready:
                del self._replicas[name]
        self._served &= self._replicas.keys() | ready

    def _arrivals(self, now_s: float) -> Arrivals | None:
        """Rates of the window; None where no replica has been heard of for long enough."""
        requests = prompts = span = 0.0
        for each in self._replicas.values():
            if abs(now_s - each.heard_s) > RATE_WINDOW_S:
                continue
            (first_s, first), (last_s, last) = each.counts[0], each.counts[-1]
            requests += last.arrived - first.arrived
            prompts += last.prompt_tokens - first.prompt_tokens
            span = max(span, last_s - first_s)
        if span < 1.0:
            return None
        # what is found stored is known later than what has arrived
        return Arrivals(requests / span, max(prompts, 0) / span, self.state.mean_output_tokens)

    def _note_ended(self, before: Totals, after: Totals) -> None:
        ended = after.ended - before.ended
        if ended <= 0:
            return
        mean = (after.output_tokens - before.output_tokens) / ended
        if not 0 <= mean < math.inf:  # it would stay for good
            return
        known = self.state.mean_output_tokens
        weight = 1 - (1 - _ENDED_WEIGHT) ** ended if known else 1.0
        self.state = replace(self.state, mean_output_tokens=known + weight * (mean - known))


def _made_s(plan: Plan) -> float:
    return plan.made_s


def _has_jumped(latest: tuple[float, Totals], now_s: float, totals: Totals) -> bool:
    """Whether the clock was put back, or a replica counts from its start again."""
    return now_s < latest[0] or totals.arrived < latest[1].arrived


def _is_whole(stats: Mapping[str, float]) -> bool:
    """Whether `LoadReport.of_stats` can be made of it."""
    names = (*(each.name for each in fields(Totals)), *_NUMBERS, "observed_s")
    return all(math.isfinite(stats.get(name, math.nan)) for name in names)


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
