"""A step that runs out of memory runs again in parts; only a request that never fits ends."""

from __future__ import annotations

import copy
import logging
import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import Engines, Models, oracle, output_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Mode
from mars_serve.engine.adaptive.position_budget import PositionBudget
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.request import Request

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))


class Memory:
    """The memory of a device that holds an activation of so many positions, and no more."""

    def __init__(self) -> None:
        self.holds = 1000  # an engine tries its model when it is made
        self.refused: list[int] = []
        """Positions of the passes that did not fit."""
        self.left: list[weakref.ref[torch.Tensor]] = []
        """Tensors that a pass which did not fit had made before."""

    def limit(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of a model that allocates this memory behind its layers."""
        model = copy.deepcopy(model)
        model.model.norm.register_forward_pre_hook(  # engines replace layers and their parts
            lambda _module, inputs: self._allocate(inputs[0])  # a method would be copied with it
        )
        return model

    def _allocate(self, hidden: torch.Tensor) -> None:
        if any(tensor() is not None for tensor in self.left):
            raise AssertionError("what a failed pass made is freed before the next one")
        if hidden.shape[1] > self.holds:
            self.refused.append(hidden.shape[1])
            self.left.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def requests(mode: Mode | None = None) -> list[Request]:
    """Six requests of different lengths, whose prompts do not fit one step."""
    prompts = [[4 + (row * 11 + 3 * i) % 50 for i in range(3 + 13 * row)] for row in range(6)]
    settings = {"threshold": 0.1, "window": 4} if mode is None else {"mode": mode}
    return [make_request(str(row), prompt, 14, **settings) for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize(("mode", "holds"), [(None, 8), (Mode.AR, 30), (Mode.EXACT, 12)])
def test_steps_that_do_not_fit_run_in_parts_and_give_the_same_output(
    tiny_model: Models,
    make_engine: Engines,
    caplog: pytest.LogCaptureFixture,
    mode: Mode | None,
    holds: int,
) -> None:
    model, memory = tiny_model("qwen2"), Memory()
    engine = make_engine(memory.limit(model), SPECIAL, num_pages=150, max_num_seqs=6)
    memory.holds = holds
    batch = requests(mode)
    run(engine, batch)
    assert {request.finish_reason for request in batch} == {FinishReason.LENGTH}
    for request in batch:
        expected = oracle(model, request, SPECIAL)
        assert output_of(request) == [token for each in expected for token in each]
    assert engine.status().num_out_of_memory == len(memory.refused) > 0
    assert len(memory.refused) < 12  # later steps are smaller
    assert "ran out of the device's memory; steps have at most" in caplog.text


def test_a_request_that_never_fits_ends_with_the_remedy_and_the_engine_goes_on(
    tiny_model: Models, make_engine: Engines
) -> None:
    memory = Memory()
    engine = make_engine(memory.limit(tiny_model("qwen2")), SPECIAL, num_pages=150)
    memory.holds = 0
    for index in range(5):  # more than an engine that fails otherwise survives
        outputs = run(engine, [make_request(str(index), [5, 6, 7] * 4, 3)])
        (output,) = outputs[str(index)]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error is not None
        for part in ("even alone with", "cached tokens", "engine.memory_fraction", "num_gpus"):
            assert part in output.error
    memory.holds = 1000  # another process has ended
    (request,) = batch = [make_request("fits", [5, 6, 7], 3)]
    run(engine, batch)
    assert request.finish_reason is FinishReason.LENGTH


def test_only_the_request_that_does_not_fit_ends(tiny_model: Models, make_engine: Engines) -> None:
    """A pass with the token 60 takes more memory than there is, however short it is."""
    model = tiny_model("qwen2")
    greedy = copy.deepcopy(model)

    def refuse(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if (inputs[0] == 60).any():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    greedy.get_input_embeddings().register_forward_pre_hook(refuse)
    special = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3, 60}))
    engine = make_engine(greedy, special, num_pages=150, max_num_seqs=6)
    batch = requests()
    batch[2].tokens[10] = 60
    run(engine, batch)
    ended = [request.finish_reason for request in batch]
    assert ended == [FinishReason.ERROR if row == 2 else FinishReason.LENGTH for row in range(6)]


def test_the_bound_grows_back_ever_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    budget = PositionBudget(1024, 5)

    def steps_until_it_grows() -> int:
        bound, steps = budget.positions, 0
        while budget.positions == bound:
            budget.note_fitting()
            steps += 1
        return steps

    budget.shrink(600)
    assert budget.positions == 300
    first = steps_until_it_grows()
    assert budget.positions == 600
    budget.shrink(600)
    assert (budget.positions, steps_until_it_grows()) == (300, 2 * first)
    while budget.positions < 1024:
        budget.note_fitting()
    budget.note_fitting()
    assert budget.positions == 1024
    for _ in range(20):
        budget.shrink(7)
    assert budget.positions == 5
    assert "engine.max_num_batched_tokens" in caplog.text
