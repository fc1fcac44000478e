"""The joint policy where load or replicas are not what the model says."""

import pytest

from situations import cases, in_time_at_end, ordered

CASES = [
    pytest.param(*case, id=name, marks=() if case[0].is_quick else pytest.mark.full)
    for name, case in cases().items()
]


@pytest.mark.parametrize(("situation", "capacity"), CASES)
def test_the_replicas_that_are_really_needed_are_there_and_stay(situation, capacity):
    result = situation.run(capacity)
    numbers = ordered(result)
    needed = situation.needed(capacity, result.samples[-1].speed)
    assert in_time_at_end(result) >= 0.99
    assert needed <= max(numbers)
    assert numbers[-1] <= needed + 2
    since = next(i for i, number in enumerate(numbers) if number >= needed)
    assert min(numbers[since:]) >= needed - 2, "no sawtooth"
