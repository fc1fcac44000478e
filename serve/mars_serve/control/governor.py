"""Where the live τ of an application's models is kept and their autoscaling is decided.

One named actor for each application holds the values; replicas wait at it for newer ones, and tell
it their load. It may die at any time: replicas go on with what they have, whoever needs it next
starts it again, and tells the new one what the old one knew. It ends by itself once no replica has
waited for a while, which is when the application is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from mars_autoscale.policy.control import (
    Answer,
    Cluster,
    Control,
    ControlState,
    Decide,
    LoadReport,
    Plan,
    Record,
)
from mars_autoscale.policy.decide import Decision, Reason, decide
from mars_autoscale.policy.metrics import AutoscalerMetrics, exposition
from mars_autoscale.ray.ray_policy import NAMESPACE, governor_name
from mars_serve.config.served import Explanation, LiveThreshold, ThresholdRange
from mars_serve.observability.ray_metrics import RayMirror

WAIT_S = 10.0
"""Longest that one call waits; a replica shows by the next that it is still there."""
_IDLE_S = 60.0
"""An actor at which nobody has waited for so long ends itself, and one that goes on for others
forgets an autoscaled model of which it has not heard for so long."""

_LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s %(message)s"

_LATE = "the decision takes longer than its period"

_log = logging.getLogger(__name__)


class Governor:
    """The live τ of some models, and their outer loops. Knows no Ray; all methods run on one event
    loop.
    """

    def __init__(
        self, decide: Decide = decide, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._decide = decide
        self._clock = clock
        self._used_s: dict[str, float] = {}
        self._live: dict[str, LiveThreshold] = {}
        self._controls: dict[str, Control] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.last_wait = time.monotonic()
        """When a replica asked last."""

    async def wait(
        self, model: str, known: LiveThreshold, timeout_s: float = WAIT_S
    ) -> LiveThreshold:
        """A value newer than ``known``, as soon as there is one; else the same after a while.

        A ``known`` that is newer than the governor's own replaces it: the governor is the one that
        was started again.
        """
        self.last_wait = time.monotonic()
        self._use(model)
        self._take(model, known)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._live[model].version <= known.version:
                    await self._changed.wait()
        self.last_wait = time.monotonic()
        return self._live[model]

    async def value(self, model: str, known: LiveThreshold) -> LiveThreshold:
        """What was set last."""
        self._take(model, known)
        return self._live[model]

    async def set(self, model: str, threshold: float | None) -> LiveThreshold:
        """Set a model's τ by hand, in (0, 1]; None gives it back to the autoscaler."""
        if threshold is not None:
            return self._publish(model, threshold, is_pinned=True)
        known = self._live.get(model)
        return self._publish(model, known.threshold if known else 1.0)

    async def report(self, model: str, report: LoadReport, plan: Plan) -> None:
        """Take a replica's report in; the first one begins the model's decisions."""
        self._use(model)
        control = self._controls.setdefault(model, Control(self._decide))
        control.hear(time.time(), report, plan)
        if model not in self._loops:
            self._loops[model] = asyncio.create_task(self._go_on_deciding(model, control))

    async def tick(
        self,
        model: str,
        ready: list[str],
        num_target: int,
        stats: dict[str, dict[str, float]],
        known: ControlState | None,
    ) -> tuple[ControlState, int | None, float]:
        """What the cluster's controller asks for about once a second.

        Args:
            model: whose replicas.
            ready: names of the replicas that serve.
            num_target: replicas that were asked for.
            stats: what replicas told the controller, by name; see `LoadReport.stats`.
            known: what this returned last, so that a new governor goes on where the old one was.

        Returns:
            What to hand back next time, the replicas that are decided on, None before the first
            decision, and the seconds since then.
        """
        self._use(model)
        control = self._controls.setdefault(model, Control(self._decide))
        if known is not None:
            control.restore(known)
        control.see(Cluster(frozenset(ready), num_target))
        for replica, values in stats.items():
            control.overhear(time.time(), replica, values)
        if not control.records:
            return control.state, None, math.inf
        age_s = abs(time.time() - control.records[-1].time_s)
        return control.state, control.state.outer.num_replicas, age_s

    async def explain(self, model: str) -> Explanation | None:
        """The latest decisions; None where a model is not autoscaled."""
        control = self._controls.get(model)
        return None if control is None else Explanation(control.plan, list(control.records))

    async def metrics(self, model: str) -> str:
        """Of a model's autoscaling, in Prometheus' text format."""
        return exposition({name: each for name, each in self._controls.items() if name == model})

    async def _go_on_deciding(self, model: str, control: Control) -> None:
        assert control.plan is not None, "a replica has reported"
        # those who know what was before, the τ set by hand included, come first
        await asyncio.sleep(control.plan.settings.period_s)
        late: asyncio.Task[Answer] | None = None
        while True:
            period_s, began_s = control.plan.settings.period_s, time.monotonic()
            record, late = await _decide_once(control, late)
            self._note(model, control, record)
            await asyncio.sleep(max(period_s - (time.monotonic() - began_s), 0.0))

    def _use(self, model: str) -> None:
        """Note that a model is there, and forget those that have been taken away. Of one without
        autoscaling nobody says so: its replicas may all be starting again.
        """
        now = self._clock()
        for name in [each for each in self._controls if now - self._used_s[each] > _IDLE_S]:
            del self._controls[name]
            self._live.pop(name, None)
            if name in self._loops:
                self._loops.pop(name).cancel()
        self._used_s[model] = now

    def _note(self, model: str, control: Control, record: Record) -> None:
        """Tell the replicas, and the log where something changes."""
        decision = record.decision
        before = control.records[-2].decision if len(control.records) > 1 else None
        is_new = before is None or _gist(before) != _gist(decision)
        if is_new or decision.num_replicas != record.replicas_before or record.problem is not None:
            _log.info("autoscaling %s: %s", model, json.dumps(record.as_dict()))
        live = self._live.get(model)
        if live is None or not live.is_pinned:
            threshold = record.threshold if record.threshold is not None else 1.0
            self._publish(
                model,
                threshold,
                ThresholdRange(
                    decision.floor_threshold,
                    decision.flex_floor_threshold,
                    decision.feed_forward,
                    decision.is_saturated,
                ),
            )

    def _publish(
        self,
        model: str,
        threshold: float,
        range_: ThresholdRange | None = None,
        *,
        is_pinned: bool = False,
    ) -> LiveThreshold:
        """Tell the replicas.

        Versions are milliseconds since 1970, so that one given by a governor that was started again
        is newer than all that its predecessor gave.
        """
        before = self._live.get(model, LiveThreshold(0, threshold))
        version = max(time.time_ns() // 1_000_000, before.version + 1)
        self._take(model, LiveThreshold(version, threshold, range_, is_pinned))
        return self._live[model]

    def _take(self, model: str, offered: LiveThreshold) -> None:
        current = self._live.get(model)
        if current is None or offered.version > current.version:
            self._live[model] = offered
            self._changed.set()  # wakes all that wait now
            self._changed.clear()


def _gist(decision: Decision) -> tuple[Reason, bool, bool]:
    """What a decision says, beside its numbers."""
    return decision.reason, decision.is_saturated, decision.is_overspent


async def _decide_once(
    control: Control, late: asyncio.Task[Answer] | None
) -> tuple[Record, asyncio.Task[Answer] | None]:
    """Take a decision, or hold where it cannot be had within its period.

    Args:
        control: of the model.
        late: an answer that an earlier decision still waits for; it is not used any more.

    Returns:
        The decision, and the answer that is late by now.
    """
    assert control.plan is not None, "a replica has reported"
    question = control.question(time.time())
    # it may hang: its thread is left to itself, and everything else goes on
    answer = late or asyncio.create_task(asyncio.to_thread(control.answer, *question))
    await asyncio.wait([answer], timeout=control.plan.settings.period_s)
    if not answer.done():
        return control.hold(question[0], _LATE), answer
    error = answer.exception()
    if error is not None:
        _log.error("the autoscaler cannot decide; nothing changes", exc_info=error)
        return control.hold(question[0], f"{type(error).__name__}: {error}"), None
    if late is not None:
        return control.hold(question[0], _LATE), None
    decision, state = answer.result()
    return control.commit(question[0], decision, state), None


class _GovernorActor(Governor):
    """Ray's actor around a governor."""

    def __init__(self) -> None:
        super().__init__()
        logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)  # Ray sets none
        RayMirror(AutoscalerMetrics(self._controls)).start()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def _end_when_idle(self) -> None:
        while time.monotonic() - self.last_wait < _IDLE_S:
            time.sleep(_IDLE_S / 4)
        ray.kill(ray.get_runtime_context().current_actor)


def end_governor(application: str) -> None:
    """End an application's governor, if there is one."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(governor_name(application), namespace=NAMESPACE))


class GovernorClient:
    """Reaches an application's governor from one of its processes, starting it where needed."""

    def __init__(self, application: str) -> None:
        self._name = governor_name(application)
        self._actor: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Governor`, once more at a new actor where the old one has died."""
        try:
            return await self._call(method, *arguments)
        except RayError:
            self._actor = None
            return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find)
        return await getattr(self._actor, method).remote(*arguments)

    def _find(self) -> Any:
        actor = ray.remote(_GovernorActor).options(
            name=self._name,
            namespace=NAMESPACE,
            lifetime="detached",  # else it would end with the replica that came first
            get_if_exists=True,
            num_cpus=0,
        )
        return actor.remote()
