"""Pages, queues and memory that requests hold, which do not grow with the number of requests."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from operator import mul
from typing import Any

import psutil
import pytest
from transformers import PreTrainedModel

from decoding.families import build_family
from decoding.local_engine_client import LocalEngineClient
from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.engine.admission import Deadlines
from mars_serve.engine.attention.mixed import MixedAttention
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
PAGE = 16

Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny model with a context that holds long prefixes."""
    return build_model(
        "llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.5,
    )


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 32) for _ in range(length)]


def test_no_request_holds_more_than_a_page_beyond_its_tokens(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    engine = make_engine(model, SPECIAL, num_pages=300, page_size=PAGE, max_num_seqs=12)
    requests = [
        Request(str(i), prompt(1 + 11 * i, i), DecodingOptions(20 + i, threshold=0.05))
        for i in range(12)
    ]
    for request in requests:
        engine.add(request)
    most = 0
    while engine.has_work:
        engine.step()
        running = [request for request in requests if request.pages]
        held = engine.num_pages - engine.status().num_free_pages
        ideal = sum(request.num_cached for request in running) / PAGE
        assert held <= ideal + len(running)
        most = max(most, held)
    assert most > 20


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "layer_types", "least"),
    [("gemma3_text", [*[SLIDING] * 5, FULL], 4.0), ("gpt_oss", [SLIDING, FULL] * 3, 1.75)],
)
def test_long_texts_take_little_memory_of_layers_with_windows(
    family: str, layer_types: list[str], least: float, make_engine: Engines
) -> None:
    """Compare with pages of all layers for all tokens: of a row, and of cached prefixes."""
    shape: dict[str, Any] = {"num_hidden_layers": 6, "max_position_embeddings": 512}
    model = build_family(family, layer_types=layer_types, **shape)
    engine = make_engine(model, SPECIAL, num_pages=800, max_num_seqs=2)
    assert isinstance(engine.attention, MixedAttention)
    groups = [backend._layers for backend in engine.attention.backends]
    whole, windows = engine._memory.pool, engine._memory.windows.pool

    def ratio(num_pages: int, num_window_pages: int) -> float:
        counts = [num_window_pages if group.is_bounded else num_pages for group in groups]
        sizes = [group.elements_per_token for group in groups]
        return num_pages * sum(sizes) / sum(map(mul, counts, sizes))

    engine.add(Request("row", prompt(400, 0), DecodingOptions(40)))
    while whole.num_pages - whole.num_free < 105:
        engine.step()
    assert windows.num_pages - windows.num_free <= 4  # a window has 8 tokens, a page 4
    assert ratio(105, windows.num_pages - windows.num_free) > least
    assert ratio(whole.num_pages, windows.num_pages) > 0.75 * least
    stored = sum(
        part.numel() for each in engine.attention.backends for part in (each.keys, each.values)
    )
    assert stored < 1.1 * 800 * 4 * engine.token_elements / (0.75 * least)
    for turn in range(2):
        for text in (1, 2, 3):
            request = Request(f"{turn}/{text}", prompt(400 + turn, text), DecodingOptions(4))
            engine.add(request)
            while engine.has_work:
                engine.step()
            assert request.num_prefix_hit_tokens == 400 * turn
    engine.check_integrity()


async def test_nothing_grows_over_thousands_of_requests(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    engine = make_engine(model, SPECIAL, num_pages=24, page_size=4, max_num_seqs=16)
    engine.warm_up()
    loop, process = LocalEngineClient(engine), psutil.Process()

    async def client(number: int, count: int) -> None:
        source = random.Random(number)
        for index in range(count):
            options = DecodingOptions(
                source.randint(1, 8), threshold=source.choice([0.05, 0.5, 1.0])
            )
            ids = prompt(source.randint(1, 12), source.randrange(10))
            async for _ in loop.stream(Request(f"{number}/{index}", ids, options)):
                pass

    async def serve(first: int, count: int) -> None:
        await asyncio.gather(*(client(first + number, count // 20) for number in range(20)))

    await serve(0, 500)
    gc.collect()
    objects, memory = len(gc.get_objects()), process.memory_info().rss
    threads = threading.active_count()
    await serve(20, 2_000)
    gc.collect()
    assert len(gc.get_objects()) < objects + 500
    assert process.memory_info().rss < memory + 8 * 2**20
    assert threading.active_count() == threads
    status = loop.status()
    loop.stop()
    assert (status.num_requests, status.num_free_pages) == (0, engine.num_pages)
    engine.check_integrity()
    assert status.num_preemptions > 0
    assert status.num_prefix_hit_tokens > 0


def waiting(number: int, max_queue_s: float | None, queue_s: float | None = None) -> Request:
    """Make a request that arrived at time 0."""
    options = DecodingOptions(max_tokens=1, max_queue_s=max_queue_s)
    return Request(f"r{number}", [1], options, arrival=number, arrived_at=0.0, queue_s=queue_s)


def test_requests_are_overdue_once_and_the_most_urgent_first():
    deadlines = Deadlines()
    late, later, never = waiting(0, 2), waiting(1, 1), waiting(2, None)
    for request in (late, later, never):
        deadlines.add(request)
    assert deadlines.pop_overdue(0.5) == []
    assert deadlines.pop_overdue(3) == [later, late]
    assert deadlines.pop_overdue(1e9) == []


def test_a_request_that_has_begun_is_not_kept_until_its_wait_would_have_ended():
    deadlines, patient = Deadlines(), waiting(-1, 120)
    deadlines.add(patient)
    for number in range(10_000):
        deadlines.add(waiting(number, 120, queue_s=0.0))
    assert len(deadlines) < 200
    assert deadlines.pop_overdue(121) == [patient]


def test_every_request_that_waits_is_watched():
    deadlines = Deadlines()
    requests = [waiting(number, 120) for number in range(1000)]
    for request in requests:
        deadlines.add(request)
    assert deadlines.pop_overdue(121) == requests
