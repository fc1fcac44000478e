"""Measures the cost of MARS training over AR training, with flex attention on a GPU.

One process trains a model in both ways, in turn on each batch of random conversations; the order is
reversed from one batch to the next. A step is everything from token ids to the update.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from bench.gpu.setup import Setup
from numpy.typing import NDArray
from torch import Tensor

from mars_train.method.attention import FLEX_MULTIPLE
from mars_train.method.layout import Layout, collate, lay_out, pack
from mars_train.method.objective import Objective

_PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense products of bfloat16 a second, by a part of the GPU's name; published figures."""
_BLOCK_SIZE = 4


@dataclass(frozen=True)
class Options:
    """Sizes of the measurement."""

    attention: Literal["sdpa", "flex"]
    length: int
    """Mean tokens of a conversation, half of them prompt; each has half to one and a half of it."""
    row_slots: int
    """Slots of a packed row."""
    batch_size: int
    micro_batch_size: int
    """Conversations of a pass."""
    steps: int
    """Optimizer steps of a round."""
    rounds: int


_TINY = Options("sdpa", 48, 96, batch_size=2, micro_batch_size=2, steps=2, rounds=1)
_FULL = Options("flex", 1024, 4096, batch_size=16, micro_batch_size=4, steps=4, rounds=3)


@dataclass(frozen=True)
class Example:
    """The tokens of a conversation."""

    ids: NDArray[np.int64]  # [length]
    supervised: NDArray[np.bool_]  # [length]


class Training:
    """A model with its optimizer, and the steps of both ways of training."""

    def __init__(self, setup: Setup, options: Options, *, compiled: bool) -> None:
        self.setup, self.options = setup, options
        self.multiple_of = FLEX_MULTIPLE if options.attention == "flex" else 1
        made = setup.model("0.5b", torch.float32)
        assert made.checkpoint.metadata is not None
        self.mask_id = made.checkpoint.metadata.mask_token_id
        self.model = made.create().train()
        settings: dict[str, Any] = {"attention": options.attention, "compile": compiled}
        self.objectives = {
            "ar": Objective(self.model, masked=False, **settings),
            "mars": Objective(self.model, masked=True, **settings),
        }
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._rng = np.random.default_rng(0)

    def batches(self) -> list[list[Example]]:
        """Return random conversations for one round, one batch for each step."""
        length, size = self.options.length, self.options.batch_size
        examples = []
        for _ in range(size * self.options.steps):
            num = int(self._rng.integers(length // 2, 3 * length // 2 + 1))
            ids = self._rng.integers(1, self.mask_id, num)
            examples.append(Example(ids, np.arange(num) >= round(num / 2)))
        return [examples[at : at + size] for at in range(0, len(examples), size)]

    def step(self, way: str, examples: Sequence[Example]) -> tuple[Tensor, int]:
        """Run forward, backward and update.

        Returns:
            The loss of each label, summed over both streams, and the positions with padding.
        """
        num_labels = sum(int(each.supervised[1:].sum()) for each in examples)
        size, slots, total = (
            self.options.micro_batch_size,
            0,
            torch.zeros((), device=self.model.device),
        )
        for start in range(0, len(examples), size):
            layouts = [self.lay_out(way, each) for each in examples[start : start + size]]
            packed = pack(layouts, self.options.row_slots, self.multiple_of)
            batch = collate(packed, 0, self.multiple_of).to(self.model.device)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.setup.on_cuda):
                sums = self.objectives[way](batch)
            loss = (sums.clean + sums.noisy) / num_labels
            loss.backward()
            total = total + loss.detach()
            slots += batch.tokens.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, slots

    def lay_out(self, way: str, example: Example) -> Layout:
        """Lay a conversation out, with noisy blocks from a random offset on or without them."""
        size = _BLOCK_SIZE if way == "mars" else None
        offset = int(self._rng.integers(size or 1))
        return lay_out(example.ids, example.supervised, size, self.mask_id, offset)

    def utilisation(self, way: str, batches: Sequence[Sequence[Example]], step_s: float) -> float:
        """Return the share of the GPU's peak that the operations needed for a step reach.

        Needed are 6 operations for each weight of the layers and token of the layout, and for each
        weight of the output layer and prediction. Attention is not counted.
        """
        layouts = [self.lay_out(way, each) for batch in batches for each in batch]
        slots = sum(len(each.tokens) for each in layouts)
        predictions = sum(len(each.labels) + int((each.depths > 0).sum()) for each in layouts)
        head = self.model.get_output_embeddings().weight.numel()
        body = sum(each.numel() for each in self.model.parameters()) - head  # they are tied
        flops = 6 * (body * slots + head * predictions) / len(batches)
        name = torch.cuda.get_device_name()
        peaks = [peak for part, peak in _PEAK_TFLOPS.items() if part in name]
        return float(flops / step_s / (peaks[0] * 1e12)) if peaks else float("nan")


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_training_steps_are_finite(
    setup: Setup, compiled: bool, record_property: Callable[[str, Any], None]
) -> None:
    """Measures steps of both ways of training in turn, on the same conversations."""
    if compiled and not setup.on_cuda:
        pytest.skip("layers are compiled on a GPU only")
    training = Training(setup, _TINY if setup.is_tiny else _FULL, compiled=compiled)
    batches = training.batches()
    found = {way: _warmed_up(training, way, batches) for way in training.objectives}
    rounds = [_round(training, batches) for _ in range(training.options.rounds)]
    for way, figures in found.items():
        figures["rounds_s"] = [each[way] for each in rounds]
        step_s = figures["step_s"] = statistics.median(figures["rounds_s"])
        num_tokens = sum(len(each.ids) for batch in batches for each in batch) / len(batches)
        figures["tokens_per_s"] = num_tokens / step_s
        if setup.on_cuda:
            figures["mfu"] = training.utilisation(way, batches, step_s)
    record_property("variants", found)
    ratios = [each["mars"] / each["ar"] for each in rounds]
    times = {"time": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    record_property("mars / ar", times)
    assert all(0 < each["first_loss"] < 100 for each in found.values())


def _warmed_up(
    training: Training, way: str, batches: Sequence[Sequence[Example]]
) -> dict[str, Any]:
    """Allocate and compile in two steps, and return the first loss and the steps' sizes."""
    first_loss, slots = training.step(way, batches[0])
    on_cuda = training.setup.on_cuda
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    training.step(way, batches[-1])
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None
    return {"first_loss": first_loss.item(), "slots_per_step": slots, "peak_mib": peak_mib}


def _round(training: Training, batches: Sequence[Sequence[Example]]) -> dict[str, float]:
    """Return the mean seconds of a step of each way."""
    spent = dict.fromkeys(training.objectives, 0.0)
    for index, batch in enumerate(batches):
        for way in spent if index % 2 == 0 else reversed(spent):
            begin = time.perf_counter()
            training.step(way, batch)
            training.setup.synchronise()
            spent[way] += (time.perf_counter() - begin) / len(batches)
    return spent
