"""Runs steps so that only the requests whose own rows fail are affected by a failure."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mars_serve.engine.adaptive.position_budget import PositionBudget
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.execution.acceptance import Accepted
from mars_serve.engine.execution.forward import Launched, ModelRunner
from mars_serve.engine.memory import Memory
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarError, PutOff
from mars_serve.engine.scheduled_row import ScheduledRow

_MAX_FAILURES = 3
"""Number of consecutive steps failing for every request after which the engine tries itself."""
_NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")
"""Parts of the messages of libraries that have no type of error of their own for short memory."""

_log = logging.getLogger(__name__)


class NoMemory(Exception):
    """The result of a row that the device's memory does not hold, even alone."""


class TooLong(Exception):
    """The result of a row for which memory was short: it runs again in later steps, in parts."""


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


class FaultIsolation:
    """Starts steps, waits for them, and finds the rows by which a step fails."""

    def __init__(self, runner: ModelRunner, memory: Memory, budget: PositionBudget) -> None:
        """Run steps with a runner; ``budget`` shrinks when one runs out of memory."""
        self._runner, self._memory, self.budget = runner, memory, budget
        self._num_failures = 0

    def launch(self, rows: Sequence[ScheduledRow]) -> Step:
        """Start a step; never raises."""
        try:
            return self._runner.launch(rows)
        except Exception as error:
            return FailedLaunch(rows, _without_frames(error))

    def wait(self, step: Step) -> list[Accepted | Exception]:
        """Wait for a step; return each row's result, or the error by which the row failed.

        Raises:
            RuntimeError: several steps failed for every request, and then one without any.
        """
        num_before = self.budget.num_out_of_memory
        results = self._results(step)
        if self.budget.num_out_of_memory == num_before:
            self.budget.note_fitting()
        self._count(step.rows, results)
        return results

    def _results(self, step: Step, *, is_retry: bool = False) -> list[Accepted | Exception]:
        """Return each row's result; a failed step is run again in halves, down to single rows."""
        rows = step.rows
        try:
            return [_checked(result) for result in step.wait()]
        except Exception as error:
            failure = _without_frames(error)
        del step  # it holds the error, and so whatever the error holds
        is_short = _is_out_of_memory(failure)
        if is_short:
            self.budget.shrink(sum(row.num_positions for row in rows))
            self._runner.free_memory()
        if len(rows) > 1:
            middle = len(rows) // 2
            halves = (rows[:middle], rows[middle:])
            if is_short:  # one after the other, for two would take more memory than one
                return [result for half in halves for result in self._results(self.launch(half))]
            steps = [self.launch(half) for half in halves]
            return [result for half in steps for result in self._results(half)]
        if is_short and not is_retry:
            return self._results(self.launch(rows), is_retry=True)
        return [self._blame(rows[0], failure, is_short=is_short)]

    def _blame(self, row: ScheduledRow, error: Exception, *, is_short: bool) -> Exception:
        if is_short and row.num_positions > self.budget.least:
            return TooLong()
        name = row.request.id
        if not is_short:
            _log.error("the forward pass of request %s failed", name, exc_info=error)
            return error
        _log.error("the forward pass of request %s ran out of memory: %s", name, error)
        return NoMemory(
            f"the device's memory does not hold a step of this request, even alone with "
            f"{row.num_positions} positions beside {row.request.num_cached} cached tokens; send a "
            "shorter request, or lower engine.memory_fraction or give the replica more of a GPU "
            "(num_gpus)"
        )

    def _count(self, rows: Sequence[ScheduledRow], results: Sequence[Accepted | Exception]) -> None:
        """Count a step that failed for every request; grammars and short memory say nothing."""
        silent = GrammarError | PutOff | TooLong | NoMemory
        judged = [result for result in results if not isinstance(result, silent)]
        errors = [result for result in judged if isinstance(result, Exception)]
        if judged:
            self._num_failures = self._num_failures + 1 if len(errors) == len(judged) else 0
        if self._num_failures >= _MAX_FAILURES:
            self._num_failures = 0
            self._try_itself(rows[results.index(errors[0])].request)

    def _try_itself(self, failed: Request) -> None:
        """Run a step without any client's part, in the last page of a request that has failed."""
        request = Request("trial", [0], DecodingOptions(1))
        self._memory.lend(failed, request)
        try:
            (result,) = self._runner.run([ScheduledRow(request, 1, (0,), reads_logits=True)])
            result = _checked(result)
        except Exception as error:
            result = error
        if isinstance(result, Exception) and not _is_out_of_memory(result):
            raise RuntimeError("the forward pass fails for every request") from result


def _without_frames(error: Exception) -> Exception:
    """Drop the traceback of an error that says that memory is short: its frames hold tensors."""
    return error.with_traceback(None) if _is_out_of_memory(error) else error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _NO_MEMORY)


def _checked(result: Accepted | Exception) -> Accepted | Exception:
    if isinstance(result, Exception):
        return result
    numbers = [*result.confidences, *(entry.logprob for entry in result.prompt_logprobs)]
    if any(number != number for number in numbers):
        return ArithmeticError("the model's output is not a number for this request")
    return result
