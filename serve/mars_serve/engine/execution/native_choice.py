"""Chooses tokens by functions of C++, where neither a grammar nor earlier tokens limit them."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mars_platform.checkpoint.adapter.draft_head import NUM_CANDIDATES, DraftHead
from mars_platform.method.mode import Confidence
from mars_serve.engine.execution.acceptance import num_accepted
from mars_serve.engine.execution.proposals import Reads, first_reads, unpack
from mars_serve.engine.kernels.native import Chain, Native
from mars_serve.engine.scheduled_row import ScheduledRow


class NativeChoice:
    """The choice of tokens by functions of C++, by a model's draft head where it acts."""

    def __init__(self, native: Native, head: DraftHead | None, banned: Tensor) -> None:
        """Take a head in float32 whose rank is a multiple of `LANES`, or None.

        ``banned``, int64 [banned], are tokens that are never chosen.
        """
        self._native, self._head, self._banned = native, head, banned

    def takes(self, row: ScheduledRow) -> bool:
        """Return whether `propose` chooses the tokens of a row.

        That depends on neither mode nor step, so that all rows of a request are chosen alike.
        """
        options = row.request.options
        reports = self._head is not None and options.num_logprobs is not None
        is_usual = options.confidence is Confidence.PROBABILITY and not reports
        return is_usual and options.filters_alone

    def propose(
        self, logits: Tensor, hidden: Tensor, reads: Reads, rows: Sequence[ScheduledRow]
    ) -> Tensor:
        """Return the table of `proposals.propose` for rows that this takes, all that read logits.

        ``hidden``, [reads, width], are what the logits were made of. Of mode exact, only the masks
        behind the outcome that comes about are of use; the others' drafts are the likeliest tokens.
        """
        logits, divisors = logits.contiguous(), reads.native_divisors()
        table = self._native.propose(logits, self._banned, divisors)
        begun_s = time.thread_time()
        others = [
            (row, start)
            for row, start in zip(rows, first_reads(rows), strict=False)
            if not row.request.options.is_plain or self._heads(row)
        ]
        direct = [each for row, start in others for each in self._direct(row, start)]
        self._walk(logits, hidden, divisors, direct, table)
        drafted = [each for row, start in others for each in self._drafted(row, start, table)]
        self._walk(logits, hidden, divisors, drafted, table)
        _charge(rows, time.thread_time() - begun_s)
        return table

    def _heads(self, row: ScheduledRow) -> bool:
        return self._head is not None and row.has_own_masks

    def _direct(self, row: ScheduledRow, start: int) -> Iterator[Chain]:
        """Yield the reads that tokens are accepted from, if they are sampled."""
        is_sampled = row.request.options.sampling.limits.temperature > 0.0
        is_chain = self._heads(row) and not row.request.plan.checks_drafts
        for depth in range(1 if is_chain else row.num_proposed) if is_sampled else ():
            yield _chain(row, range(start + depth, start + depth + 1), -1, depth)

    def _drafted(self, row: ScheduledRow, start: int, table: Tensor) -> Iterator[Chain]:
        """Yield the masks that may be used, unless `_direct` does."""
        is_headed, checks = self._heads(row), row.request.plan.checks_drafts
        if not row.num_masks or not (is_headed or checks):
            return
        tokens, confidences = unpack(table[start : start + row.num_proposed])
        outcome = num_accepted(row, tokens, confidences) - 1 if checks else 0
        group = row.group(outcome, start) if checks else range(start + 1, start + row.num_proposed)
        if group:
            yield _chain(row, group, tokens[outcome] if is_headed else -1, outcome + 1)

    def _walk(
        self,
        logits: Tensor,
        hidden: Tensor,
        divisors: NDArray[np.float32],
        chains: Sequence[Chain],
        table: Tensor,
    ) -> None:
        if not chains:
            return
        head = None
        if self._head is not None and any(each.token >= 0 for each in chains):
            reads = [
                read for each in chains for read in range(each.read, each.read + each.num_reads)
            ]
            gates = self._head.gates(hidden[reads].float())
            head = gates, self._head.previous, self._head.following
        self._native.walk(logits, self._banned, divisors, chains, head, NUM_CANDIDATES, table)


def _chain(row: ScheduledRow, reads: range, token: int, ahead: int) -> Chain:
    sampling, position = row.request.options.sampling, len(row.request.tokens) + ahead
    return Chain(reads.start, len(reads), token, sampling.seed, position, sampling.limits)


def _charge(rows: Sequence[ScheduledRow], seconds: float) -> None:
    """Divide the time of choosing tokens by chance among the rows that have some."""
    sampled = [row for row in rows if not row.request.options.is_plain]
    num_choices = sum(row.num_reads for row in sampled)
    for row in sampled:
        row.request.num_choices = row.num_reads
        row.request.sampling_s = seconds * row.num_reads / num_choices
