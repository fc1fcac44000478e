"""Two replicas of a model share a live threshold, requests and failures, and drain at the end.

These tests come last on the server of this folder: they kill its processes and, in the end, itself.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from waiting import until

PAGE_SIZE = 16


@pytest.fixture
def command(server):
    """The process of the server's command, found through the proxy on its port."""
    port = int(server.rpartition(":")[2])
    (proxy,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    }
    *_, found = [
        each
        for each in psutil.Process(proxy).parents()
        if "mars_platform" in " ".join(each.cmdline()) or each.name().startswith("marsray")
    ]
    return found


def descendants(process, name):
    """Return the processes below a process that have ``name`` in their command line."""
    found = process.children(recursive=True)
    return [each for each in found if name in " ".join(each.cmdline())]


def engines_of(command):
    """Return the processes of a server's engines: forks of a template, no descendants of Ray's."""
    ours = {f"{each.pid}" for each in (command, *command.children(recursive=True))}
    name = "mars_serve.replica.engine_template"
    every = psutil.process_iter(["cmdline"])  # which passes over those that are ending
    found = [each for each in every if name in (each.info["cmdline"] or [])]
    own = [each for each in found if keeper_of(each) in ours]
    return [each for each in own if each.parent() in own]


def keeper_of(process):
    """Return the number of the process that a template ends with, by the descriptor it was told."""
    *_, descriptor = process.info["cmdline"]
    text = Path(f"/proc/{process.pid}/fdinfo/{descriptor}").read_text("utf-8")
    return text.rpartition("Pid:")[2].split()[0]


async def states_of(http):
    return (await http.get("/ready")).json()["models"]["mars"]


def body_of(index, num_tokens, **options):
    """Return a sampled completion request of exactly ``num_tokens`` output tokens."""
    sizes = {"max_tokens": num_tokens, "min_tokens": num_tokens}
    drawn = {"prompt": f"{index} Totals {index}", "seed": index, "temperature": 1.0}
    return {"model": "mars", **sizes, **drawn, **options}


async def stream(http, body, on_event=None):
    """Return a whole stream's text and finish reason, and the last event's ``mars`` object."""
    text, finish_reason, mars, lines = "", None, None, []
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
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


async def set_threshold(http, threshold):
    body = {"model": "mars", "confidence_threshold": threshold}
    response = await http.put("/admin/threshold", json=body)
    assert response.status_code == 200, response.text
    return response.json()["models"]["mars"]


async def every_replica_has(http, changed):
    async def have():
        states = (await http.get("/admin/threshold")).json()["models"]["mars"]["replicas"]
        return len(states) == 2 and all(
            state["version"] == changed["version"] for state in states.values()
        )

    await until(have, "a change of the threshold on every replica", 60)


async def test_the_live_threshold_moves_while_streams_run(http):
    """Requests with a τ of their own keep it, and no stream is lost."""
    pinned = {"confidence_threshold": 0.9}
    bodies = [body_of(index, 120, **(pinned if index < 2 else {})) for index in range(20)]
    alone = [(await stream(http, body))[0] for body in bodies[:2]]
    await set_threshold(http, 1.0)
    running = asyncio.gather(*(stream(http, body) for body in bodies))
    for threshold in (0.02, 1.0, 0.01):
        await asyncio.sleep(0.1)
        await every_replica_has(http, await set_threshold(http, threshold))
    outputs = await running
    assert [text for text, _, _ in outputs[:2]] == alone
    assert {finish_reason for _, finish_reason, _ in outputs} == {"length"}
    assert all(mars["confidence_threshold"] == 0.9 for _, _, mars in outputs[:2])
    assert all(0.01 <= mars["confidence_threshold"] <= 1 for _, _, mars in outputs[2:])
    assert any("min_confidence_threshold" in mars for _, _, mars in outputs[2:])


async def test_the_dashboard_shows_both_replicas_and_every_token(http):
    async def picture():
        async with http.stream("GET", "/admin/dashboard/events") as response:
            assert response.status_code == 200
            line = await anext(response.aiter_lines())
            return json.loads(line.removeprefix("data: "))["models"]["mars"]

    before = (await picture())["rows"][-1][0]
    outputs = await asyncio.gather(*(stream(http, body_of(index, 20)) for index in range(4)))
    assert len(outputs) == 4

    async def shows_all():
        found = await picture()
        rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
        assert rows[-1]["num_ready"] == 2
        assert [each["state"] for each in found["state"]["replicas"]] == ["ready", "ready"]
        told = sum(row["generated_per_s"] for row in rows if row["time_s"] > before)
        return told >= 4 * 20 and found["state"]["ended"].get("length", 0) >= 4

    await until(shows_all, "every token on the dashboard", 60)


async def test_the_threshold_survives_the_governor(http, command):
    before = await set_threshold(http, 0.8)
    await every_replica_has(http, before)
    (governor,) = descendants(command, "GovernorActor")
    governor.kill()
    governor.wait(10)
    states = await states_of(http)
    assert {state["confidence_threshold"] for state in states} == {0.8}

    async def restored():
        live = (await http.get("/admin/threshold")).json()["models"]["mars"]
        return live["version"] == before["version"] and live["confidence_threshold"] == 0.8

    await until(restored, "a new governor with the old value")
    await every_replica_has(http, await set_threshold(http, 0.95))


async def test_prompts_that_begin_alike_go_to_one_replica(http):
    async def reused():
        states = await states_of(http)
        return {state["replica"]: state["status"]["num_reused_tokens"] for state in states}

    before = await reused()
    beginning = "Start at 48. Steps: " + "-4 +5 +2 +1 " * 20
    for index in range(6):
        body = {"model": "mars", "prompt": f"{beginning}{index}", "max_tokens": 1}
        usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * PAGE_SIZE
    after = await reused()
    gained = sorted(after[name] - before[name] for name in before)
    assert gained[0] == 0 < gained[1]


async def test_load_goes_to_both_replicas(http):
    async def passes():
        states = await states_of(http)
        return {state["replica"]: state["status"]["num_row_passes"] for state in states}

    before = await passes()
    calls = (http.post("/v1/completions", json=body_of(index, 8)) for index in range(16))
    assert {response.status_code for response in await asyncio.gather(*calls)} == {200}

    async def both_have_run():  # an engine reports its counts a few times a second
        after = await passes()
        return all(after[name] > before[name] for name in before)

    await until(both_have_run, "passes of both replicas")


@pytest.mark.parametrize("part", ["replica", "engine"])
async def test_a_replica_that_dies_or_whose_engine_dies_is_replaced(http, command, part):
    names = {state["replica"] for state in await states_of(http)}
    replicas = descendants(command, "model-0-mars")
    engines = [each for each in engines_of(command) if len(each.parent().children()) == 2]
    killed = {"replica": replicas, "engine": engines}[part][0]
    killed.kill()
    posts = (http.post("/v1/completions", json=body_of(index, 4)) for index in range(20))
    assert {answer.status_code for answer in await asyncio.gather(*posts)} == {200}

    async def replaced():
        states = {state["replica"] for state in await states_of(http)}
        return len(states) == 2 and len(states & names) == 1

    await until(replaced, "a new replica")
    for index in range(4):
        response = await http.post("/v1/completions", json=body_of(index, 4))
        assert response.status_code == 200


async def test_a_busy_machine_slows_the_server_no_more_than_other_programs(command):
    """Ray gives its workers the lowest priority but four unless it is told otherwise."""
    names = ("ServeReplica:marsray", "haproxy", "ProxyActor", "Governor")
    found = engines_of(command)
    found += [each for name in names for each in descendants(command, name)]
    assert len(found) >= 5
    assert {each.nice() for each in found} == {command.nice()}


async def test_processes_of_ray_serve_load_no_pandas(command):
    found = [
        each for name in ("ServeReplica", "ServeController") for each in descendants(command, name)
    ]
    assert len(found) >= 4
    assert not any("/pandas/" in part.path for each in found for part in each.memory_maps())


async def test_running_streams_end_before_the_server_does(http, command):
    """This test is the last one of the server, which it ends."""
    begun = asyncio.Event()
    body = body_of(0, 900, mode="ar")
    running = asyncio.create_task(stream(http, body, begun.set))
    await begun.wait()
    command.send_signal(signal.SIGINT)

    async def refuses():
        try:
            return (await http.get("/v1/models")).status_code in (404, 503)
        except httpx.TransportError:
            return True

    await until(refuses, "a refusal of new requests", 60)
    _, finish_reason, mars = await running
    assert (finish_reason, mars["forward_passes"]) == ("length", body["max_tokens"])
    await asyncio.to_thread(command.wait, 120)
