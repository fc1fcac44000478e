"""The engine in a process of its own: one start for all tests but those that end it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mars_platform.checkpoint.directory import load_model, read_checkpoint
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop
from mars_serve.engine.request import (
    DecodingOptions,
    GrammarKind,
    GrammarSpec,
    LiveDecoding,
    Request,
    StepOutput,
)
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica.engine_process import start_engine

PROMPT = list(range(10, 22))


def settings_of(path: Path) -> ModelSettings:
    engine = EngineSettings(page_size=8, num_pages=64, max_num_seqs=4, max_requests=8)
    return ModelSettings(name="mars", path=str(path), engine=engine)


@pytest.fixture(scope="module")
def loop(mars_dir: Path) -> Iterator[EngineLoop]:
    loop = start_engine(settings_of(mars_dir), num_threads=1)
    yield loop
    loop.stop()


async def collect(loop: EngineLoop, request: Request) -> list[StepOutput]:
    return [output async for output in loop.stream(request)]


def request(name: str, max_tokens: int = 12, **options: object) -> Request:
    options = {"mode": Mode.THRESHOLD, "threshold": 0.3, **options}
    return Request(name, list(PROMPT), DecodingOptions(max_tokens, **options))  # type: ignore[arg-type]


async def test_outputs_are_those_of_the_reference(loop: EngineLoop, mars_dir: Path) -> None:
    checkpoint = read_checkpoint(mars_dir)
    assert checkpoint.metadata is not None
    expected = reference.decode(
        load_model(mars_dir),
        PROMPT,
        checkpoint.special,
        max_tokens=12,
        threshold=0.3,
        num_masks=4,
        mask_token_id=checkpoint.metadata.mask_token_id,
    )
    wanted = [request(f"r{i}", window=4) for i in range(4)]
    for outputs in await asyncio.gather(*(collect(loop, each) for each in wanted)):
        assert [output.tokens for output in outputs] == expected.passes
    assert loop.status().num_generated_tokens == 4 * sum(map(len, expected.passes))


async def test_what_cannot_run_is_refused_with_its_reason(loop: EngineLoop) -> None:
    with pytest.raises(UserError, match=r"^max_tokens: 12 prompt tokens and 5000 output tokens"):
        await collect(loop, request("long", 5000))
    broken = GrammarSpec(GrammarKind.REGEX, "(")
    with pytest.raises(UserError, match=r"^grammar: "):
        await collect(loop, request("broken", grammar=broken))
    assert loop.is_alive


async def test_a_grammar_holds(loop: EngineLoop, mars_dir: Path) -> None:
    grammar = GrammarSpec(GrammarKind.REGEX, "(yes|no)")
    outputs = await collect(loop, request("grammar", grammar=grammar))
    tokens = [token for output in outputs for token in output.tokens]
    text = read_checkpoint(mars_dir).tokenizer.decode(tokens, skip_special_tokens=True)
    assert text in ("yes", "no")


async def test_leaving_a_request_frees_its_pages(loop: EngineLoop) -> None:
    stream = loop.stream(request("left", 200, mode=Mode.AR))
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(5):
        while loop.status().num_requests:
            await asyncio.sleep(0.01)
    assert loop.status().num_free_pages == 64


def test_a_loop_of_one_event_loop_serves_another(loop: EngineLoop) -> None:
    first, second = (asyncio.run(collect(loop, request(name, window=4))) for name in ("a", "b"))
    assert [output.tokens for output in first] == [output.tokens for output in second]


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        start_engine(settings_of(tmp_path), num_threads=1)


async def test_a_killed_engine_ends_its_requests(mars_dir: Path) -> None:
    loop = start_engine(settings_of(mars_dir), num_threads=1)
    stream = loop.stream(request("running", 200, mode=Mode.AR))
    await anext(stream)
    (child,) = [each for each in psutil.Process().children() if _is_newest(each)]
    child.send_signal(signal.SIGKILL)
    with pytest.raises(EngineDied):
        async with asyncio.timeout(5):
            _ = [output async for output in stream]
    assert not loop.is_alive
    for call in (loop.status, lambda: loop.set_live(LiveDecoding(0.5))):
        with pytest.raises(EngineDied):
            call()
    with pytest.raises(EngineDied):
        await collect(loop, request("later"))
    loop.stop()


def _is_newest(process: psutil.Process) -> bool:
    children = psutil.Process().children()
    return process.pid == max(children, key=lambda each: each.create_time()).pid


def test_the_engine_ends_with_its_parent(mars_dir: Path) -> None:
    script = """
        import sys, time
        from mars_serve.replica.engine_process import start_engine
        from mars_serve.config.settings import ModelSettings
        loop = start_engine(ModelSettings(name="mars", path=sys.argv[1]), 1)
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(mars_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([child], timeout=5)
    assert not alive
