"""Lets a model's draft head act at masks, whose drafts are then chosen one behind the other."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from mars_platform.checkpoint.adapter.draft_head import NUM_CANDIDATES, DraftHead
from mars_serve.engine.execution.acceptance import num_accepted
from mars_serve.engine.execution.proposals import Reads, first_reads, is_simple, unpack
from mars_serve.engine.kernels.native import LANES, Native
from mars_serve.engine.scheduled_row import ScheduledRow


class DraftWalk:
    """A model's draft head, and its weights as functions of C++ read them."""

    def __init__(self, head: DraftHead, native: Native | None, banned: Tensor) -> None:
        """Take a head; ``banned``, int64 [banned], are tokens that are never drafted."""
        self._native, self._banned = native, banned
        self._head = head.float()  # in bfloat16, many of the likeliest tokens would tie
        self._head.widen(-head.previous.shape[1] % LANES)

    def act(self, hidden: Tensor, logits: Tensor, reads: Tensor, previous: Tensor) -> None:
        """Act on float32 logits [reads, vocabulary], in place, at int64 [n] reads behind int64 [n]
        tokens. ``hidden``, [reads, width], are what the logits were made of.
        """
        logits[reads] = self._head.share_out(logits[reads], hidden[reads], previous)

    def takes(self, rows: Sequence[ScheduledRow], logits: Tensor, reads: Reads) -> bool:
        """Return whether `walk` can choose all that rows accept and report."""
        options = [row.request.options for row in rows if not row.request.plan.checks_drafts]
        reports = any(each.num_logprobs is not None for each in options)
        are_plain = all(row.request.options.is_plain for row in rows)
        return are_plain and not reports and is_simple(logits, reads)

    def walk(
        self, hidden: Tensor, logits: Tensor, table: Tensor, rows: Sequence[ScheduledRow]
    ) -> None:
        """Choose the likeliest drafts of masks that may be used, by functions of C++.

        ``table`` is what `propose` returns, in which they replace those chosen without the head.
        Of mode exact, only the masks behind the outcome that comes about are of use.
        """
        chains = list(_chains(rows, table))
        if not chains:
            return
        assert self._native is not None, "functions of C++ choose them"
        reads = [read for begin, count, _ in chains for read in range(begin, begin + count)]
        gates, head = self._head.gates(hidden[reads].float()), self._head
        weights = head.previous, head.following
        self._native.walk(logits, self._banned, chains, gates, weights, NUM_CANDIDATES, table)


def _chains(rows: Sequence[ScheduledRow], table: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield first read, number of reads and token before of masks whose drafts may be used."""
    tokens, confidences = unpack(table)
    for row, start in zip(rows, first_reads(rows), strict=False):
        if not row.has_own_masks:
            continue
        before, group = start, range(start + 1, start + row.num_proposed)
        if row.request.plan.checks_drafts:
            direct = slice(start, start + row.num_proposed)
            outcome = num_accepted(row, tokens[direct], confidences[direct]) - 1
            before, group = start + outcome, row.group(outcome, start)
        if group:
            yield group[0], len(group), tokens[before]
