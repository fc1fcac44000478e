"""The logits that a step reads, and what accepting tokens from them needs to know of each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.scheduled_row import ScheduledRow

_MEASURES = {measure: index for index, measure in enumerate(Confidence)}


@dataclass(frozen=True)
class Reads:
    """Logits that a step reads, row by row, for the rows that read logits.

    A row's direct reads come first: its proposals from depth 0 on, from which the step accepts
    tokens. If the row checks drafts, the reads of its groups of masks follow.
    """

    row: Tensor
    """int64 [reads], row of each read, counted from 0."""
    depth: Tensor
    """int64 [direct reads], depth of each: 0 to the proposals of its row - 1, each once."""
    thresholds: Tensor
    """float32 [rows], τ of each row, above 0."""
    measures: Tensor
    """int64 [rows], index of each row's measure in ``tuple(Confidence)``."""
    used_measures: frozenset[Confidence]
    """Measures of the rows, known on the host; only these are computed."""
    max_depth: int
    """Most proposals of a row, known on the host."""
    drafts: Tensor | None = None
    """int64 [rows, max_depth - 1], draft at each depth from 1 on, or -1; None if no row has any."""
    direct: Tensor | None = None
    """int64 [direct reads], indices of the direct reads; None if all reads are direct."""
    groups: Tensor | None = None
    """int64 [group reads], indices of the reads of groups of masks; None if all are direct."""
    temperatures: Tensor | None = None
    """float32 [reads], divisors of the logits for confidences; None for 1."""


def build_reads(rows: Sequence[ScheduledRow], temperatures: Sequence[float] | None) -> Reads:
    """Describe, with tensors on the CPU, the logits that rows read.

    Args:
        rows: rows that read logits, in order; at least one.
        temperatures: divisors of the logits by calibration, from depth 0; None without calibration.
    """
    counts = [row.num_proposed for row in rows]
    max_depth = max(counts)
    measures = [_measure(row) for row in rows]
    drafts = direct = groups = None
    if any(row.num_drafts or row.num_group_proposals for row in rows):
        starts = first_reads(rows)
        directs = [range(start, start + n) for start, n in zip(starts, counts, strict=False)]
        behind = [range(each.stop, end) for each, end in zip(directs, starts[1:], strict=True)]
        direct, groups = _indices(directs), _indices(behind)
        drafts = torch.tensor([_drafts(row, max_depth - 1) for row in rows], dtype=torch.long)
    return Reads(
        row=torch.tensor([index for index, row in enumerate(rows) for _ in range(row.num_reads)]),
        depth=torch.tensor([depth for count in counts for depth in range(count)]),
        thresholds=torch.tensor([row.request.threshold for row in rows]),
        measures=torch.tensor([_MEASURES[measure] for measure in measures]),
        used_measures=frozenset(measures),
        max_depth=max_depth,
        drafts=drafts,
        direct=direct,
        groups=groups,
        temperatures=_temperatures(rows, temperatures),
    )


def first_reads(rows: Iterable[ScheduledRow]) -> list[int]:
    """Return the index of each row's first read, then the number of all reads."""
    return list(accumulate((row.num_reads for row in rows), initial=0))


def _indices(ranges: Iterable[range]) -> Tensor:
    return torch.tensor([index for each in ranges for index in each], dtype=torch.long)


def _drafts(row: ScheduledRow, num_depths: int) -> list[int]:
    tokens = [draft.token for draft in row.request.drafts[: row.num_drafts]]
    return tokens + [-1] * (num_depths - len(tokens))


def _measure(row: ScheduledRow) -> Confidence:
    """Return the confidence measure of a row; drafts are kept with their probability."""
    request = row.request
    return Confidence.PROBABILITY if request.mode is Mode.EXACT else request.options.confidence


def _temperatures(rows: Sequence[ScheduledRow], by_depth: Sequence[float] | None) -> Tensor | None:
    """Return the divisor of each read's logits, float32 [reads], or None if all are 1."""
    if by_depth is None or not any(_is_calibrated(row) for row in rows):
        return None
    divisors: list[float] = []
    for row in rows:
        if not _is_calibrated(row):
            divisors += [1.0] * row.num_reads
        elif row.request.checks_drafts:
            divisors += [1.0] * row.num_proposed  # the AR predictions that check the drafts
            divisors += [by_depth[depth + 1] for count in row.masks for depth in range(count)]
        else:
            divisors += by_depth[: row.num_proposed]
    return torch.tensor(divisors, dtype=torch.float32)


def _is_calibrated(row: ScheduledRow) -> bool:
    return row.request.options.calibrated or row.request.mode is Mode.EXACT
