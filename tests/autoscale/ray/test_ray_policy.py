"""What Ray Serve's controller calls, without a cluster: nothing may stop it, or slow it down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from mars_autoscale.policy.control import ControlState
from mars_autoscale.policy.decide import OuterState
from mars_autoscale.ray import ray_policy
from mars_autoscale.ray.ray_policy import NAMESPACE, JointPolicy, governor_name

DEPLOYMENT = DeploymentID("model-0-mars", "app")
STATE = ControlState(OuterState(num_replicas=5), 80.0)


def replica(name: str) -> ReplicaID:
    return ReplicaID(name, DEPLOYMENT)


def context_of(**changes: Any) -> AutoscalingContext:
    """What Ray Serve hands to a policy: two of three replicas run."""
    fields: dict[str, Any] = {
        "deployment_id": DEPLOYMENT,
        "deployment_name": DEPLOYMENT.name,
        "app_name": DEPLOYMENT.app_name,
        "current_num_replicas": 2,
        "target_num_replicas": 3,
        "running_replicas": [replica("a"), replica("b")],
        "total_num_requests": lambda: 7.0,
        "total_queued_requests": lambda: 0.0,
        "aggregated_metrics": dict,
        "raw_metrics": dict,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 8,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": time.time(),
        "config": AutoscalingConfig(
            min_replicas=1, max_replicas=8, upscale_delay_s=0, downscale_delay_s=0
        ),
    }
    return AutoscalingContext(**{**fields, **changes})


class FakeRay:
    """As much of Ray as the policy uses; one governor, which may be missing."""

    def __init__(self) -> None:
        self.governor: Callable[..., tuple[ControlState, int | None, float]] | None = None
        self.asked: list[tuple[Any, ...]] = []
        self.names: list[tuple[str, str]] = []

    def is_initialized(self) -> bool:
        return True

    def get_actor(self, name: str, namespace: str) -> Any:
        self.names.append((name, namespace))
        if self.governor is None:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return SimpleNamespace(tick=SimpleNamespace(remote=self._tick))

    def get(self, call: tuple[Any, ...], timeout: float) -> tuple[ControlState, int | None, float]:
        if self.governor is None:
            raise ActorUnavailableError("it has died", b"\0" * 16)
        return self.governor(*call)

    def _tick(self, *arguments: Any) -> tuple[Any, ...]:
        self.asked.append(arguments)
        return arguments


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setattr(ray_policy, "ray", fake)
    monkeypatch.setattr(ray_policy, "_PERIOD_S", 0.005)
    yield fake
    monkeypatch.setattr(ray_policy, "_UNUSED_S", 0.0)  # or its threads would go on to the real one
    for thread in threads():
        thread.join()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "autoscaling"]


def call_until(
    policy: JointPolicy, number: int, context: AutoscalingContext | None = None
) -> tuple[int, dict[str, Any]]:
    deadline = time.monotonic() + 20
    while (answer := policy(context or context_of()))[0] != number:
        assert time.monotonic() < deadline, answer
        time.sleep(0.002)
    return answer


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# What it holds


def test_without_a_governor_the_target_is_held(ray: FakeRay) -> None:
    policy = JointPolicy("mars")
    assert policy(context_of()) == (3, {})
    wait_for(lambda: len(ray.names) > 3)
    assert policy(context_of(target_num_replicas=4)) == (4, {})
    assert set(ray.names) == {(governor_name("app"), NAMESPACE)}


def test_it_does_not_wait_for_the_governor(ray: FakeRay) -> None:
    begun, end = threading.Event(), threading.Event()

    def hangs(*_: Any) -> tuple[ControlState, int, float]:
        begun.set()
        end.wait()
        return STATE, 5, 0.0

    ray.governor = hangs
    policy = JointPolicy("mars")
    assert policy(context_of()) == (3, {})
    assert begun.wait(20)
    assert policy(context_of()) == (3, {})
    end.set()
    call_until(policy, 5)


@pytest.mark.parametrize(
    "error",
    [GetTimeoutError("late"), RayError("broken"), ActorUnavailableError("gone", b"\0" * 16)],
    ids=type,
)
def test_where_the_governor_fails_the_target_is_held(ray: FakeRay, error: Exception) -> None:
    def fails(*_: Any) -> tuple[ControlState, int, float]:
        raise error

    ray.governor = fails
    policy = JointPolicy("mars")
    policy(context_of())
    wait_for(lambda: len(ray.asked) > 2)
    assert policy(context_of()) == (3, {})
    ray.governor = lambda *_: (STATE, 5, 0.0)
    call_until(policy, 5)


def test_before_the_first_decision_the_target_is_held(ray: FakeRay) -> None:
    ray.governor = lambda *_: (ControlState(), None, float("inf"))
    policy = JointPolicy("mars")
    policy(context_of())
    wait_for(lambda: len(ray.asked) > 2)
    assert policy(context_of()) == (3, {})


def test_an_old_decision_does_not_hold(ray: FakeRay) -> None:
    ray.governor = lambda *_: (STATE, 5, 12.5)
    policy = JointPolicy("mars")
    policy(context_of())
    wait_for(lambda: len(ray.asked) > 2)
    assert policy(context_of()) == (3, {})
    ray.governor = lambda *_: (STATE, 5, 2.0)
    call_until(policy, 5)
    ray.governor = None
    call_until(policy, 5)  # until it is too old


def broken() -> Any:
    raise RuntimeError("Serve's own")


@pytest.mark.parametrize(
    "change",
    [{"raw_metrics": broken}, {"running_replicas": None}, {"raw_metrics": {"gain": 1.0}}],
    ids=["raises", "no-replicas", "not-by-replica"],
)
def test_a_context_that_is_broken_is_held_and_logged(
    ray: FakeRay, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    assert policy(context_of(**change)) == (3, {})
    assert "autoscaling of mars holds its replicas" in caplog.text
    call_until(policy, 5)


# What it passes on


def test_the_governor_is_told_what_the_controller_knows(ray: FakeRay) -> None:
    ray.governor = lambda *_: (STATE, 5, 0.0)
    metrics = {
        "gain": {
            replica("a"): [TimeStampedValue(1.0, 1.0), TimeStampedValue(2.0, 1.5)],
            replica("b"): [],
        },
        "loss": {replica("a"): [TimeStampedValue(2.0, 0.25)]},
    }
    call_until(JointPolicy("mars"), 5, context_of(raw_metrics=lambda: metrics))
    stats = {"a": {"gain": 1.5, "loss": 0.25}}
    assert ray.asked[0] == ("mars", ["a", "b"], 3, stats, None)


def test_a_new_governor_is_told_what_the_old_one_knew(ray: FakeRay) -> None:
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    ray.governor = None
    wait_for(lambda: len(ray.names) > 3)
    ray.asked.clear()
    ray.governor = lambda *_: (STATE, 6, 0.0)
    call_until(policy, 6)
    assert ray.asked[0][-1] is STATE


def test_a_policy_that_was_not_called_for_long_goes_on(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    monkeypatch.setattr(ray_policy, "_UNUSED_S", 0.0)
    wait_for(lambda: not threads())
    monkeypatch.setattr(ray_policy, "_UNUSED_S", 60.0)
    ray.governor = lambda *_: (STATE, 6, 0.0)
    call_until(policy, 6)


def test_a_policy_that_was_replaced_soon_tells_nothing_any_more(ray: FakeRay) -> None:
    ray.governor = lambda *_: (STATE, 5, 0.0)
    replaced = JointPolicy("mars")
    call_until(replaced, 5)
    wait_for(lambda: not threads())  # without another call
    assert ray.asked


def test_ray_serve_takes_what_it_says(ray: FakeRay) -> None:
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    number, state = call_until(policy, 5)
    assert (type(number), state) == (int, {})
    in_serve = _apply_autoscaling_config(policy)
    assert in_serve(context_of())[0] == 5
    assert in_serve(context_of(target_num_replicas=6))[0] == 5
