from __future__ import annotations

import pytest

from mars_platform.cluster.processes import MAX_ATTEMPTS, attempt
from mars_platform.errors import UserError


class Start:
    """Fails some times with an error before it succeeds."""

    def __init__(self, num_failures: int, error: Exception) -> None:
        self.left = num_failures
        self.error = error
        self.num_calls = 0
        self.told: list[str] = []

    def __call__(self) -> None:
        self.num_calls += 1
        self.left -= 1
        if self.left >= 0:
            raise self.error

    def run(self, **options: tuple[type[Exception], ...]) -> None:
        attempt(self, name="it", remedy="wait", tell=self.told.append, **options)


def test_a_start_is_repeated_with_one_line_for_each_failure():
    start = Start(MAX_ATTEMPTS - 1, Exception("no\nnode"))
    start.run()
    assert start.num_calls == MAX_ATTEMPTS
    assert start.told == [
        f"it did not start (no node); attempt {number} of {MAX_ATTEMPTS} begins"
        for number in range(2, MAX_ATTEMPTS + 1)
    ]


def test_the_attempts_are_bounded_and_end_in_one_clear_error():
    start = Start(99, TimeoutError("too slow"))
    with pytest.raises(UserError, match=r"^it did not start in 3 attempts \(too slow\); wait$"):
        start.run()
    assert start.num_calls == MAX_ATTEMPTS
    assert len(start.told) == MAX_ATTEMPTS - 1


@pytest.mark.parametrize(
    ("error", "options"),
    [(UserError("port: taken"), {}), (KeyError("x"), {"errors": (TimeoutError,)})],
)
def test_other_errors_are_raised_at_once(error, options):
    start = Start(1, error)
    with pytest.raises(type(error)):
        start.run(**options)
    assert (start.num_calls, start.told) == (1, [])
