from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method.mode import Mode
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.adaptive.thread_choice import ThreadChoice
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings

_FEW, _MANY = 3, 4
_TIMES = StepTimes((1,), (0,), ((0.01,),))


class Machine:
    """Runs steps with the number of threads that a choice sets."""

    def __init__(self) -> None:
        self.num = 0
        self.choice = ThreadChoice(_TIMES, _FEW, _MANY, self._apply)

    def run(self, slowness: Callable[[int], float], num_steps: int) -> Counter[int]:
        """Return how many steps had each number of threads."""
        used = Counter[int]()
        for _ in range(num_steps):
            used[self.num] += 1
            self.choice.observe_step(1, 0, 0.01 * slowness(self.num), has_masks=False)
        return used

    def _apply(self, num: int) -> None:
        self.num = num


def quiet(num: int) -> float:
    return 1.0 if num == _MANY else 1.3


def busy(num: int) -> float:
    return 6.0 if num == _MANY else 1.4


def test_all_cores_are_used_while_nobody_else_needs_them() -> None:
    machine = Machine()
    machine.run(quiet, 2000)
    assert machine.run(quiet, 10_000)[_FEW] <= 100  # further trials


def test_a_core_is_left_to_another_program_within_a_few_steps_of_its_start() -> None:
    machine = Machine()
    machine.run(quiet, 5000)
    assert machine.run(busy, 500)[_MANY] <= 20
    assert machine.run(busy, 10_000)[_MANY] <= 60


def test_it_is_taken_again_after_the_program_has_ended() -> None:
    machine = Machine()
    machine.run(busy, 5000)
    assert machine.run(quiet, 3000)[_MANY] >= 1500


@given(st.integers(0, 7), st.sampled_from([_FEW, _MANY]))
def test_a_step_that_was_held_up_does_not_decide(index: int, held_up: int) -> None:
    machine, seen = Machine(), Counter[int]()

    def slowness(num: int) -> float:
        seen[num] += 1
        return 50.0 if num == held_up and seen[num] == index + 1 else quiet(num)

    machine.run(slowness, 16)  # one trial of each
    assert machine.num == _MANY


def test_steps_with_masks_are_compared_to_what_they_take_with_masks() -> None:
    """Masks that make steps five times as long, as an adapter may, are no reason to try again."""
    times = StepTimes((1,), (0,), ((0.01,),), mask_s=0.04)
    plain, masked = Machine(), Machine()
    masked.choice = ThreadChoice(times, _FEW, _MANY, masked._apply)
    for index in range(3000):
        plain.choice.observe_step(1, 0, 0.01 * quiet(plain.num), has_masks=False)
        has_masks = index >= 1000
        step_s = (0.05 if has_masks else 0.01) * quiet(masked.num)
        masked.choice.observe_step(1, 0, step_s, has_masks=has_masks)
        assert masked.num == plain.num


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_kept")
def test_an_engine_tries_both_numbers_and_gives_the_same_tokens(
    checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    def outputs(engine: Engine) -> dict[str, list[int]]:
        for index, prompt in enumerate(prompts[:8]):
            engine.add(Request(str(index), list(prompt), DecodingOptions(40, Mode.AR)))
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.tokens)
        return tokens

    def note_threads(_rows: Sequence[ScheduledRow]) -> None:
        used.add(torch.get_num_threads())

    engine, used = Engine(checkpoint, EngineSettings(max_num_seqs=2, num_pages=100)), set[int]()
    expected = outputs(engine)
    engine.thread_choice = ThreadChoice(_TIMES, 1, 2)
    engine.on_launch = note_threads
    assert outputs(engine) == expected
    assert used == {1, 2}
