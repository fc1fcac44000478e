"""The real server: Ray Serve, HTTP and the official openai client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

START_TIMEOUT_S = 120
PROMPT = [{"role": "user", "content": "Start at 48. Steps: -4 +5 +2 +1"}]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """``marsray serve`` as a child process; yields its address."""
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "mars_platform", "serve", "--port", str(port)]
    command += ["--model", f"mars={trained.model}", "--model", f"plain={trained.ar_model}"]
    command += ["--model", f"untrained={trained.output / 'stages' / 'start'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        assert "plain AR" in log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
    assert status == 0, log.read_text()


def wait_until_ready(process, url, log):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"not ready in time: {log.read_text()}")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed(client):
    assert {model.id for model in client.models.list()} == {"mars", "plain", "untrained"}


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
    assert exact.usage == plain.usage
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


def test_completion_with_a_threshold_that_is_reported_back(client):
    response = client.completions.create(
        model="mars", prompt="Totals: 4", max_tokens=8, extra_body={"confidence_threshold": 0.9}
    )
    mars = response.model_extra["mars"]
    assert mars["mode"] == "threshold"
    assert mars["confidence_threshold"] == 0.9
    assert mars["forward_passes"] * mars["tokens_per_forward"] == pytest.approx(
        response.usage.completion_tokens, abs=0.01
    )


def test_chat_in_ar_mode_takes_one_pass_a_token(client):
    response = client.chat.completions.create(
        model="mars", messages=PROMPT, max_tokens=24, extra_body={"mode": "ar"}
    )
    assert response.model_extra["mars"]["forward_passes"] == response.usage.completion_tokens
    assert response.choices[0].message.content


def test_a_lower_threshold_takes_fewer_passes(client):
    passes = [
        client.chat.completions.create(
            model="mars",
            messages=PROMPT,
            max_tokens=24,
            extra_body={"confidence_threshold": threshold},
        ).model_extra["mars"]["tokens_per_forward"]
        for threshold in (1.0, 0.05)
    ]
    assert passes[0] == 1.0
    assert passes[1] > 2.0


def test_a_stream_has_one_event_a_pass_and_the_same_text(client):
    options = {"model": "mars", "messages": PROMPT, "max_tokens": 24}
    extra = {"confidence_threshold": 0.3}
    whole = client.chat.completions.create(**options, extra_body=extra)
    chunks = list(
        client.chat.completions.create(
            **options, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
    )
    *events, usage = chunks
    text = "".join(chunk.choices[0].delta.content for chunk in events)
    assert text == whole.choices[0].message.content
    assert len(events) == whole.model_extra["mars"]["forward_passes"]
    assert sum(chunk.model_extra["mars"]["tokens"] for chunk in events) == (
        usage.usage.completion_tokens
    )
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_many_clients_at_once_get_what_each_gets_alone(server):
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:

        async def ask(index):
            return await client.chat.completions.create(
                model="mars",
                messages=[{"role": "user", "content": f"Add {index % 9 + 1} and {index} cups"}],
                max_tokens=4 + index,
                extra_body={"mode": ("ar", "threshold")[index % 2]},
            )

        together = await asyncio.gather(*(ask(index) for index in range(16)))
        for index, response in enumerate(together):
            alone = await ask(index)
            assert response.choices[0].message.content == alone.choices[0].message.content


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"confidence_threshold": 0}, 400, "confidence_threshold"),
        ({"confidence_threshold": 1.01}, 400, "confidence_threshold"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"model": "plain", "mode": "threshold"}, 400, "mode"),
    ],
)
def test_bad_requests_are_refused_by_name(server, body, status, param):
    request = {"model": "mars", "messages": PROMPT, "max_tokens": 4, **body}
    response = httpx.post(f"{server}/v1/chat/completions", json=request)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["message"].startswith(f"{param}:")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_connection_frees_its_pages(server, stream):
    """The untrained model never ends by itself: only cancellation frees its pages in time."""
    body = {"model": "untrained", "prompt": "Totals", "max_tokens": 16_000, "stream": stream}
    async with httpx.AsyncClient(base_url=server, timeout=60) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await wait_for_engine(client, lambda engine: engine["num_requests"] == 1)
        call.cancel()
        await wait_for_engine(
            client, lambda engine: engine["num_free_pages"] == engine["num_pages"]
        )


async def wait_for_engine(client, condition):
    for _ in range(100):
        health = (await client.get("/health")).json()
        if condition(health["models"]["untrained"]):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"the engine never got there: {health}")


def test_a_taken_port_is_one_clear_line(server, trained):
    port = server.rpartition(":")[2]
    command = [sys.executable, "-m", "mars_platform", "serve", "--port", port]
    result = subprocess.run(
        [*command, "--model", str(trained.model)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: port: cannot listen on 127.0.0.1:{port}")
