from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decoding.local_engine_client import LocalEngineClient
from mars_autoscale.traces.files import TraceRequest
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_platform.tier import Tier
from mars_serve.bench.load.run import LoadTest, run_load
from mars_serve.bench.options import LoadOptions
from mars_serve.config.served import Backend
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.client import EngineDied
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from rest.rest_server import ENGINE, SingleEngineBackend, app_of, served
from trace_files import write_trace
from web.live_server import live_server

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
KEY = "a key of this test alone"


class SayingBackend(SingleEngineBackend):
    """A backend that gives every request the same answer, in passes of three tokens."""

    def __init__(self, loop: LocalEngineClient, tokens: list[int]) -> None:
        super().__init__(loop)
        self.tokens = tokens

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        for begin in range(0, len(self.tokens), 3):
            is_last = begin + 3 >= len(self.tokens)
            reason = FinishReason.LENGTH if is_last else None
            yield StepOutput(request.id, self.tokens[begin : begin + 3], reason, threshold=0.8)


class CrowdedBackend(SingleEngineBackend):
    """A backend that answers once a given number of requests has come."""

    def __init__(self, loop: LocalEngineClient, count: int) -> None:
        super().__init__(loop)
        self.barrier = asyncio.Barrier(count)

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        await self.barrier.wait()
        yield StepOutput(request.id, [50], FinishReason.LENGTH)


class StuckBackend(SingleEngineBackend):
    """A backend that gives one token and then fails or waits."""

    def __init__(self, loop: LocalEngineClient, error: Exception | None = None) -> None:
        super().__init__(loop)
        self.error = error
        self.has_begun = threading.Event()

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        yield StepOutput(request.id, [50], None)
        self.has_begun.set()
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def mars(mars_dir: Path) -> Checkpoint:
    return read_checkpoint(mars_dir)


@pytest.fixture
def make_loop(mars: Checkpoint) -> Iterator[Callable[..., LocalEngineClient]]:
    made = []

    def make(**sizes: Any) -> LocalEngineClient:
        made.append(LocalEngineClient(Engine(mars, ENGINE.model_copy(update=sizes))))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()


@pytest.fixture
def loop(make_loop: Callable[..., LocalEngineClient]) -> LocalEngineClient:
    return make_loop()


@contextmanager
def serving(mars: Checkpoint, backend: Backend, **settings: Any) -> Iterator[str]:
    """Serve over real HTTP and yield the address."""
    with live_server(app_of(served("mars", mars, backend), **settings)) as server:
        yield server.address


def trace_file(
    tmp_path: Path,
    count: int = 20,
    every_s: float = 0.5,
    num_output: int = 6,
    tiers: Sequence[Tier] = tuple(Tier),
) -> Path:
    path = tmp_path / "trace.csv"
    requests = [
        TraceRequest(every_s * index, 10 + index, num_output, tiers[index % len(tiers)])
        for index in range(count)
    ]
    write_trace(path, requests)
    return path


def load(url: str, trace: Path, **options: Any) -> LoadTest:
    given = {"url": url, "trace": trace, "model": "mars", "speedup": 50.0, **options}
    return run_load(LoadOptions(**given), lambda *_: None)


def test_a_trace_is_replayed_and_measured(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path
) -> None:
    trace = trace_file(tmp_path)
    file = tmp_path / "out.json"
    command = ["bench", "load", "--trace", str(trace), "--model", "mars", "--speedup", "20"]
    with serving(mars, SingleEngineBackend(loop)) as url:
        assert run([*command, "--json", str(file), "--url", f"{url}/v1/"]) == 0
    found = json.loads(file.read_text())
    everyone, classes = found["all"], found["classes"]
    assert everyone["num_sent"] == everyone["num_ended"] == everyone["num_served"] == 20
    sent = {name: each["num_sent"] for name, each in classes.items()}
    assert sent == {"priority": 7, "default": 7, "flex": 6}
    assert everyone["num_tokens"] == 20 * 6
    assert everyone["tokens_per_forward"] >= 1
    assert (everyone["rejected"], everyone["failed"], everyone["errors"]) == (0, 0, {})
    assert everyone["accuracy"] is None
    assert classes["priority"]["threshold_min"] == 1.0  # decoded without loss
    assert 0 < everyone["ttft_p50_s"] <= everyone["ttft_p99_s"] <= everyone["e2e_p99_s"]
    assert found["lateness_p99_s"] >= 0
    assert found["num_capped"] == 0
    assert found["duration_s"] >= 9.5 / 20


def test_the_seed_draws_prompts(mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path) -> None:
    with serving(mars, SingleEngineBackend(loop)) as url:
        tests = [load(url, trace_file(tmp_path), seed=seed, duration_s=0.1) for seed in (1, 1, 2)]
    plans = [test.replayed.plan for test in tests]
    # the requests of the trace's first 5 s
    contents = [[plan.content(request) for request in plan.requests] for plan in plans]
    assert [len(each) for each in contents] == [11, 11, 11]
    assert contents[0] == contents[1] != contents[2]


def test_answers_are_checked(mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    turns = [*QUESTION, {"role": "assistant", "content": "Answer: 7"}]
    answers = [{"answer": 7}, {"answer": "8"}, {"answer": "7.0"}, {}]
    data.write_text("".join(json.dumps({"messages": turns, **each}) + "\n" for each in answers))
    said = mars.tokenizer("I say so. Answer: 7")["input_ids"]
    with serving(mars, SayingBackend(loop, said)) as url:
        test = load(url, trace_file(tmp_path), data=data, max_tokens=100)
    found = test.figures.all
    assert (found.num_served, found.num_checked) == (20, 15)
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(10 / 15)
    assert found.accuracy.low < 10 / 15 < found.accuracy.high
    assert found.num_tokens == 20 * len(said)
    assert found.tokens_per_forward == pytest.approx(len(said) / -(-len(said) // 3))
    assert (found.threshold_mean, found.threshold_min) == (0.8, 0.8)
    lengths = {(r.max_tokens, r.is_capped) for r in test.replayed.plan.requests}
    assert lengths == {(100, False)}


def test_requests_that_a_full_server_rejects_are_counted(
    mars: Checkpoint, make_loop: Callable[..., LocalEngineClient], tmp_path: Path
) -> None:
    loop = make_loop(max_requests=2)
    step = loop.engine.step

    def slow() -> list[StepOutput]:
        time.sleep(0.05)
        return step()

    loop.engine.step = slow  # type: ignore[method-assign]
    with serving(mars, SingleEngineBackend(loop)) as url:
        test = load(url, trace_file(tmp_path, every_s=0, num_output=40), objective_ttft_s=60.0)
    found = test.figures.all
    assert found.num_ended == 20
    assert found.rejected == 20 - found.num_served >= 10
    assert found.errors == {"503 queue_full": found.rejected}
    assert (found.rejected_503, found.rejected_429) == (found.rejected / 20, 0.0)
    assert found.slo_attainment == found.num_served / 20
    assert found.ttft_p99_s == math.inf
    assert found.failed == 0


def test_the_limits_of_a_key_are_reported(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    entry = {"name": "one", "sha256": digest, "tiers": ["default"], "requests_per_minute": 9}
    with serving(mars, SingleEngineBackend(loop), keys={"entries": [entry]}) as url:
        with pytest.raises(UserError, match=r"--key-env: GET .* gives 401"):
            load(url, trace_file(tmp_path))
        monkeypatch.setenv("LOAD_KEY", KEY)
        of_tier = load(url, trace_file(tmp_path, 1, tiers=[Tier.FLEX]), key_env="LOAD_KEY")
        test = load(url, trace_file(tmp_path, tiers=[Tier.DEFAULT]), key_env="LOAD_KEY")
    assert of_tier.figures.all.errors == {"403 tier_not_allowed": 1}
    assert (of_tier.figures.all.rejected, of_tier.figures.all.failed) == (0, 1)
    found = test.figures.all
    assert 0 < found.num_served < 9  # measuring the prompts' length takes some requests, too
    assert found.rejected_429 == found.rejected / 20
    assert found.errors == {"429 rate_limit_exceeded": 20 - found.num_served}


def test_the_sender_raises_its_own_limit_of_files(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path
) -> None:
    count = 60
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(mars, CrowdedBackend(loop, count)) as url:
        few = len(list(Path("/proc/self/fd").iterdir())) + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        try:
            found = load(url, trace_file(tmp_path, count=count, every_s=0), timeout_s=20.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (found.figures.all.num_served, found.figures.all.errors) == (count, {})


def test_a_request_that_never_ends_fails_at_the_timeout(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path
) -> None:
    with serving(mars, StuckBackend(loop)) as url:
        found = load(url, trace_file(tmp_path, count=3), timeout_s=0.3).figures.all
    assert (found.num_ended, found.failed, found.errors) == (3, 3, {"timeout": 3})
    assert found.slo_attainment == 0.0


def test_a_replica_that_dies_during_a_stream_fails_the_request(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path
) -> None:
    with serving(mars, StuckBackend(loop, EngineDied("dead"))) as url:
        found = load(url, trace_file(tmp_path, count=3)).figures.all
    assert (found.failed, found.errors) == (3, {"stream: not_ready": 3})
    assert found.ttft_p50_s == math.inf


def test_an_interrupt_ends_the_test_early(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend, path = StuckBackend(loop), tmp_path / "out.json"

    def interrupt() -> None:
        if backend.has_begun.wait(20):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    trace = trace_file(tmp_path, count=3, every_s=30)
    command = ["bench", "load", "--trace", str(trace), "--model", "mars", "--json", str(path)]
    with serving(mars, backend) as url:
        assert run([*command, "--url", url]) == 130
    thread.join()
    found = json.loads(path.read_text())
    assert found["was_interrupted"]
    assert (found["all"]["num_sent"], found["all"]["num_ended"]) == (1, 0)
    assert found["num_planned"] == 3
    assert found["all"]["slo_attainment"] is None
    assert "1 of 3 requests were sent, and 1 had not ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "other"}, "--model: the server has no other; it has mars"),
        ({"max_tokens": 3}, "--max-tokens: .* give --data"),
        ({"key_env": "MARSRAY_NO_SUCH_KEY"}, "--key-env: MARSRAY_NO_SUCH_KEY is not set"),
        ({"json_file": Path("/nowhere/x.json")}, "--json: there is no directory /nowhere"),
        ({"url": "http://127.0.0.1:1"}, "--url: GET http://127.0.0.1:1/v1/models fails"),
    ],
)
def test_a_bad_option_is_refused(
    mars: Checkpoint, loop: LocalEngineClient, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with serving(mars, SingleEngineBackend(loop)) as url, pytest.raises(UserError, match=message):
        load(options.pop("url", url), trace_file(tmp_path), **options)
