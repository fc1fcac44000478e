"""An engine that serves its starter and several others at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.failing_engines import ControlledEngine, SlowEngine
from decoding.local_engine_client import LOOPBACK, LocalEngineClient, linked
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import LiveDecoding
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc import listener
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.engine.ipc.listener import connect
from mars_serve.engine.ipc.messages import (
    Begun,
    Condition,
    CreditGrant,
    Heartbeat,
    Ready,
    SetLateRule,
    StepReport,
)
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from waiting import soon

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))

Serve = Callable[..., LocalEngineClient]


@pytest.fixture
async def serve(
    tiny_model: Callable[[str], PreTrainedModel], make_engine: Callable[..., Engine]
) -> AsyncIterator[Serve]:
    """Start an engine that others can connect to: ``serve(engine_class, **sizes)``."""
    made = list[LocalEngineClient]()

    def make(engine_class: type[Engine] = SlowEngine, **sizes: int) -> LocalEngineClient:
        engine = make_engine(tiny_model("qwen2"), SPECIAL, engine_class=engine_class, **sizes)
        made.append(LocalEngineClient(engine, LOOPBACK))
        made[-1].attach()
        return made[-1]

    yield make
    for starter in made:
        starter.stop()


@pytest.fixture
async def link() -> AsyncIterator[Callable[[LocalEngineClient], Awaitable[EngineClient]]]:
    """Connect to an engine as an ingress does: ``await link(starter)``."""
    made = list[EngineClient]()

    async def make(starter: LocalEngineClient) -> EngineClient:
        made.append(await linked(starter.address))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def long_request(name: str, max_tokens: int = 200, **options: object) -> Request:
    return make_request(name, 5, max_tokens, **{"threshold": 1.0, **options})


async def collect(loop: EngineClient, request: Request) -> list[StepOutput]:
    return [output async for output in loop.stream(request)]


async def _rest_of(stream: AsyncIterator[StepOutput]) -> list[StepOutput]:
    return [output async for output in stream]


async def started(loop: EngineClient, request: Request) -> AsyncIterator[StepOutput]:
    stream = loop.stream(request)
    await anext(stream)
    return stream


def has_all_pages(engine: Engine) -> bool:
    return engine.status().num_free_pages == engine.settings.num_pages and not engine.has_work


async def test_each_connection_gets_the_outputs_of_its_own_requests(serve, link) -> None:
    starter = serve(Engine)
    loops = [starter, await link(starter), await link(starter)]
    alone = await collect(starter, long_request("same", 12))
    wanted = [(loop, f"{number}-{index}") for number, loop in enumerate(loops) for index in (0, 1)]
    results = await asyncio.gather(
        *(collect(loop, long_request(name, 12)) for loop, name in wanted),
        collect(loops[1], make_request("again", alone and _prompt_of("same"), 12, threshold=1.0)),
    )
    for (_, name), outputs in zip(wanted, results, strict=False):
        assert {output.request_id for output in outputs} == {name}
        assert sum(len(output.tokens) for output in outputs) == 12
    assert [output.tokens for output in results[-1]] == [output.tokens for output in alone]
    assert sum((await starter.told(8)).counts.lengths.tokens) == 8 * 12
    assert has_all_pages(starter.engine)


def _prompt_of(name: str) -> list[int]:
    return long_request(name).tokens


async def test_a_connection_hears_nothing_of_the_requests_of_others(serve, opened) -> None:
    starter = serve(Engine)
    channels = [opened(starter) for _ in range(2)]
    for number, channel in enumerate(channels):
        channel.send(long_request(f"{number}", 6))
    for number, channel in enumerate(channels):
        named = set[str]()
        outputs = 0
        while outputs < 6:
            for message in await asyncio.to_thread(channel.receive):
                if isinstance(message, StepReport):
                    assert message.outputs, "a report without an output is for nobody"
                    named |= {output.request_id for output in message.outputs}
                    outputs += len(message.outputs)
                else:
                    assert isinstance(
                        message, Begun | Heartbeat | Condition | CreditGrant | SetLateRule
                    )
                    named |= set(getattr(message, "request_ids", ()))
        assert named == {str(number)}


@pytest.fixture
def opened():
    """Connect without an `EngineClient`, past the first message: ``opened(starter)``."""
    channels = list[Channel]()

    def make(starter: LocalEngineClient) -> Channel:
        channels.append(connect(starter.address))
        ready, *_ = channels[-1].receive()
        assert isinstance(ready, Ready)
        assert ready.address is None, "only the starter is told"
        return channels[-1]

    yield make
    for channel in channels:
        channel.close()


async def test_a_closed_connections_requests_are_cancelled_and_others_go_on(serve, link) -> None:
    starter = serve(SlowEngine, max_num_seqs=2)
    leaving, staying = await link(starter), await link(starter)
    left = await started(leaving, long_request("left"))
    rest = await started(staying, long_request("stays", 12))
    waiting = asyncio.create_task(collect(leaving, long_request("left too")))
    compiling = asyncio.create_task(collect(staying, long_request("waits", 3)))
    await soon(lambda: starter.engine.status().num_waiting == 2)
    leaving.stop()
    outputs = [output async for output in rest]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(await compiling) == 3, "it got the place of one that was cancelled"
    for ended in (waiting, _rest_of(left)):
        with pytest.raises(EngineDied):
            await ended
    await soon(lambda: has_all_pages(starter.engine))
    totals = (await starter.told(3)).counts
    assert totals.lengths.num_begun == 4
    assert starter.is_alive


async def test_one_that_reads_nothing_slows_neither_the_others_nor_the_engine(
    serve, link, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(stream: socket.socket) -> Channel:
        """Let either end of a connection hold few outputs: far fewer than there will be."""
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        stream.settimeout(None)
        return Channel(stream)

    starter = serve(Engine, max_num_seqs=5)
    reading = await link(starter)
    monkeypatch.setattr(listener, "_channel_of", narrow)
    deaf = opened(starter)
    for index in range(25):
        deaf.send(long_request(f"deaf-{index}", 40))
    assert len(await collect(reading, long_request("read", 40))) == 40
    assert sum((await starter.told(26)).counts.lengths.tokens) == 26 * 40
    assert starter.is_alive


async def test_all_hear_of_the_engines_condition_and_so_do_those_who_come_later(
    serve, link
) -> None:
    starter = serve()
    early = await link(starter)
    early.attach()
    for condition in (
        Condition(is_overdue=True),
        Condition(is_draining=True),
        Condition(is_overdue=True, is_draining=True),
        Condition(),
    ):
        starter.tell(condition)
        assert starter.condition == condition
        await soon(lambda told=condition: early.condition == told)
        late = await link(starter)
        late.attach()
        await soon(lambda told=condition, late=late: late.condition == told)
        assert late.is_overdue is condition.is_overdue
        if condition.is_overdue:
            with pytest.raises(EngineDied, match="does not answer"):
                await collect(late, long_request("new"))
        else:
            assert len(await collect(late, long_request("new", 1))) == 1


async def test_all_get_signs_of_life_while_a_step_takes_long(
    serve, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars_serve.engine.ipc.connections._BEAT_S", 0.02)
    starter = serve(ControlledEngine)
    asking, idle = opened(starter), opened(starter)
    starter.engine.may_step.clear()
    asking.send(long_request("hangs", 1))
    found = list[object]()
    while found.count(Heartbeat()) < 3:
        found += await asyncio.to_thread(asking.receive)
    assert Begun(["hangs"]) in found
    assert not any(isinstance(each, StepReport) for each in found)
    starter.engine.may_step.set()
    while not any(isinstance(each, StepReport) for each in found):
        found += await asyncio.to_thread(asking.receive)
    heard = await asyncio.to_thread(idle.receive)
    assert Heartbeat() in heard
    assert not any(isinstance(each, Begun | StepReport) for each in heard)


async def test_a_live_threshold_of_the_starter_applies_to_all(serve, link) -> None:
    starter = serve()
    first, second = await link(starter), await link(starter)
    starter.set_live(LiveDecoding(1.0))
    streams = [
        loop.stream(long_request(f"live {number}", 30, threshold=None))
        for number, loop in enumerate((first, second))
    ]
    assert [(await anext(stream)).threshold for stream in streams] == [1.0, 1.0]
    starter.set_live(LiveDecoding(0.5))
    for stream in streams:
        assert [output.threshold async for output in stream][-1] == 0.5
    assert (await link(starter)).live == LiveDecoding(0.5)
    for value in (0.0, 1.1, float("nan")):
        with pytest.raises(UserError, match="confidence_threshold: "):
            starter.set_live(LiveDecoding(value))


async def test_a_draining_engine_finishes_what_it_has_and_what_still_comes(serve, link) -> None:
    starter = serve()
    loop = await link(starter)
    running = await started(loop, long_request("running", 10))
    starter.tell(Condition(is_draining=True))
    await soon(lambda: loop.condition.is_draining)
    sent_before = collect(loop, long_request("sent before", 3))
    assert len(await sent_before) == 3
    assert len([output async for output in running]) == 9
    await soon(lambda: not starter.status().num_requests)


async def test_a_request_that_is_refused_over_one_connection_is_refused_there(serve, link) -> None:
    starter = serve()
    loop, other = await link(starter), await link(starter)
    stream = await started(other, long_request("running", 6))
    with pytest.raises(UserError, match=r"^max_tokens: "):
        await collect(loop, long_request("long", 1000))
    assert len([output async for output in stream]) == 5


async def test_an_id_may_be_used_again_as_soon_as_its_request_has_ended(serve, link) -> None:
    loop = await link(serve(Engine))
    for _ in range(100):
        assert len(await collect(loop, long_request("same", 1))) == 1
        with pytest.raises(UserError):
            await collect(loop, long_request("same", 1000))


async def test_an_engine_that_fails_ends_all_connections(serve, link) -> None:
    starter = serve(ControlledEngine, max_num_seqs=1)
    first, second = await link(starter), await link(starter)
    running = await started(first, long_request("running"))
    waiting = asyncio.create_task(collect(second, long_request("waiting")))
    await soon(lambda: starter.engine.status().num_requests == 2)
    starter.engine.fails_after = 0
    with pytest.raises(EngineDied) as died:
        _ = [output async for output in running]
    assert died.value.had_begun
    with pytest.raises(EngineDied) as waited:
        await waiting
    assert not waited.value.had_begun
    await soon(lambda: not starter.is_alive)
    with pytest.raises(ChannelClosed):
        connect(starter.address)


async def test_an_engine_ends_with_its_starter(serve, link) -> None:
    starter = serve()
    loop = await link(starter)
    running = await started(loop, long_request("running"))
    starter.stop()
    with pytest.raises(EngineDied):
        _ = [output async for output in running]
    assert not loop.is_alive
