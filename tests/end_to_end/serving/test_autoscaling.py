"""Autoscaling on a real cluster: a burst, and the loss of every part that decides about it.

The engine is paced: it mostly waits, so that two replicas are faster than one even on two cores.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from contextlib import asynccontextmanager

import httpx
import pytest
import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from rich.console import Console

import paced_engine
from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import write_frontier
from mars_autoscale.ray.ray_policy import NAMESPACE, governor_name
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.cluster.processes import free_port
from mars_platform.config import build_settings
from mars_serve.config.settings import ServeSettings
from mars_serve.control.governor_actor import GovernorActor, end_governor
from mars_serve.deploy.run import serving
from waiting import until

FLOOR = 0.9
STEP_S = 0.04  # a replica decodes 100 tokens a second at τ = 1
MANY, FEW = 12, 3  # concurrent requests: more than two replicas hold, fewer than one holds
HANG_S = 20
BODY = {"model": "mars", "max_tokens": 40, "min_tokens": 40, "audit": False}
SAME_AS_PLAIN = {"divergence": {"num_outputs": 500, "num_diverged": 0, "num_tokens": 20_000}}
"""A frontier's word that hardly any output differs from that of mode ar."""


def slow_frontier(path):
    """Return a frontier with steps as slow as a large model's, whatever they hold."""
    return frontier_of(
        AR,
        point("threshold", 0.95, 79.0, 1.6, 4.6, half=0.1) | SAME_AS_PLAIN,
        point("threshold", FLOOR, 78.0, 2.0, 5.0, half=0.1) | SAME_AS_PLAIN,
        weights=weights_fingerprint(path),
        seconds=STEP_S,
    )


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    """An application beside ours."""

    async def __call__(self, request):
        return "well"


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """Serve one model beside another application; yields the server's address.

    The server runs in this process, so that tests can kill its actors.
    """
    work = tmp_path_factory.mktemp("autoscaled")
    path = shutil.copytree(trained.model, work / "model")
    write_frontier(path, slow_frontier(path))
    model = {
        "name": "mars",
        "path": str(path),
        "num_cpus": 0.25,
        "num_threads": 1,
        "engine": {"max_num_seqs": 4},
        "audit": {"share": 1.0},
        "autoscaling": {
            "min_replicas": 1,
            "max_replicas": 2,
            "cold_start_s": 5,
            "period_s": 1,
            "scale_in_window_s": 600,
            "floor_threshold": FLOOR,
            "objective_ttft_s": 60,
        },
    }
    content = {"models": [model], "port": free_port(), "drain_s": 5, "proxy": {"kind": "python"}}
    settings = build_settings(content, ServeSettings, source="test")
    with pytest.MonkeyPatch.context() as patch, (work / "log").open("w") as log:
        for name, value in paced_engine.environment(cold_start_s=5).items():
            patch.setenv(name, value)
        with serving(settings, Console(file=log)):
            serve.run(Other.bind(), name="other", route_prefix="/other")
            yield f"http://127.0.0.1:{settings.port}"


@pytest.fixture
async def client(server):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server, timeout=60, limits=limits) as client:
        yield client


@asynccontextmanager
async def load(client, num_users):
    """Keep ``num_users`` requests running for the length of the block; yields counts by status."""
    statuses = Counter()

    async def ask_on(user):
        while True:
            body = {**BODY, "prompt": f"{user} Totals {sum(statuses.values())}"}
            response = await client.post("/v1/completions", json=body)
            statuses[response.status_code] += 1
            if response.status_code == 200:
                assert response.json()["mars"]["confidence_threshold"] >= FLOOR

    tasks = [asyncio.create_task(ask_on(user)) for user in range(num_users)]
    try:
        yield statuses
        assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def served(statuses, number):
    """Wait until ``number`` further requests have been served."""
    wanted = statuses[200] + number

    async def enough():
        return statuses[200] >= wanted

    await until(enough, "requests")
    assert set(statuses) == {200}


async def thresholds(client):
    """Return the live τ of each replica."""
    live = (await client.get("/admin/threshold")).json()["models"]["mars"]
    return [state["confidence_threshold"] for state in live["replicas"].values()]


async def decisions(client, since_s=0.0):
    response = await client.get("/admin/autoscaler")
    if response.status_code == 503:  # the governor is starting
        return []
    assert response.status_code == 200, response.text
    found = response.json()["models"]["mars"]["decisions"]
    return [each for each in found if each["time_s"] > since_s]


async def replicas(client):
    return [state["replica"] for state in (await client.get("/ready")).json()["models"]["mars"]]


async def lowered(client):
    found = await thresholds(client)
    assert all(FLOOR <= each <= 1 for each in found), found
    return any(each < 1 for each in found)


async def at_target(client):
    return set(await thresholds(client)) == {1.0}


@pytest.fixture
async def two_replicas(client):
    """Return the names of two replicas; a burst brings the second one if it is missing."""

    async def are_two():
        found = await replicas(client)
        return found if len(found) == 2 else None

    if found := await are_two():
        return found
    async with load(client, MANY):
        return await until(are_two, "a second replica")


def governor():
    return ray.get_actor(governor_name("marsray"), namespace=NAMESPACE)


def deployment():
    return serve.status().applications["marsray"].deployments["model-0-mars"]


# --- nothing is broken ---------------------------------------------------------------------------


async def test_a_burst_lowers_the_threshold_and_brings_a_replica(client):
    assert await replicas(client)
    async with load(client, MANY) as statuses:
        await until(lambda: lowered(client), "a lower threshold")

        async def second():
            return len(await replicas(client)) == 2

        await until(second, "a second replica")
        await served(statuses, 1)
    taken = await decisions(client)
    (grown,) = [each for each in taken if each["num_replicas"] > each["replicas_before"]]
    assert grown["reason"] in ("load", "debt")
    assert (grown["replicas_before"], grown["num_replicas"]) == (1, 2)
    assert grown["requests_per_s"] > 0
    assert grown["needed"] > 1 or grown["debt"] > 0
    assert any(each["num_starting"] == 1 for each in taken)
    assert {each["problem"] for each in taken} == {None}
    plan = (await client.get("/admin/autoscaler")).json()["models"]["mars"]["plan"]
    assert plan["frontier_refused"] is None
    assert [rung["confidence_threshold"] for rung in plan["ladder"]] == [1.0, 0.95, FLOOR]
    await until(lambda: at_target(client), "the target threshold")


# --- the governor or the controller is killed ----------------------------------------------------


async def losses_of(actor):
    """Return the begins of the spans in which tier default lost quality, as a governor knows them.

    A governor keeps them for an hour. They are read without a call of `tick`, which would count as
    the controller's view.
    """
    state = await actor.__ray_call__.remote(lambda governor: governor._loops["mars"].state)
    return {begin_s for begin_s, _ in state.outer.losses}


async def test_a_new_governor_goes_on_where_the_old_one_was(client, two_replicas):
    async with load(client, FEW) as statuses:
        old = governor()
        known = await until(lambda: losses_of(old), "the losses of the burst before")
        begin_s = time.time()
        ray.kill(old)
        await served(statuses, FEW)

        async def three_more():
            found = await decisions(client, begin_s)
            return found if len(found) >= 3 else None

        taken = await until(three_more, "decisions of a new governor")
        assert {each["num_replicas"] for each in taken} == {2}
        assert taken[0]["replicas_before"] == 2
        new = governor()
        assert new._actor_id != old._actor_id

        async def has_the_old_losses():
            return known <= await losses_of(new)

        await until(has_the_old_losses, "the old governor's state at the new one")
        await served(statuses, 1)
    assert sorted(await replicas(client)) == sorted(two_replicas)
    assert deployment().replica_states == {"RUNNING": 2}


async def test_without_serves_controller_everything_goes_on(client, two_replicas):
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace=NAMESPACE)
    before = await controller.get_pid.remote()
    await until(lambda: at_target(client), "the target threshold")
    ray.kill(controller, no_restart=False)
    begin_s = time.time()
    async with load(client, MANY) as statuses:
        await until(lambda: lowered(client), "a lower threshold")
        await served(statuses, MANY)
        assert await decisions(client, begin_s)

    async def restarted():
        return await controller.get_pid.remote() != before

    await until(restarted, "a new controller")

    async def is_healthy():
        status = await asyncio.to_thread(serve.status)
        return {each.status for each in status.applications.values()} == {"RUNNING"}

    await until(is_healthy, "a healthy application")
    taken = await decisions(client, begin_s)
    assert {each["num_replicas"] for each in taken} == {2}
    assert sorted(await replicas(client)) == sorted(two_replicas)
    assert deployment().replica_states == {"RUNNING": 2}


# --- the governor is broken -----------------------------------------------------------------------


def broken_governor(kind):
    """Return a governor whose decisions fail; a class that is made here travels with its code."""
    hang_s = HANG_S

    def raises(*_):
        raise ZeroDivisionError("no tokens")

    def hangs(*_):
        time.sleep(hang_s)
        raise AssertionError("nobody waits any more")

    class Broken(GovernorActor):
        def __init__(self):
            super().__init__()
            self._decide = {"raises": raises, "hangs": hangs}[kind]

    return ray.remote(Broken).options(
        name=governor_name("marsray"), namespace=NAMESPACE, lifetime="detached", num_cpus=0
    )


def put_in_place(broken):
    """Replace the governor; others start one whenever they find none, so try again and again."""
    for _ in range(50):
        end_governor("marsray")
        try:
            return broken.remote()
        except ActorAlreadyExistsError:
            time.sleep(0.2)
    return pytest.fail("the governor's name is always taken")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("hangs", "the decision takes longer than its period"),
        pytest.param("raises", "ZeroDivisionError: no tokens", marks=pytest.mark.full),
    ],
)
async def test_failing_decisions_keep_replicas_and_service(client, two_replicas, kind, problem):
    async with load(client, MANY) as statuses:
        actor = await asyncio.to_thread(put_in_place, broken_governor(kind))
        begin_s = time.time()

        async def held():
            found = await decisions(client, begin_s)
            return found if len(found) >= 3 else None

        taken = await until(held, "decisions")
        assert governor()._actor_id == actor._actor_id
        assert {each["problem"] for each in taken} == {problem}
        assert {each["reason"] for each in taken} == {"held"}
        assert {each["num_replicas"] for each in taken} == {2}
        response = await client.get("/other")
        assert (response.status_code, response.text) == (200, "well")
        await served(statuses, MANY)
        assert all(FLOOR <= each <= 1 for each in await thresholds(client))
    assert sorted(await replicas(client)) == sorted(two_replicas)
    end_governor("marsray")
    begin_s = time.time()

    async def well():
        found = await decisions(client, begin_s)
        return found and found[-1]["problem"] is None

    await until(well, "decisions of a governor that is well")


# --- what is served is audited -------------------------------------------------------------------


async def audit_of(client):
    response = await client.get("/admin/audit")
    assert response.status_code == 200, response.text
    return response.json()["models"]["mars"]


async def test_audits_that_contradict_the_frontier_stop_the_lowering_of_the_threshold(client):
    """The frontier says that outputs hardly ever differ, but with this τ and text most do."""
    body = {"model": "mars", "max_tokens": 40, "ignore_eos": True, "confidence_threshold": FLOOR}
    body["window"] = 3  # where masks do not pay by measured times, none would be fed
    bodies = [{**body, "prompt": f"{number} the rain in"} for number in range(24)]
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=each, timeout=60) for each in bodies)
    )
    assert {each.status_code for each in answers} == {200}

    async def refuted():
        found = await audit_of(client)
        return found if found["is_refuted"] else None

    found = await until(refuted, "an alarm")
    assert sum(each["num_diverged"] for each in found["audited"]) > 5
    assert found["evidence"] >= 1

    async def closed():
        latest = (await decisions(client))[-1]
        return latest["is_refuted"] and latest["flex_floor_threshold"] == 1.0

    await until(closed, "closed floors")
    async with load(client, MANY) as statuses:
        await served(statuses, MANY)
        assert set(await thresholds(client)) == {1.0}, "quality is not paid with"
    again = await client.delete("/admin/audit")
    assert not again.json()["models"]["mars"]["is_refuted"]
