from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.failing_engines import SlowEngine
from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_serve.engine.decoding_options import (
    FinishReason,
    GrammarKind,
    GrammarSpec,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.ipc.client import (
    EngineDied,
    QueueFull,
    QueueTimeout,
    RequestFailed,
)
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from waiting import soon

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))

Loops = Callable[..., LocalEngineClient]


class HangingEngine(Engine):
    """An engine whose steps do not return before they are told to."""

    may_go_on: threading.Event

    def finish_step(self, step: Step | None) -> list[StepOutput]:
        self.may_go_on.wait(30)
        return super().finish_step(step)


class OverlappingEngine(Engine):
    """An engine whose outputs are delivered while the next step runs, as on a GPU."""

    overlaps = True


@pytest.fixture
def make_loop(
    tiny_model: Callable[[str], PreTrainedModel], make_engine: Callable[..., Engine]
) -> Iterator[Loops]:
    loops = []

    def make(
        engine_class: type[Engine] = Engine, model: PreTrainedModel | None = None, **sizes: int
    ) -> LocalEngineClient:
        model = model or tiny_model("qwen2")
        engine = make_engine(model, SPECIAL, engine_class=engine_class, **sizes)
        loops.append(LocalEngineClient(engine))
        return loops[-1]

    yield make
    for loop in loops:
        loop.stop()


def long_request(name: str, max_tokens: int = 200, **options: Any) -> Request:
    """Build a request with a prompt of 5 tokens, by default of plain AR decoding."""
    return make_request(name, 5, max_tokens, **{"threshold": 1.0, **options})


async def collect(loop: LocalEngineClient, request: Request) -> list[StepOutput]:
    return [output async for output in loop.stream(request)]


async def started(loop: LocalEngineClient, request: Request) -> AsyncIterator[StepOutput]:
    stream = loop.stream(request)
    await anext(stream)
    return stream


def has_all_pages(engine: Engine) -> bool:
    return engine.status().num_free_pages == engine.settings.num_pages and not engine.has_work


@pytest.mark.parametrize("engine_class", [Engine, OverlappingEngine])
async def test_each_stream_yields_its_requests_outputs_in_order(
    make_loop: Loops, tiny_model: Callable[[str], PreTrainedModel], engine_class: type[Engine]
) -> None:
    loop = make_loop(engine_class)
    requests = [long_request(f"r{i}", max_tokens=4 + 2 * i, threshold=0.1) for i in range(8)]
    prompts = {request.id: list(request.tokens) for request in requests}
    results = await asyncio.gather(*(collect(loop, request) for request in requests))
    for request, outputs in zip(requests, results, strict=True):
        expected = reference.decode(
            tiny_model("qwen2"),
            prompts[request.id],
            SPECIAL,
            max_tokens=request.options.max_tokens,
            threshold=0.1,
            num_masks=4,
            mask_token_id=3,
        )
        assert [output.tokens for output in outputs] == expected.passes
        assert {output.request_id for output in outputs} == {request.id}
        reasons = [output.finish_reason for output in outputs]
        assert reasons == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    assert has_all_pages(loop.engine)


async def test_closing_the_iteration_frees_pages(make_loop: Loops) -> None:
    loop = make_loop(SlowEngine)
    stream = await started(loop, long_request("closed"))
    status = loop.status()
    assert (status.num_requests, status.num_pages) == (1, 120)
    assert 120 - 52 <= status.num_free_pages <= 120 - 2  # 5 to 205 tokens, 4 a page
    await stream.aclose()
    await soon(lambda: has_all_pages(loop.engine))
    assert loop.is_alive


async def test_a_request_cancelled_as_it_ends_waits_for_nothing_more(
    make_loop: Loops, caplog: pytest.LogCaptureFixture
) -> None:
    loop, request = make_loop(), long_request("whole", max_tokens=4)
    request.is_streamed = False
    task = asyncio.create_task(collect(loop, request))

    def cancel() -> None:
        if request.num_generated:  # its one output is being delivered
            task.cancel()

    loop.on_change = cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.num_generated == 4
    assert not caplog.records, "it would say that the engine does not answer"


async def test_cancelling_a_waiting_request_leaves_the_running_one(make_loop: Loops) -> None:
    loop = make_loop(SlowEngine, max_num_seqs=1)
    running = await started(loop, long_request("running", max_tokens=6))
    waiting = asyncio.create_task(collect(loop, long_request("waiting")))
    await soon(lambda: loop.engine.status().num_requests == 2)
    waiting.cancel()
    rest = [output async for output in running]
    assert len(rest) == 5
    assert rest[-1].finish_reason is FinishReason.LENGTH
    await soon(lambda: has_all_pages(loop.engine))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_request_beyond_the_limit_is_refused(make_loop: Loops) -> None:
    loop = make_loop(SlowEngine, max_requests=2)
    streams = [await started(loop, long_request(name)) for name in "ab"]
    with pytest.raises(QueueFull):
        await collect(loop, long_request("c"))
    await streams[0].aclose()
    streams[0] = await started(loop, long_request("d"))
    for stream in streams:
        await stream.aclose()
    await soon(lambda: has_all_pages(loop.engine))


async def test_a_failing_request_raises_and_the_others_go_on(
    make_loop: Loops, tiny_model: Callable[[str], PreTrainedModel]
) -> None:
    model = copy.deepcopy(tiny_model("qwen2"))
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = torch.nan
    loop = make_loop(model=model)
    broken = make_request("broken", [39, 63, 43, 48, 55], 8, threshold=1.0)
    sound = make_request("sound", [39, 40, 43, 48, 55], 8, threshold=1.0)
    results = await asyncio.gather(
        collect(loop, broken), collect(loop, sound), return_exceptions=True
    )
    assert isinstance(results[0], RequestFailed)
    assert sum(len(output.tokens) for output in results[1]) == 8
    assert loop.is_alive
    assert has_all_pages(loop.engine)


async def test_stopping_ends_streams_and_refuses_later_requests(make_loop: Loops) -> None:
    loop = make_loop(SlowEngine)
    stream = await started(loop, long_request("running"))
    loop.stop()
    assert not loop.is_alive
    with pytest.raises(EngineDied):
        _ = [output async for output in stream]
    with pytest.raises(EngineDied):
        await collect(loop, long_request("later"))
    loop.stop()


# Waiting


def patient(name: str, max_queue_s: float, *, max_tokens: int = 200) -> Request:
    return long_request(name, max_tokens, max_queue_s=max_queue_s)


async def test_a_request_that_waits_too_long_raises(make_loop: Loops) -> None:
    loop = make_loop(SlowEngine, max_num_seqs=1)
    running = await started(loop, patient("running", 0.3, max_tokens=8))
    waiting = long_request("waiting", max_tokens=2)
    rest = asyncio.create_task(collect(loop, waiting))
    with pytest.raises(QueueTimeout, match=r"did not begin within 0\.1 s"):
        await collect(loop, patient("late", 0.1))
    assert len([output async for output in running]) == 7, "a begun request has no deadline"
    first, _ = await rest
    assert first.queue_s > 0.1
    await soon(lambda: has_all_pages(loop.engine))
    assert loop.engine.status().num_requests == 0


async def test_waits_end_in_time_even_if_the_engine_hangs(
    make_loop: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_serve.engine.ipc.client._QUEUE_GRACE_S", 0.1)
    monkeypatch.setattr("mars_serve.engine.ipc.client._LOOK_S", 0.05)
    loop = make_loop(HangingEngine, max_num_seqs=1)
    loop.engine.may_go_on = threading.Event()
    running = asyncio.create_task(collect(loop, patient("running", 0.3, max_tokens=2)))
    await soon(lambda: bool(loop.engine.status().num_running))
    try:
        with pytest.raises(QueueTimeout, match=r"did not begin within 0\.3 s"):
            await collect(loop, patient("waiting", 0.3))
    finally:
        loop.engine.may_go_on.set()
    assert len(await running) == 2, "what a step holds has begun, though it gave no output"


async def test_an_expired_request_ends_even_if_the_engine_is_idle(make_loop: Loops) -> None:
    loop = make_loop()
    with pytest.raises(QueueTimeout):
        await collect(loop, patient("never", -1.0))
    assert len(await collect(loop, patient("soon", 60.0, max_tokens=3))) == 3


async def test_the_first_output_reports_prefix_hits_and_waiting_time(
    make_loop: Loops,
) -> None:
    loop = make_loop()
    await collect(loop, long_request("one", max_tokens=4))
    outputs = await collect(loop, long_request("one", max_tokens=4))
    hits = [output.num_prefix_hit_tokens for output in outputs]
    assert hits == [4, 0, 0, 0], "a page of the 5 tokens"
    assert [output.queue_s > 0 for output in outputs] == [True, False, False, False]
    status = loop.status()
    assert (status.num_prompt_tokens, status.num_generated_tokens) == (10, 8)
    assert (status.num_forward_passes, status.num_row_passes) == (8, 8)
    assert status.busy_s > 0


# Compiling grammars


class CompilingEngine(Engine):
    """An engine whose grammars take until the test sets `may_compile`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_compile = threading.Event()

    def check(self, request: Request) -> None:
        if request.options.grammar is not None:
            assert self.may_compile.wait(5)
            raise UserError("grammar: there is none")
        super().check(request)


def structured(name: str) -> Request:
    return long_request(name, max_tokens=3, grammar=GrammarSpec(GrammarKind.REGEX, "a"))


async def test_requests_go_on_while_a_grammar_compiles(make_loop: Loops) -> None:
    loop = make_loop(CompilingEngine)
    task = asyncio.create_task(collect(loop, structured("slow")))
    assert len(await collect(loop, long_request("fast", max_tokens=3))) == 3
    assert not task.done()
    loop.engine.may_compile.set()
    with pytest.raises(UserError, match=r"^grammar: "):
        await task


async def test_a_request_whose_grammar_compiles_gets_signs_of_life(
    make_loop: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is said about it, for far longer than an engine may be silent."""
    monkeypatch.setattr("mars_serve.engine.ipc.connections._BEAT_S", 0.05)
    monkeypatch.setattr("mars_serve.engine.ipc.client._SILENT_S", 0.8)
    monkeypatch.setattr("mars_serve.engine.ipc.client._LOOK_S", 0.05)
    loop = make_loop(CompilingEngine)
    task = asyncio.create_task(collect(loop, structured("slow")))
    await asyncio.wait([task], timeout=1.6)
    assert not task.done()
    loop.engine.may_compile.set()
    with pytest.raises(UserError, match=r"^grammar: "):
        await task


async def test_a_request_cancelled_while_its_grammar_compiles_does_not_run(
    make_loop: Loops,
) -> None:
    loop = make_loop(CompilingEngine)
    task = asyncio.create_task(collect(loop, structured("left")))
    assert len(await collect(loop, long_request("one", max_tokens=3))) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await collect(loop, long_request("two", max_tokens=3))) == 3
    loop.engine.may_compile.set()
    assert len(await collect(loop, long_request("three", max_tokens=3))) == 3
    assert loop.status().num_prompt_tokens == 15, "only the three have run"
