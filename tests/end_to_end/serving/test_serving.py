"""The real server decodes in every mode, refuses bad requests and frees what clients give up."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from ipaddress import ip_address

import psutil
import pytest

from waiting import until

PROMPT = [{"role": "user", "content": "Start at 48. Steps: -4 +5 +2 +1"}]


def ask_sampled(client, mode, **options):
    return client.chat.completions.create(
        model="mars",
        messages=PROMPT,
        max_tokens=40,
        temperature=0.9,
        seed=11,
        n=2,
        logprobs=True,
        extra_body={"mode": mode},
        **options,
    )


def test_sampled_exact_output_is_that_of_mode_ar(client):
    exact, plain = (ask_sampled(client, mode) for mode in ("exact", "ar"))
    texts = [[choice.message.content for choice in each.choices] for each in (exact, plain)]
    assert texts[0] == texts[1]
    assert exact.usage.completion_tokens == plain.usage.completion_tokens
    assert exact.model_extra["mars"]["tokens_per_forward"] > 1.5
    assert plain.model_extra["mars"]["tokens_per_forward"] == 1
    ours, theirs = (
        [token.logprob for token in each.choices[0].logprobs.content] for each in (exact, plain)
    )
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_output_in_a_schema_with_a_stop_string(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for mode in ("exact", "threshold"):
        body = {"response_format": wanted, "extra_body": {"mode": mode}}
        made = client.chat.completions.create(
            model="mars", messages=PROMPT, max_tokens=100, stop="}", **body
        )
        assert made.choices[0].finish_reason == "stop"
        assert json.loads(made.choices[0].message.content + "}")["n"] in (1, 22)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_connection_frees_its_pages(http, stream):
    """Only cancellation frees the pages in time, since the output is as long as it can be."""
    length = (await http.get("/v1/models/plain")).json()["max_model_len"] - 16
    body = {"model": "plain", "prompt": "Totals", "max_tokens": length, "min_tokens": length}
    body["stream"] = stream
    for _ in range(4):  # whether a proxy notices may depend on how packets fall
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_engine(http, lambda engine: engine["num_requests"] == 1)
        call.cancel()
        await until_engine(http, lambda engine: engine["num_free_pages"] == engine["num_pages"])


async def until_engine(http, holds):
    """Wait until the condition holds for the report of the plain model's engine."""

    async def reported():
        (state,) = (await http.get("/ready")).json()["models"]["plain"]
        return holds(state["status"])

    await until(reported, "a change of the engine's state", 20)


def test_only_this_machine_is_listened_to(server):
    """Ray's exporters of metrics are among what listens, and ask for neither key nor token."""
    port = int(server.rpartition(":")[2])
    everybody = [
        each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN
    ]
    (proxy,) = {each.pid for each in everybody if each.laddr.port == port and each.pid}
    *_, command = [
        each for each in psutil.Process(proxy).parents() if "mars_platform" in each.cmdline()
    ]
    own = {each.pid: each for each in [command, *command.children(recursive=True)]}
    exposed = {
        own[each.pid].name()
        for each in everybody
        if each.pid in own and not ip_address(each.laddr.ip.removeprefix("::ffff:")).is_loopback
    }
    # handles of Ray Serve, which need Ray's token; Serve lets nobody choose their address
    assert {name for name in exposed if not name.startswith("ray::ServeRepli")} == set()


def test_a_taken_port_is_one_clear_line(server, trained):
    port = server.rpartition(":")[2]
    command = [sys.executable, "-m", "mars_platform", "serve", "--port", port]
    result = subprocess.run(
        [*command, "--model", str(trained.model)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: port: cannot listen on 127.0.0.1:{port}")
