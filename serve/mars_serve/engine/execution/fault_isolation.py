"""Starts steps and waits for them; where one fails, finds out whose share does. Knows no queue."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mars_serve.engine.execution.forward import Accepted, FailedLaunch, Launched, ModelRunner
from mars_serve.engine.scheduled_row import ScheduledRow

_log = logging.getLogger(__name__)

Step = Launched | FailedLaunch
"""A step that was started, or could not be."""


def launch(runner: ModelRunner, works: Sequence[ScheduledRow]) -> Step:
    """Start a step; it never raises."""
    try:
        return runner.launch(works)
    except Exception as error:
        return FailedLaunch(works, error)


def wait(runner: ModelRunner, step: Step) -> list[Accepted | Exception]:
    """What each work of a step gave, or how its share failed.

    A failed step is run again in halves, down to single requests.
    """
    works = step.works
    try:
        return [_checked(result) for result in step.wait()]
    except Exception as error:
        if len(works) == 1:
            _log.exception("the forward pass of request %s failed", works[0].request.id)
            return [error]
    middle = len(works) // 2
    halves = (launch(runner, works[:middle]), launch(runner, works[middle:]))
    return [result for half in halves for result in wait(runner, half)]


def _checked(result: Accepted) -> Accepted | Exception:
    """A row whose logits are not numbers has failed; its neighbours have not."""
    numbers = [*result.confidences, *(entry.logprob for entry in result.prompt_logprobs)]
    if any(number != number for number in numbers):
        return ArithmeticError("the model's output is not a number for this request")
    return result
