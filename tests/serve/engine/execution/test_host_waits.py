"""A captured step starts without waiting for the device, by one copy to it and one back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import Engines, Models, paged_attention
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.decoding_options import Outcomes, Sampling
from mars_serve.engine.device.transfer import HostCopy
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution import graphs
from mars_serve.engine.execution.graphs import CudaCapture, GraphedForward
from mars_serve.engine.request import Request
from mars_serve.engine.sampling import sampler

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
WAITING_OPERATORS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
WAITING_METHODS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__")


class WaitCount(TorchDispatchMode):
    """Counts operators for which the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = str(func).startswith("aten.index.Tensor") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.num_waits += by_mask or str(func).startswith(WAITING_OPERATORS)
        return func(*args, **(kwargs or {}))


def do_nothing() -> None:
    """Stand in for a replay, of which the host sees nothing."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts copies, and methods for which the host would wait on a GPU."""
    found: Counter[str] = Counter()

    def counted(owner: Any, name: str, label: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            found[label] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for name in WAITING_METHODS:
        counted(Tensor, name, "waits")
    counted(GraphedForward, "_send", "copies in")
    for module in (graphs, sampler):
        counted(module, "to_device", "copies in")
    counted(HostCopy, "__init__", "copies out")
    return found


def requests(**options: Any) -> list[Request]:
    return [make_request(str(index), 5 + index, 16, **options) for index in range(3)]


MIXED = [
    {"mode": Mode.AR},
    {"mode": Mode.THRESHOLD, "threshold": 0.1, "confidence": Confidence.MARGIN},
    {"mode": Mode.EXACT, "outcomes": Outcomes.ALL},
]


@pytest.mark.parametrize(
    ("options", "copies_in", "copies_out"),
    [
        *[(options, 1, 1) for options in MIXED],
        ({"sampling": Sampling(0.8)}, 2, 1),
        ({"mode": Mode.EXACT, "sampling": Sampling(0.8)}, 2, 1),
        ({"num_logprobs": 3}, 1, 4),  # and one for each row
    ],
)
def test_a_step_is_started_without_a_wait(
    tiny_model: Models,
    make_engine: Engines,
    counts: Counter[str],
    options: dict[str, Any],
    copies_in: int,
    copies_out: int,
) -> None:
    engine_class = partial(Engine, attention_of=paged_attention)
    engine = make_engine(tiny_model("qwen2"), SPECIAL, engine_class=engine_class, num_pages=60)
    engine.capture_graphs(lambda _: do_nothing)
    for request in requests(**options):
        engine.add(request)
    num_steps = 0
    while engine.status().num_requests == 3:
        counts.clear()
        with WaitCount() as waits:
            step = engine.begin_step()
        assert waits.num_waits == counts["waits"] == 0
        assert counts["copies in"] == copies_in
        with WaitCount() as waits:
            engine.finish_step(step)
        assert waits.num_waits == 0, "what came back is read on the host"
        assert counts["waits"] == copies_out - 1, "lists of numbers that are there"
        assert counts["copies in"] == copies_in
        assert counts["copies out"] == copies_out
        num_steps += 1
    assert num_steps > 3


@contextmanager
def errors_on_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [*MIXED, {"sampling": Sampling(0.8)}])
def test_a_step_is_started_without_a_wait_on_a_gpu(
    tiny_model: Models, make_engine: Engines, options: dict[str, Any]
) -> None:
    model: PreTrainedModel = copy.deepcopy(tiny_model("qwen2")).to("cuda", torch.bfloat16)
    engine = make_engine(model, SPECIAL, num_pages=60, page_size=16)
    engine.capture_graphs(CudaCapture())
    assert engine.captured is not None
    for request in requests(**options):
        engine.add(request)
    while engine.has_work:
        with errors_on_waits():
            step = engine.begin_step()
        engine.finish_step(step)
