"""Runs a step so that only the requests whose own rows fail are affected by a failure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mars_serve.engine.execution.acceptance import Accepted
from mars_serve.engine.execution.forward import Launched, ModelRunner
from mars_serve.engine.sampling.grammar import GrammarError
from mars_serve.engine.sampling.grammar_budget import PutOff
from mars_serve.engine.scheduled_row import ScheduledRow

_MAX_FAILURES = 3
"""Number of consecutive steps failing for every request after which the engine gives up."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailedLaunch:
    """A step that could not be started."""

    rows: Sequence[ScheduledRow]
    error: Exception

    def wait(self) -> list[Accepted | Exception]:
        """Raise the error that kept the step from starting."""
        raise self.error


Step = Launched | FailedLaunch
"""A step that was started, or could not be."""


def launch(runner: ModelRunner, rows: Sequence[ScheduledRow]) -> Step:
    """Start a step; never raises."""
    try:
        return runner.launch(rows)
    except Exception as error:
        return FailedLaunch(rows, error)


def wait(runner: ModelRunner, step: Step) -> list[Accepted | Exception]:
    """Wait for a step; return each row's result, or the error by which the row failed.

    A failed step is run again in halves, down to single rows.
    """
    rows = step.rows
    try:
        return [_checked(result) for result in step.wait()]
    except Exception as error:
        if len(rows) == 1:
            _log.exception("the forward pass of request %s failed", rows[0].request.id)
            return [error]
    middle = len(rows) // 2
    halves = (launch(runner, rows[:middle]), launch(runner, rows[middle:]))
    return [result for half in halves for result in wait(runner, half)]


class FailureCount:
    """Counts consecutive steps that failed for every request."""

    def __init__(self) -> None:
        self._num = 0

    def note(self, results: Sequence[Accepted | Exception]) -> None:
        """Note a step's results; those that only grammars decided say nothing.

        Raises:
            RuntimeError: several consecutive steps failed for every request.
        """
        judged = [result for result in results if not isinstance(result, GrammarError | PutOff)]
        errors = [result for result in judged if isinstance(result, Exception)]
        if judged:
            self._num = self._num + 1 if len(errors) == len(judged) else 0
        if self._num >= _MAX_FAILURES:
            raise RuntimeError("the forward pass fails for every request") from results[0]  # type: ignore[misc]


def _checked(result: Accepted | Exception) -> Accepted | Exception:
    """Return a row's result, or an error if its logits held a NaN."""
    if isinstance(result, Exception):
        return result
    numbers = [*result.confidences, *(entry.logprob for entry in result.prompt_logprobs)]
    if any(number != number for number in numbers):
        return ArithmeticError("the model's output is not a number for this request")
    return result
