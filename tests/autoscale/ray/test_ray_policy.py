"""The policy that Ray Serve's controller calls, without a cluster: it must never raise or wait."""

import threading
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from mars_autoscale.policy.decision import OuterState
from mars_autoscale.policy.outer_loop import SavedState
from mars_autoscale.ray import ray_policy
from mars_autoscale.ray.ray_policy import NAMESPACE, JointPolicy, governor_name

DEPLOYMENT = DeploymentID("model-0-mars", "app")
STATE = SavedState(OuterState(num_replicas=5), 80.0)


def replica(name):
    return ReplicaID(name, DEPLOYMENT)


def context_of(**changes):
    """Return what Ray Serve hands to a policy, with two of three replicas running."""
    fields = {
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
    """The part of Ray that the policy uses, with one governor that may be missing."""

    def __init__(self):
        self.governor = None
        self.asked = []
        self.names = []

    def is_initialized(self):
        return True

    def get_actor(self, name, namespace):
        self.names.append((name, namespace))
        if self.governor is None:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return SimpleNamespace(tick=SimpleNamespace(remote=self._tick))

    def get(self, call, timeout):
        if self.governor is None:
            raise ActorUnavailableError("it has died", b"\0" * 16)
        return self.governor(*call)

    def _tick(self, *arguments):
        self.asked.append(arguments)
        return arguments


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(ray_policy, "ray", fake)
    monkeypatch.setattr(ray_policy, "_PERIOD_S", 0.005)
    yield fake
    # ends its threads, which would use the real Ray
    monkeypatch.setattr(ray_policy, "_UNUSED_S", 0.0)
    for thread in threads():
        thread.join()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "autoscaling"]


def call_until(policy, number, context=None):
    wait_for(lambda: policy(context or context_of()) == (number, {}))


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# Holding


def test_without_a_governor_the_target_is_held(ray):
    policy = JointPolicy("mars")
    assert policy(context_of()) == (3, {})
    wait_for(lambda: len(ray.names) > 3)
    assert policy(context_of(target_num_replicas=4)) == (4, {})
    assert set(ray.names) == {(governor_name("app"), NAMESPACE)}


def test_the_policy_does_not_wait_for_the_governor(ray):
    begun, end = threading.Event(), threading.Event()

    def hangs(*_):
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
def test_the_target_is_held_while_the_governor_fails(ray, error):
    def fails(*_):
        raise error

    ray.governor = fails
    policy = JointPolicy("mars")
    policy(context_of())
    wait_for(lambda: len(ray.asked) > 2)
    assert policy(context_of()) == (3, {})
    ray.governor = lambda *_: (STATE, 5, 0.0)
    call_until(policy, 5)


@pytest.mark.parametrize(
    "answer", [(SavedState(), None, float("inf")), (STATE, 5, 12.5)], ids=["none", "old"]
)
def test_without_a_fresh_decision_the_target_is_held(ray, answer):
    ray.governor = lambda *_: answer
    policy = JointPolicy("mars")
    policy(context_of())
    wait_for(lambda: len(ray.asked) > 2)
    assert policy(context_of()) == (3, {})
    ray.governor = lambda *_: (STATE, 5, 2.0)
    call_until(policy, 5)
    ray.governor = None
    call_until(policy, 5)  # the decision holds until it is too old


def test_the_target_is_held_and_logged_if_the_context_is_broken(ray, caplog):
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    assert policy(context_of(running_replicas=None)) == (3, {})
    assert "autoscaling of mars holds its replicas" in caplog.text
    call_until(policy, 5)


# Passing on


def test_the_governor_gets_the_controllers_view(ray):
    ray.governor = lambda *_: (STATE, 5, 0.0)
    call_until(JointPolicy("mars"), 5)
    assert ray.asked[0] == ("mars", ["a", "b"], 3, None)


def test_a_new_governor_gets_the_state_of_the_old_one(ray):
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    ray.governor = None
    wait_for(lambda: len(ray.names) > 3)
    ray.asked.clear()
    ray.governor = lambda *_: (STATE, 6, 0.0)
    call_until(policy, 6)
    assert ray.asked[0][-1] is STATE


def test_a_policy_that_was_not_called_for_long_resumes(ray, monkeypatch):
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    monkeypatch.setattr(ray_policy, "_UNUSED_S", 0.0)
    wait_for(lambda: not threads())
    monkeypatch.setattr(ray_policy, "_UNUSED_S", 60.0)
    ray.governor = lambda *_: (STATE, 6, 0.0)
    call_until(policy, 6)


def test_ray_serve_uses_the_policys_number(ray):
    ray.governor = lambda *_: (STATE, 5, 0.0)
    policy = JointPolicy("mars")
    call_until(policy, 5)
    in_serve = _apply_autoscaling_config(policy)
    assert in_serve(context_of())[0] == 5
    assert in_serve(context_of(target_num_replicas=6))[0] == 5
