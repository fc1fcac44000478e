from __future__ import annotations

import asyncio
import csv
import errno
import hashlib
import io
import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from rich.console import Console

from local_loop import LocalLoop
from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.settings import OuterSettings
from mars_autoscale.simulation.figures import PolicyFigures, TierFigures
from mars_autoscale.simulation.report import policy_columns
from mars_autoscale.traces.files import TraceRequest, write_trace
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_platform.tier import Tier
from mars_serve.bench.load.compared import compared_json, compared_table
from mars_serve.bench.load.costs import Losses, quality_loss, replica_costs
from mars_serve.bench.load.figures import LoadFigures, client_figures, figures_of, samples_of
from mars_serve.bench.load.plan import (
    LoadPlan,
    PlannedRequest,
    Question,
    made_up_requests,
    question_requests,
    read_questions,
)
from mars_serve.bench.load.report import figures_json, lateness_warning, print_load
from mars_serve.bench.load.run import LoadOptions, LoadTest, run_load
from mars_serve.bench.load.send import LiveView, Replayed, SentRequest, replay
from mars_serve.bench.load.target import checked_url, open_client
from mars_serve.config.served import (
    Backend,
    Explanation,
    PublishedThreshold,
    ReplicaReport,
    ServedModel,
)
from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.loop import EngineDied
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.http.app import create_app

ENGINE = EngineSettings(page_size=8, num_pages=256, max_num_seqs=4, max_num_batched_tokens=65)
CLASSES = list(Tier)
QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
KEY = "a key of this test alone"


class LoopBackend:
    """Backend over an engine in this process; its one replica decodes with τ = 0.5."""

    def __init__(self, loop: LocalLoop) -> None:
        self.loop = loop

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        async with aclosing(self.loop.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def complete(self, request: Request) -> list[StepOutput]:
        return [output async for output in self.stream(request)]

    async def replicas(self) -> list[ReplicaReport]:
        return [ReplicaReport("only", self.loop.status(), PublishedThreshold(0, 0.5))]

    async def live_threshold(self) -> PublishedThreshold:
        return PublishedThreshold(0, 0.5)

    async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
        raise AssertionError("a load test changes nothing")

    async def autoscaler(self) -> Explanation | None:
        return None

    async def metrics(self) -> list[str]:
        return []


class SayingBackend(LoopBackend):
    """Backend that says the same to all, in passes of three tokens."""

    def __init__(self, loop: LocalLoop, tokens: list[int]) -> None:
        super().__init__(loop)
        self.tokens = tokens

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        for begin in range(0, len(self.tokens), 3):
            is_last = begin + 3 >= len(self.tokens)
            reason = FinishReason.LENGTH if is_last else None
            yield StepOutput(request.id, self.tokens[begin : begin + 3], reason, threshold=0.8)


class GovernedBackend(SayingBackend):
    """Backend whose autoscaler goes by a ladder."""

    async def autoscaler(self) -> Explanation | None:
        rungs = (Rung(1.0, 1.0, 0.0), Rung(0.9, 1.7, 2.0, 1), Rung(0.7, 2.2, 6.0, 1))
        capacity = Capacity(linear_step_time(0.1, 1000), rungs, 4, 1_000.0)
        return Explanation(AutoscalingBasis(capacity, OuterSettings(max_replicas=3)), [])


class CrowdedBackend(LoopBackend):
    """Backend that answers once so many requests are there."""

    def __init__(self, loop: LocalLoop, count: int) -> None:
        super().__init__(loop)
        self.barrier = asyncio.Barrier(count)

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        await self.barrier.wait()
        yield StepOutput(request.id, [50], FinishReason.LENGTH)


class StuckBackend(LoopBackend):
    """Backend that gives one token, and then fails or waits."""

    def __init__(self, loop: LocalLoop, error: Exception | None = None) -> None:
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
def make_loop(mars: Checkpoint) -> Iterator[Callable[..., LocalLoop]]:
    made = []

    def make(**sizes: Any) -> LocalLoop:
        made.append(LocalLoop(Engine(mars, ENGINE.model_copy(update=sizes))))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()


@pytest.fixture
def loop(make_loop: Callable[..., LocalLoop]) -> LocalLoop:
    return make_loop()


@contextmanager
def serving(
    mars: Checkpoint, backend: Backend, *, is_governed: bool = False, **settings: Any
) -> Iterator[str]:
    """A server over real HTTP; gives its address."""
    entry = ModelSettings(
        name="mars",
        path=str(mars.path),
        engine=ENGINE,
        autoscaling={"max_replicas": 3} if is_governed else None,
    )
    models = {"mars": ServedModel(entry, mars, backend, 0)}
    app = create_app(models, ServeSettings(models=[entry], **settings))
    config = uvicorn.Config(
        app, port=0, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def trace_file(tmp_path: Path, count: int = 20, every_s: float = 0.5, num_output: int = 6) -> Path:
    path = tmp_path / "trace.csv"
    requests = [
        TraceRequest(every_s * index, 10 + index, num_output, CLASSES[index % 3])
        for index in range(count)
    ]
    write_trace(path, requests)
    return path


def load(url: str, trace: Path, **options: Any) -> LoadTest:
    given = {"url": url, "trace": trace, "model": "mars", "speedup": 50.0, **options}
    return run_load(LoadOptions(**given), lambda *_: None)


# Against a server


def test_a_trace_against_an_engine(mars: Checkpoint, loop: LocalLoop, tmp_path: Path) -> None:
    trace = trace_file(tmp_path)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "svg")}
    command = ["bench", "load", "--trace", str(trace), "--model", "mars", "--speedup", "20"]
    command += ["--json", str(files["json"]), "--csv", str(files["csv"])]
    with serving(mars, LoopBackend(loop)) as url:
        assert run([*command, "--plot", str(files["svg"]), "--url", f"{url}/v1/"]) == 0
    found = json.loads(files["json"].read_text())
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
    samples = found["samples"]
    assert sum(sample["requests_per_s"] for sample in samples) == 20
    assert (samples[0]["live_threshold"], samples[0]["num_replicas"]) == (0.5, 1)
    assert samples[-1]["in_flight"] == 0
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [row["at_s"] for row in rows][:4] == ["0.0", "0.025", "0.05", "0.075"]
    assert [int(row["prompt_tokens"]) for row in rows] == list(range(10, 30))
    assert {row["completion_tokens"] for row in rows} == {"6"}
    assert files["svg"].stat().st_size > 1000


def test_the_seed_draws_prompts_and_classes(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path
) -> None:
    with serving(mars, LoopBackend(loop)) as url:
        tests = [
            load(url, trace_file(tmp_path), classes="flex=.5,default=.5", seed=seed, duration_s=0.1)
            for seed in (1, 1, 2)
        ]
    plans = [test.replayed.plan for test in tests]
    # of the 20, those of the trace's first 5 s
    contents = [[plan.content(request) for request in plan.requests] for plan in plans]
    assert [len(each) for each in contents] == [11, 11, 11]
    assert contents[0] == contents[1] != contents[2]
    assert tests[0].figures.classes.keys() == {"default", "flex"}


def test_answers_are_checked(mars: Checkpoint, loop: LocalLoop, tmp_path: Path) -> None:
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


def test_a_full_queue_rejects(
    mars: Checkpoint, make_loop: Callable[..., LocalLoop], tmp_path: Path
) -> None:
    loop = make_loop(max_requests=2)
    step = loop.engine.step

    def slow() -> list[StepOutput]:
        time.sleep(0.05)
        return step()

    loop.engine.step = slow  # type: ignore[method-assign]
    with serving(mars, LoopBackend(loop)) as url:
        test = load(url, trace_file(tmp_path, every_s=0, num_output=40), objective_ttft_s=60.0)
    found = test.figures.all
    assert found.num_ended == 20
    assert found.rejected == 20 - found.num_served >= 10
    assert found.errors == {"503 queue_full": found.rejected}
    assert (found.rejected_503, found.rejected_429) == (found.rejected / 20, 0.0)
    assert found.slo_attainment == found.num_served / 20
    assert found.ttft_p99_s == math.inf
    assert found.failed == 0


def test_what_a_key_may_not_do(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    entry = {"name": "one", "sha256": digest, "tiers": ["default"], "requests_per_minute": 3}
    trace = trace_file(tmp_path)
    with serving(mars, LoopBackend(loop), keys={"entries": [entry]}) as url:
        with pytest.raises(UserError, match=r"--key-env: GET .* gives 401"):
            load(url, trace)
        monkeypatch.setenv("LOAD_KEY", KEY)
        of_tier = load(url, trace, key_env="LOAD_KEY", max_requests=1, classes="flex=1")
        test = load(url, trace, key_env="LOAD_KEY", classes="default=1")
    assert of_tier.figures.all.errors == {"403 tier_not_allowed": 1}
    assert (of_tier.figures.all.rejected, of_tier.figures.all.failed) == (0, 1)
    found = test.figures.all
    assert 0 < found.num_served <= 3
    assert found.rejected_429 == found.rejected / 20
    assert found.errors == {"429 rate_limit_exceeded": 20 - found.num_served}
    assert test.replayed.live_refusal == 403
    assert test.losses.refusal == "/admin/autoscaler gave 403"
    known = (found.quality_loss_mean, test.figures.replica_hours, test.figures.replica_changes)
    assert known == (None, None, None)
    assert {sample.live_threshold for sample in test.figures.samples} == {None}


def test_what_it_cost_as_the_simulator_tells_it(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path
) -> None:
    backend = GovernedBackend(loop, [50] * 6)  # decoded with τ = 0.8
    with serving(mars, backend, is_governed=True) as url:
        test = load(url, trace_file(tmp_path), objective_ttft_s=60.0)
    (policy,) = figures_json(test)["policies"]
    assert policy.keys() == {"name", "variant"} | PolicyFigures.__dataclass_fields__.keys()
    assert (policy["name"], policy["slo_attainment"], policy["rejected"]) == ("mars", 1.0, 0)
    assert (policy["quality_loss_mean"], policy["quality_loss_p99"]) == pytest.approx((4.0, 4.0))
    last_s = max(each.sent_s for each in test.replayed.sent)
    assert policy["replica_hours"] == pytest.approx(last_s / 3600)
    assert (policy["threshold_changes"], policy["replica_changes"]) == (0, 0)
    assert policy["by_class"].keys() == {"priority", "default", "flex"}
    flex = policy["by_class"]["flex"]
    assert flex.keys() == TierFigures.__dataclass_fields__.keys()
    assert flex["quality_loss_mean"] == pytest.approx(4.0)


def test_the_senders_own_limit_of_files_is_raised(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path
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


def test_what_never_ends_is_given_up(mars: Checkpoint, loop: LocalLoop, tmp_path: Path) -> None:
    with serving(mars, StuckBackend(loop)) as url:
        found = load(url, trace_file(tmp_path, count=3), timeout_s=0.3).figures.all
    assert (found.num_ended, found.failed, found.errors) == (3, 3, {"timeout": 3})
    assert found.slo_attainment == 0.0


def test_a_replica_that_dies_amid_a_stream(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path
) -> None:
    with serving(mars, StuckBackend(loop, EngineDied("dead"))) as url:
        found = load(url, trace_file(tmp_path, count=3)).figures.all
    assert (found.failed, found.errors) == (3, {"stream: not_ready": 3})
    assert found.ttft_p50_s == math.inf


def test_an_interrupt_ends_it_with_what_there_is(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        ({"classes": "flex"}, "--classes: 'flex' is no share"),
        ({"classes": "flex=.5"}, "--classes: classes: the shares make 0.5"),
        ({"key_env": "MARSRAY_NO_SUCH_KEY"}, "--key-env: MARSRAY_NO_SUCH_KEY is not set"),
        ({"json_file": Path("/nowhere/x.json")}, "--json: there is no directory /nowhere"),
        ({"plot_file": Path("x.odd")}, "--plot: x.odd names no format"),
        ({"url": "http://127.0.0.1:1"}, "--url: GET http://127.0.0.1:1/v1/models fails"),
    ],
)
def test_refused(
    mars: Checkpoint, loop: LocalLoop, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with serving(mars, LoopBackend(loop)) as url, pytest.raises(UserError, match=message):
        load(options.pop("url", url), trace_file(tmp_path), **options)


def test_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "load", "--trace", str(trace_file(tmp_path)), "--model", "mars"]
    assert run([*command, "--speedup", "0", "--trace-format", "odd"]) == 2
    message = capsys.readouterr().err
    assert "speedup: Input should be greater than 0" in message
    assert "trace_format: Input should be 'azure', 'mooncake' or 'csv'" in message


# Against answers that our server does not give


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (200, 'data: {"choices": [{"text": "x"}], "mars": {"tokens": 1}}\n\n', "stream cut off"),
        (200, "data: {\n\ndata: [DONE]\n\n", "malformed event"),
        (502, "<html>", "502"),
        (200, ": ping\n\ndata: [DONE]\n\n", None),
    ],
)
async def test_odd_answers(status: int, text: str, error: str | None) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=text)

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        plan = LoadPlan("m", [planned()], [5, 6], 0)
        replayed = await replay(client, plan, timeout_s=10, on_progress=lambda *_: None)
    (outcome,) = replayed.sent
    assert (outcome.status, outcome.error) == (status, error)
    assert replayed.live == []  # these answers tell nothing of τ


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EMFILE, "sender: too many open files"), (errno.ECONNREFUSED, "ConnectError")],
)
async def test_a_sender_without_files_is_not_the_server_s_failure(number: int, error: str) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        try:  # as anyio does it, where a host has two addresses
            attempts = [OSError(number, os.strerror(number)), OSError("no route")]
            raise OSError("All connection attempts failed") from ExceptionGroup("two", attempts)
        except OSError as failed:
            raise httpx.ConnectError(str(failed)) from failed

    transport = httpx.MockTransport(refuse)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        plan = LoadPlan("m", [planned()], [5, 6], 0)
        replayed = await replay(client, plan, timeout_s=10, on_progress=lambda *_: None)
    assert [outcome.error for outcome in replayed.sent] == [error]


# Plans


def planned(index: int = 0, at_s: float = 0.0, **fields: Any) -> PlannedRequest:
    return PlannedRequest(index, at_s, fields.pop("tier", Tier.DEFAULT), 3, 4, **fields)


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (10, 20, (10, 20, False)),
        (80, 20, (80, 20, False)),
        (90, 20, (80, 20, True)),  # the output is short: the prompt gives way
        (20, 500, (20, 80, True)),
        (500, 500, (50, 50, True)),
        (500, 1, (99, 1, True)),
        (0, 5, (1, 5, False)),
    ],
)
def test_lengths_are_cut_to_the_model_s(
    prompt: int, output: int, expected: tuple[int, int, bool]
) -> None:
    (request,) = made_up_requests([TraceRequest(6.0, prompt, output)], 3.0, 100)
    assert (request.prompt_tokens, request.max_tokens, request.is_capped) == expected
    assert request.at_s == 2.0


def test_a_made_up_prompt() -> None:
    plan = LoadPlan("m", [planned(0), planned(1)], [5, 6, 7, 8], seed=3)
    bodies = [json.loads(plan.content(request)[1]) for request in plan.requests]
    assert [len(body["prompt"]) for body in bodies] == [3, 3]
    assert {token for body in bodies for token in body["prompt"]} <= {5, 6, 7, 8}
    assert bodies[0]["prompt"] != bodies[1]["prompt"]
    assert {(body["max_tokens"], body["min_tokens"]) for body in bodies} == {(4, 4)}
    assert bodies[0]["service_tier"] == "default"


def test_questions_come_round_again() -> None:
    trace = [TraceRequest(float(index), 1, 50) for index in range(3)]
    first, second = (Question(name, QUESTION, None) for name in "ab")
    requests = question_requests(trace, 1.0, 60, [(first, 20), (second, 5)], None)
    assert [request.question for request in requests] == [first, second, first]
    assert [(r.max_tokens, r.is_capped) for r in requests] == [(40, True), (50, False), (40, True)]
    with pytest.raises(UserError, match="b: messages: the prompt has 60 tokens"):
        question_requests(trace, 1.0, 60, [(first, 20), (second, 60)], None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ":2: not valid JSON"),
        (json.dumps({"messages": QUESTION}), ":2: messages: the last turn"),
        (
            json.dumps(
                {
                    "messages": [*QUESTION, {"role": "assistant", "content": "x"}],
                    "answer": True,
                }
            ),
            ":2: answer: must be",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    good = {"messages": [*QUESTION, {"role": "assistant", "content": "x"}], "answer": 3}
    path.write_text(json.dumps(good) + "\n" + row + "\n")
    assert [question.answer for question in read_questions(path, 1)] == ["3"]
    with pytest.raises(UserError, match=message):
        read_questions(path, 5)


@pytest.mark.parametrize(
    "url", ["http://localhost:8000", "http://[::1]:8000/v1", "https://127.1.2.3"]
)
def test_this_machine_s_addresses(url: str) -> None:
    assert checked_url(url, allow_remote=False) == url.removesuffix("/v1")


@pytest.mark.parametrize(
    "url", ["http://example.com", "https://10.0.0.1:8000", "http://127.0.0.1.x"]
)
def test_other_machines_have_to_be_meant(url: str) -> None:
    with pytest.raises(UserError, match="--allow-remote"):
        checked_url(url, allow_remote=False)
    assert checked_url(url, allow_remote=True) == url


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://a:b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UserError, match="--url"):
        checked_url(url, allow_remote=True)


async def test_the_client_sends_the_key_and_goes_where_it_was_told() -> None:
    async with open_client("http://127.0.0.1:8000", "secret") as client:
        assert client.headers["authorization"] == "Bearer secret"
        assert not client.follow_redirects
        assert not client.trust_env


# Figures


def outcome(
    sent_s: float, first_s: float | None, end_s: float | None, tier: str = "default", **fields: Any
) -> SentRequest:
    at_s = fields.pop("at_s", sent_s)
    request = planned(at_s=at_s, tier=Tier(tier))
    return SentRequest(request, sent_s, first_s, end_s, **fields)


def served(sent_s: float, ttft_s: float, e2e_s: float, **fields: Any) -> SentRequest:
    known = {"status": 200, "num_tokens": 4, "num_passes": 2, "threshold_mean": 0.9}
    return outcome(sent_s, sent_s + ttft_s, sent_s + e2e_s, **{**known, **fields})


OUTCOMES = [
    served(0.0, 0.5, 1.5, threshold_min=0.8, correct=True),
    served(0.5, 2.0, 3.0, threshold_min=0.9, correct=False, tier="flex"),
    outcome(1.0, None, 1.1, status=503, error="503 queue_full"),
    outcome(1.0, None, 1.1, status=429, error="429", tier="flex"),
    outcome(1.5, 1.6, 1.9, status=200, error="stream cut off", num_tokens=2),
    outcome(2.0, 2.1, None, status=200, num_tokens=2),  # cut off by an interrupt
]


def test_figures_of_a_class() -> None:
    found = client_figures(OUTCOMES, objective_s=1.0, duration_s=5.0)
    assert (found.num_sent, found.num_ended, found.num_served) == (6, 5, 2)
    assert found.slo_attainment == 1 / 5
    assert (found.ttft_p50_s, found.ttft_p99_s) == (math.inf, math.inf)
    assert (found.rejected, found.rejected_429, found.rejected_503) == (2, 0.2, 0.2)
    assert found.failed == 1
    assert found.errors == {"503 queue_full": 1, "429": 1, "stream cut off": 1}
    assert (found.threshold_mean, found.threshold_min) == (0.9, 0.8)
    assert found.tokens_per_forward == 2.0
    assert (found.num_tokens, found.tokens_per_s) == (12, 12 / 5)
    assert found.num_checked == 2
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
    of_two = client_figures(OUTCOMES[:2], objective_s=2.0, duration_s=5.0)
    assert of_two.slo_attainment == 1.0
    assert (of_two.ttft_p50_s, of_two.ttft_p99_s) == (2.0, 2.0)
    assert (of_two.e2e_p50_s, of_two.e2e_p99_s) == (3.0, 3.0)


def test_nothing_is_measured_of_nothing() -> None:
    found = client_figures([], 1.0, 0.0)
    assert (found.num_sent, found.rejected, found.failed, found.errors) == (0, 0, 0, {})
    assert found.slo_attainment is found.ttft_p50_s is found.tokens_per_s is None
    assert samples_of([], [], 0.0) == []


def view(time_s: float, *thresholds: float) -> LiveView:
    """Of the replicas r0, r1 and so on."""
    named = {f"r{index}": threshold for index, threshold in enumerate(thresholds)}
    return LiveView(time_s, 0.5, named)


def test_samples() -> None:
    live = [view(0.0, 0.95), view(1.0, 0.8, 1.0), view(1.99, 0.7, 0.8, 0.9)]
    samples = samples_of(OUTCOMES, live, 3.5)
    assert [sample.time_s for sample in samples] == [0, 1, 2, 3]
    assert [sample.requests_per_s for sample in samples] == [2, 3, 1, 0]
    assert [sample.in_flight for sample in samples] == [2, 1, 2, 1]
    assert [sample.ttft_p95_s for sample in samples] == [2.0, math.inf, None, None]
    assert [sample.threshold_mean for sample in samples] == [0.9, None, None, None]
    assert [sample.live_threshold for sample in samples] == [0.95, pytest.approx(0.8), None, None]
    assert [sample.num_replicas for sample in samples] == [1, 3, None, None]


def test_the_live_threshold_without_a_replica_is_what_was_set() -> None:
    assert (view(0.0).threshold, view(0.0).num_replicas) == (0.5, 0)
    assert (view(0.0, 0.8, 1.0).threshold, view(0.0, 0.8, 1.0).num_replicas) == (0.9, 2)


LOSSES = Losses({0.9: 2.0, 0.7: 6.0})


def test_losses_lie_between_those_of_the_rungs() -> None:
    assert [LOSSES.at(each) for each in (1.0, 0.95, 0.9, 0.8, 0.7, 0.69)] == [
        pytest.approx(loss) for loss in (0.0, 1.0, 2.0, 4.0, 6.0)
    ] + [None]
    of_a_target = Losses({0.9: 2.0})
    assert of_a_target.at(1.0) == 0.0, "which loses nothing, target or not"
    nothing = Losses(refusal="/admin/autoscaler gave 403")
    assert (nothing.at(1.0), nothing.at(0.99)) == (0.0, None)


def test_a_loss_is_a_mean_over_tokens_and_a_quantile_over_answers() -> None:
    short = served(0.0, 0.1, 0.2, num_tokens=1, threshold_mean=0.7)
    long = served(0.0, 0.1, 0.2, num_tokens=3, threshold_mean=1.0)
    refused = outcome(1.0, None, 1.1, status=503, error="503 queue_full")
    loss = quality_loss([short, long, refused], LOSSES)
    assert loss.mean == pytest.approx(6.0 / 4)
    assert loss.p99 == pytest.approx(6.0 * 0.99)
    plain = quality_loss([long], Losses())
    assert (plain.mean, plain.p99) == (0.0, 0.0)
    for unknown in ([], [refused], [long, served(0.0, 0.1, 0.2, threshold_mean=0.5)]):
        assert quality_loss(unknown, LOSSES).mean is None
    untold = served(0.0, 0.1, 0.2, threshold_mean=None)
    assert quality_loss([long, untold], LOSSES).p99 is None


def test_replicas_cost_from_the_start_to_the_last_request() -> None:
    live = [view(0.2, 1.0), view(1.2, 0.9, 1.0), view(2.2, 0.9, 0.9), view(5.2, 0.9)]
    plan = LoadPlan("mars", [planned()], [], 0)
    sent = [served(0.0, 0.1, 9.0), served(4.2, 0.1, 9.0)]
    costs = replica_costs(Replayed(plan, sent, live))
    assert costs.replica_hours == pytest.approx((1.2 * 1 + 1.0 * 2 + 2.0 * 2) / 3600)
    assert (costs.threshold_changes, costs.replica_changes) == (2, 2)
    for untold in (Replayed(plan, sent), Replayed(plan, sent, live, live_refusal=401)):
        assert replica_costs(untold) == type(costs)()


def figures(outcomes: list[SentRequest]) -> LoadFigures:
    plan = LoadPlan("mars", [each.request for each in outcomes], [], 0)
    return figures_of(Replayed(plan, outcomes), 1.0)


def test_figures_of_a_test() -> None:
    found = figures(OUTCOMES)
    assert found.classes.keys() == {"default", "flex"}
    assert found.classes[Tier.FLEX].num_sent == 2
    assert found.classes[Tier.FLEX].slo_attainment == 0.0
    assert found.classes[Tier.DEFAULT].slo_attainment == 1 / 3
    assert found.duration_s == 3.5
    assert found.lateness_p99_s == 0.0


@pytest.mark.parametrize(("late_s", "warns"), [(0.049, False), (0.051, True)])
def test_a_late_sender_is_told_of(late_s: float, warns: bool) -> None:
    late = served(1.0 + late_s, 0.1, 0.2, at_s=1.0)
    found = figures([served(0.0, 0.1, 0.2), late])
    assert found.lateness_p99_s == pytest.approx(late_s)
    assert (lateness_warning(found) is not None) == warns


def test_json_knows_no_infinity() -> None:
    plan = LoadPlan("mars", [each.request for each in OUTCOMES], [], 0)
    options = LoadOptions(trace=Path("t.csv"), model="mars")
    test = LoadTest(options, Replayed(plan, OUTCOMES), figures(OUTCOMES), Losses())
    found = json.loads(json.dumps(figures_json(test), allow_nan=False))
    assert found["all"]["ttft_p99_s"] is None
    assert found["all"]["accuracy"].keys() == {"value", "low", "high"}
    assert found["options"]["model"] == "mars"
    assert [sample["ttft_p95_s"] for sample in found["samples"]] == [2.0, None, None, None]
    assert found["policies"][0]["ttft_p99_s"] is None


def test_what_cannot_be_known_is_a_dash() -> None:
    plan = LoadPlan("mars", [each.request for each in OUTCOMES], [], 0)
    options = LoadOptions(trace=Path("t.csv"), model="mars")
    losses = Losses(refusal="/admin/autoscaler gave 403")
    test = LoadTest(options, Replayed(plan, OUTCOMES), figures(OUTCOMES), losses)
    table = compared_table(test)
    assert [column.header for column in table.columns] == [
        each.header for each in policy_columns(1.0)
    ]
    last = [list(column.cells)[-1] for column in table.columns]
    assert last == ["mars", "20.0%", "never", "never", "-", "-", "-", "-", "-", "2"]
    assert compared_json(test)["quality_loss_mean"] is None
    console = Console(record=True, width=160, file=io.StringIO())
    print_load(test, console)
    assert "The loss of quality is not known: /admin/autoscaler gave 403." in console.export_text()
