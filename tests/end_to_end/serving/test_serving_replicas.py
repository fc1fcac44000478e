"""A server with several replicas of a model: live thresholds, routing, failures, draining."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import httpx
import psutil
import pytest

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def server(serve, trained, tmp_path_factory):
    """Two replicas of a model."""
    model = {
        "name": "mars",
        "path": str(trained.model),
        "num_replicas": 2,
        "num_cpus": 0.5,
        "tiers": {"default_min_threshold": 0.01},
        "engine": {"adaptive_windows": False},  # else outputs depend on how busy the machine is
    }
    with serve({"models": [model]}, tmp_path_factory.mktemp("serve")) as address:
        yield address


@pytest.fixture
async def client(server):
    async with httpx.AsyncClient(base_url=server, timeout=60) as client:
        yield client


@pytest.fixture
def processes(server):
    """The server's process and its cluster's, by name; those of no other server."""
    port = int(server.rpartition(":")[2])
    (proxy,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    }
    *_, command = [
        each
        for each in psutil.Process(proxy).parents()
        if "mars_platform" in " ".join(each.cmdline()) or each.name().startswith("marsray")
    ]

    def find(name):
        return [
            each for each in command.children(recursive=True) if name in " ".join(each.cmdline())
        ]

    return command, find


async def states_of(client):
    return (await client.get("/ready")).json()["models"]["mars"]


async def until(condition, what, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := await condition():
            return found
        await asyncio.sleep(0.1)
    return pytest.fail(f"{what} did not happen in time")


def body_of(index, num_tokens, **options):
    """A request that goes on for so many tokens."""
    sizes = {"max_tokens": num_tokens, "min_tokens": num_tokens}
    drawn = {"prompt": f"{index} Totals {index}", "seed": index, "temperature": 1.0}
    return {"model": "mars", **sizes, **drawn, **options}


async def stream(client, body, on_event=None):
    """Text, finish reason and the last event's block of a stream that has to come whole."""
    text, finish_reason, mars, lines = "", None, None, []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            if line.startswith("data: {"):
                if on_event:
                    on_event()
                event = json.loads(line[6:])
                assert "error" not in event, event
                (choice,) = event["choices"]
                text += choice["text"]
                finish_reason, mars = choice["finish_reason"], event["mars"]
    assert "data: [DONE]" in lines
    return text, finish_reason, mars


async def set_threshold(client, threshold):
    body = {"confidence_threshold": threshold}
    response = await client.put("/admin/threshold", json=body)
    assert response.status_code == 200, response.text
    return response.json()["models"]["mars"]


async def every_replica_has(client, changed):
    async def have():
        states = (await client.get("/admin/threshold")).json()["models"]["mars"]["replicas"]
        return len(states) == 2 and all(
            state["version"] == changed["version"] for state in states.values()
        )

    await until(have, "a change of the threshold on every replica", 5)


async def test_the_live_threshold_moves_while_streams_run(client):
    """Those that give their own are not touched, and none is lost."""
    pinned = {"confidence_threshold": 0.9}
    bodies = [body_of(index, 150, **(pinned if index < 2 else {})) for index in range(32)]
    alone = [(await stream(client, body))[0] for body in bodies[:2]]
    await set_threshold(client, 1.0)
    running = asyncio.gather(*(stream(client, body) for body in bodies))
    for threshold in (0.02, 1.0, 0.01):
        await asyncio.sleep(0.1)
        await every_replica_has(client, await set_threshold(client, threshold))
    outputs = await running
    assert [text for text, _, _ in outputs[:2]] == alone
    assert {finish_reason for _, finish_reason, _ in outputs} == {"length"}
    assert all(mars["confidence_threshold"] == 0.9 for _, _, mars in outputs[:2])
    assert all(0.01 <= mars["confidence_threshold"] <= 1 for _, _, mars in outputs[2:])
    assert any("min_confidence_threshold" in mars for _, _, mars in outputs[2:])


async def test_the_threshold_survives_the_governor(client, processes):
    _, find = processes
    before = await set_threshold(client, 0.8)
    await every_replica_has(client, before)
    (governor,) = find("_GovernorActor")
    governor.kill()
    governor.wait(10)
    states = await states_of(client)
    assert {state["confidence_threshold"] for state in states} == {0.8}

    async def restored():
        live = (await client.get("/admin/threshold")).json()["models"]["mars"]
        return live["version"] == before["version"] and live["confidence_threshold"] == 0.8

    await until(restored, "a new governor with the old value", 20)
    await every_replica_has(client, await set_threshold(client, 0.95))


async def test_prompts_that_begin_alike_go_to_one_replica(client):
    async def reused():
        states = await states_of(client)
        return {state["replica"]: state["status"]["num_reused_tokens"] for state in states}

    before = await reused()
    beginning = "Start at 48. Steps: " + "-4 +5 +2 +1 " * 20
    for index in range(6):
        body = {"model": "mars", "prompt": f"{beginning}{index}", "max_tokens": 1}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * PAGE_SIZE
    after = await reused()
    gained = sorted(after[name] - before[name] for name in before)
    assert gained[0] == 0 < gained[1]


async def test_load_goes_to_both_replicas(client):
    async def passes():
        states = await states_of(client)
        return {state["replica"]: state["status"]["num_row_passes"] for state in states}

    before = await passes()
    calls = (client.post("/v1/completions", json=body_of(index, 8)) for index in range(16))
    assert {response.status_code for response in await asyncio.gather(*calls)} == {200}
    after = await passes()
    assert all(after[name] > before[name] for name in before)


@pytest.mark.parametrize("process", ["model-0-mars", "mars_serve.replica.engine_main"])
async def test_a_replica_that_dies_is_replaced(client, processes, process):
    """The replica itself, or the engine that it holds."""
    _, find = processes
    names = {state["replica"] for state in await states_of(client)}
    find(process)[0].kill()

    async def replaced():
        states = {state["replica"] for state in await states_of(client)}
        return len(states) == 2 and len(states & names) == 1

    await until(replaced, "a new replica")
    for index in range(4):
        response = await client.post("/v1/completions", json=body_of(index, 4))
        assert response.status_code == 200


async def test_running_streams_end_before_the_server_does(client, processes):
    """The last of this file: afterwards there is no server."""
    command, _ = processes
    begun = asyncio.Event()
    length = (await client.get("/v1/models/mars")).json()["max_model_len"]
    body = body_of(0, min(length - 64, 2500), mode="ar")
    running = asyncio.create_task(stream(client, body, begun.set))
    await begun.wait()
    command.send_signal(signal.SIGINT)
    await asyncio.sleep(1.5)
    try:
        refused = (await client.get("/v1/models")).status_code
    except httpx.TransportError:
        refused = None
    assert refused in (None, 404, 503)
    _, finish_reason, mars = await running
    assert (finish_reason, mars["forward_passes"]) == ("length", body["max_tokens"])
    await asyncio.to_thread(command.wait, 30)
