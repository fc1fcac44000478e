"""Keeps the live τ of an application's models, and runs the outer loops that autoscale them.

Replicas wait here for newer values and report their load; Ray Serve's controller asks for the
number of replicas. Every value lives in memory only: replicas and controller hand what they know
to a governor that was started again. `mars_serve.control.governor_actor` makes a Ray actor of it.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from prometheus_client.core import Metric

from mars_autoscale.policy.decide import decide
from mars_autoscale.policy.decision import AutoscalerDecision, Reason, ThresholdRange
from mars_autoscale.policy.metrics import AutoscalerMetrics
from mars_autoscale.policy.outer_loop import (
    AutoscalingBasis,
    ClusterView,
    Decide,
    DecisionAndState,
    OuterLoop,
    SavedState,
)
from mars_autoscale.policy.reports import REPORT_VERSION, IngressReport, ReplicaReport
from mars_serve.config.loras import LoraChanges
from mars_serve.config.served import Explanation, Picture, PublishedThreshold
from mars_serve.control.dashboard import ModelDashboard

WAIT_S = 10.0
"""Longest time in seconds that one call of `Governor.wait` waits; the next call shows that the
replica is still there."""
IDLE_S = 60.0
"""Seconds without a call after which an autoscaled model is forgotten."""

_LATE = "the decision takes longer than its period"

_log = logging.getLogger(__name__)


class Governor:
    """The live τ of some models, and their outer loops; all methods run on one event loop.

    ``decide`` is the policy, ``clock`` the time in seconds by which models are forgotten.
    """

    def __init__(
        self, decide: Decide = decide, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._decide = decide
        self._clock = clock
        self._used_s: dict[str, float] = {}
        self._id = uuid.uuid4().hex
        self._published: dict[str, PublishedThreshold] = {}
        self._outdated: dict[str, float] = {}
        """Version up to which values of earlier governors are outdated; infinite once τ was set by
        hand here."""
        self._loops: dict[str, OuterLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dashboards: dict[str, ModelDashboard] = {}
        self._loras: dict[str, LoraChanges] = {}
        self._changed = asyncio.Event()
        self.last_wait = time.monotonic()
        """Time at which a replica last called `wait`."""

    async def wait(
        self, model: str, known: PublishedThreshold, timeout_s: float = WAIT_S
    ) -> PublishedThreshold:
        """Wait for a value newer than ``known``; after ``timeout_s``, return the present one.

        A governor that was started again learns the value of the one before it from ``known``.
        """
        self.last_wait = time.monotonic()
        self._use(model)
        self._hear(model, known)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._published[model].version <= known.version:
                    await self._changed.wait()
        self.last_wait = time.monotonic()
        return self._published[model]

    async def value(self, model: str, known: PublishedThreshold) -> PublishedThreshold:
        """Return the latest value, which may be the caller's ``known`` one."""
        self._hear(model, known)
        return self._published[model]

    async def set(self, model: str, threshold: float | None) -> PublishedThreshold:
        """Set a model's τ by hand, in (0, 1]; None gives it back to the autoscaler."""
        self._outdated[model] = math.inf
        if threshold is not None:
            return self._publish(model, threshold, is_pinned=True)
        known = self._published.get(model)
        return self._publish(model, known.threshold if known else 1.0)

    async def report(
        self, model: str, report: ReplicaReport, basis: AutoscalingBasis | None
    ) -> None:
        """Take a replica's report in.

        The first ``basis`` of a model's autoscaling starts its decisions. It is None while the
        replica starts, and for a model that is not autoscaled.
        """
        if report.version != REPORT_VERSION:
            raise ValueError(f"reports have version {REPORT_VERSION} here, not {report.version}")
        now_s, dashboard = time.time(), self._dashboard(model)
        dashboard.members.hear(report, now_s)
        self._advance(model, dashboard)
        if basis is None:
            return
        self._use(model)
        loop = self._loops.setdefault(model, OuterLoop(self._decide))
        loop.hear(now_s, report, basis)
        if model not in self._tasks:
            self._tasks[model] = asyncio.create_task(self._decide_forever(model, loop))

    async def report_ingress(self, model: str, report: IngressReport) -> None:
        """Take an ingress replica's report in."""
        now_s, dashboard = time.time(), self._dashboard(model)
        dashboard.members.hear_ingress(report, now_s)
        self._advance(model, dashboard)
        if model in self._loops:
            self._loops[model].hear_ingress(now_s, report)

    async def loras(self, model: str, known: LoraChanges) -> LoraChanges:
        """Return the latest changes of a model's LoRA adapters, which may be the caller's ``known``
        ones: so it makes a change, and so a governor that was started again learns them. Of two
        changes with one version, the first counts.
        """
        own = self._loras.setdefault(model, known)
        if known.version > own.version:
            self._loras[model] = known
        return self._loras[model]

    async def tick(
        self,
        model: str,
        ready: list[str],
        num_target: int,
        known: SavedState | None,
    ) -> tuple[SavedState, int | None, float]:
        """Exchange views with the cluster's controller, which calls this about once a second.

        ``ready`` are the names of the replicas that serve, ``num_target`` are ordered, and a new
        governor continues from ``known``, the state that the last call returned. Returned are the
        state to hand in next time, the number of replicas decided on (None before the first
        decision) and the age of that decision in seconds.
        """
        self._use(model)
        loop = self._loops.setdefault(model, OuterLoop(self._decide))
        if known is not None:
            loop.restore(known)
        loop.see(ClusterView(frozenset(ready), num_target))
        if not loop.records:
            return loop.state, None, math.inf
        age_s = abs(time.time() - loop.records[-1].time_s)
        return loop.state, loop.state.outer.num_replicas, age_s

    async def explain(self, model: str) -> Explanation | None:
        """Return a model's latest decisions; None if it is not autoscaled."""
        loop = self._loops.get(model)
        if loop is None:
            return None
        return Explanation(loop.basis, list(loop.records), loop.state.drift)

    async def trust_frontier(self, model: str) -> None:
        """Forget what audits have said about a model's frontier, such as an alarm."""
        if model in self._loops:
            self._loops[model].trust_frontier()
            _log.info("autoscaling %s trusts its frontier again, by hand", model)

    async def picture(self, model: str, since_s: int | None) -> Picture:
        """Return a model's picture for dashboards: what was added since a time, or all of it."""
        dashboard = self._dashboard(model)
        self._advance(model, dashboard)
        return dashboard.picture(since_s, self._loops.get(model), self._published.get(model))

    async def metrics(self, model: str) -> list[Metric]:
        """Return the metrics of a model's autoscaling."""
        loops = {name: each for name, each in self._loops.items() if name == model}
        return list(AutoscalerMetrics(loops).collect())

    def _dashboard(self, model: str) -> ModelDashboard:
        """Return a model's dashboard.

        Ingress replicas report about the models of the application alone, which are few; the
        dashboard of one that is no longer served ends with the governor.
        """
        return self._dashboards.setdefault(model, ModelDashboard())

    def _advance(self, model: str, dashboard: ModelDashboard) -> None:
        dashboard.advance(time.time(), self._loops.get(model), self._published.get(model))

    async def _decide_forever(self, model: str, loop: OuterLoop) -> None:
        assert loop.basis is not None, "a replica has reported"
        # callers that know the state before, such as a τ set by hand, get a period to tell it
        await asyncio.sleep(loop.basis.settings.period_s)
        late: asyncio.Task[DecisionAndState] | None = None
        while True:
            period_s, began_s = loop.basis.settings.period_s, time.monotonic()
            try:
                record, late = await _decide_once(loop, late)
                self._announce(model, loop, record)
            except Exception:  # without this task, nobody would decide any more
                _log.exception("a decision for %s failed; trying again", model)
            await asyncio.sleep(max(period_s - (time.monotonic() - began_s), 0.0))

    def _use(self, model: str) -> None:
        """Note that a model is in use, and forget autoscaled models that no longer are.

        A model without autoscaling is never forgotten: all of its replicas may be restarting.
        """
        now = self._clock()
        for name in [each for each in self._loops if now - self._used_s[each] > IDLE_S]:
            del self._loops[name]
            self._published.pop(name, None)
            self._outdated.pop(name, None)
            if name in self._tasks:
                self._tasks.pop(name).cancel()
        self._used_s[model] = now

    def _announce(self, model: str, loop: OuterLoop, record: AutoscalerDecision) -> None:
        """Publish a decision's range to the replicas, and log the decision if it changes much."""
        before = loop.records[-2] if len(loop.records) > 1 else None
        is_new = before is None or _gist(before) != _gist(record)
        if is_new or record.num_replicas != record.replicas_before or record.problem is not None:
            _log.info("autoscaling %s: %s", model, record.model_dump_json())
        published = self._published.get(model)
        if published is None or not published.is_pinned:
            threshold = record.threshold if record.threshold is not None else 1.0
            self._publish(model, threshold, loop.range)

    def _publish(
        self,
        model: str,
        threshold: float,
        range_: ThresholdRange | None = None,
        *,
        is_pinned: bool = False,
    ) -> PublishedThreshold:
        """Publish a new value to the replicas.

        Versions are milliseconds since 1970, or count on from the highest one that was heard of:
        the clock may have been put back.
        """
        before = self._published.get(model, PublishedThreshold(0, threshold))
        version = max(time.time_ns() // 1_000_000, before.version + 1)
        self._show(model, PublishedThreshold(version, threshold, range_, is_pinned, self._id))
        return self._published[model]

    def _hear(self, model: str, told: PublishedThreshold) -> None:
        """Take in a value that a caller knows, perhaps one of an earlier governor.

        The highest version is the latest. A pinned one counts more than what was decided
        here without knowing it, and what was set by hand here counts more than any. What counts
        gets a version above both, whatever clocks say, so that every replica takes it.
        """
        current = self._published.get(model)
        is_own = current is not None and current.governor == self._id
        if is_own and told.governor == self._id:
            return
        is_news = told.version > self._outdated.get(model, -1)
        wins = is_news and (told.is_pinned or not is_own)
        if is_news:
            self._outdated[model] = told.version
        if current is None or (wins and told.version > current.version):
            self._show(model, told)
        elif wins or (is_own and told.version >= current.version):
            version = max(told.version, current.version) + 1
            newest = told if wins else current
            self._show(model, replace(newest, version=version, governor=self._id))

    def _show(self, model: str, published: PublishedThreshold) -> None:
        self._published[model] = published
        self._changed.set()  # wakes all callers that wait now
        self._changed.clear()


def _gist(record: AutoscalerDecision) -> tuple[Reason, bool, bool, bool]:
    """Return what a decision says beside its numbers."""
    return record.reason, record.is_saturated, record.is_overspent, record.is_refuted


async def _decide_once(
    loop: OuterLoop, late: asyncio.Task[DecisionAndState] | None
) -> tuple[AutoscalerDecision, asyncio.Task[DecisionAndState] | None]:
    """Take a decision, or hold if there is none within its period.

    ``late`` is the answer that an earlier decision still waits for; its result is discarded.
    Returned are the decision, and the answer that is late now.
    """
    assert loop.basis is not None, "a replica has reported"
    question = loop.question(time.time())
    # a policy that hangs keeps its thread, and everything else goes on
    answer = late or asyncio.create_task(asyncio.to_thread(loop.answer, *question))
    await asyncio.wait([answer], timeout=loop.basis.settings.period_s)
    if not answer.done():
        return loop.hold(question[0], _LATE), answer
    error = answer.exception()
    if error is not None:
        _log.error("the autoscaler cannot decide; nothing changes", exc_info=error)
        return loop.hold(question[0], f"{type(error).__name__}: {error}"), None
    if late is not None:
        return loop.hold(question[0], _LATE), None
    decision, state = answer.result()
    return loop.commit(question[0], decision, state), None
