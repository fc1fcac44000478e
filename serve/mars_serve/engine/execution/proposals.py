"""The logits that a step reads, and the token proposed at each of them with its confidence."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence_of, log_probabilities
from mars_serve.engine.scheduled_row import ScheduledRow

# Logits handled at once on a CPU. Temporaries of the whole vocabulary beyond its cache take several
# times as long, mostly for the allocation of memory.
_MAX_PART = 2**17

_MEASURES = {measure: index for index, measure in enumerate(Confidence)}

ChooseTokens = Callable[[Tensor, Tensor], object]
"""Function that gets logits, banned tokens being -inf, and the likeliest tokens, int64 [reads], in
whose place it writes those that it chooses. It may change logits: confidences are then those of the
changed ones."""


@dataclass(frozen=True)
class Reads:
    """Logits that a step reads, row by row, for the rows that read logits.

    A row's direct reads come first: its proposals from depth 0 on, from which the step accepts
    tokens. If the row checks drafts, the reads of its groups of masks follow.
    """

    measures: Tensor
    """int64 [reads], index of the measure in ``tuple(Confidence)``."""
    used_measures: frozenset[Confidence]
    """Measures that have to be computed, known on the host; none if no confidence matters."""
    wanted: NDArray[np.bool_]
    """[reads], on the host, whether the confidence matters."""
    temperatures: Tensor | None = None
    """float64 [reads], divisors of the logits for confidences; None for 1."""

    def native_divisors(self) -> NDArray[np.float32]:
        """Return the divisors as functions of C++ take them, on the host: 0 for unwanted ones."""
        divisors = 1.0 if self.temperatures is None else self.temperatures.numpy()
        return np.where(self.wanted, divisors, 0.0).astype(np.float32)


def build_reads(rows: Sequence[ScheduledRow], temperatures: Sequence[float] | None) -> Reads:
    """Describe, with tensors on the CPU, the logits that rows read, in order.

    ``temperatures`` are divisors of the logits by calibration, from depth 0; None without one.
    """
    measures, wanted = [_measure(row) for row in rows], [_wanted(row) for row in rows]
    indices = np.array([_MEASURES[measure] for measure in measures], dtype=np.int64)
    return Reads(
        measures=torch.from_numpy(np.repeat(indices, [row.num_reads for row in rows])),
        used_measures=frozenset(compress(measures, map(any, wanted))),
        wanted=np.array([*chain(*wanted)], dtype=np.bool_),
        temperatures=_temperatures(rows, temperatures),
    )


def first_reads(rows: Iterable[ScheduledRow]) -> list[int]:
    """Return the index of each row's first read, then the number of all reads."""
    return list(accumulate((row.num_reads for row in rows), initial=0))


def propose(
    logits: Tensor,
    reads: Reads,
    banned: Tensor,
    choose_tokens: ChooseTokens | None = None,
) -> Tensor:
    """Choose the token at each read, and return it with the bits of its float32 confidence.

    It is the likeliest one that may be emitted, unless ``choose_tokens`` replaces it; its
    confidence is taken from the raw ``logits``, float [reads, vocabulary], in which tokens may be
    ``banned``, int64 [banned]. A confidence that does not matter may be 1, or NaN if the likeliest
    token's logit is not finite. The result is int32 [reads, 2].
    """
    parts = [
        _propose(*part, reads, banned, choose_tokens)
        for part in _parts(logits, split=choose_tokens is None)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(table: Tensor) -> tuple[list[int], list[float]]:
    """Return the tokens and the confidences of what `propose` returned, on the CPU."""
    numbers = table.numpy()
    return numbers[:, 0].tolist(), np.ascontiguousarray(numbers[:, 1]).view(np.float32).tolist()


def _parts(logits: Tensor, *, split: bool) -> Iterable[tuple[Tensor, slice]]:
    """Split the reads into parts that a CPU's cache holds; other devices take all at once."""
    size = len(logits)
    if split and logits.device.type == "cpu" and logits.numel() > _MAX_PART:
        size = max(1, _MAX_PART // logits.shape[1])
    starts = range(0, len(logits), size)
    return [(logits[start : start + size], slice(start, start + size)) for start in starts]


def _propose(
    logits: Tensor, part: slice, reads: Reads, banned: Tensor, choose_tokens: ChooseTokens | None
) -> Tensor:
    """Return the token of each read and the bits of its confidence: int32 [part, 2]."""
    raw = logits.index_select(-1, banned)
    most, tokens = logits.index_fill_(-1, banned, -torch.inf).max(-1)  # faster than argmax
    if choose_tokens is not None:
        choose_tokens(logits, tokens)
    logits.index_copy_(-1, banned, raw)  # banned tokens have their share of the probability
    if reads.wanted[part].any():
        divisors = reads.temperatures
        scaled = logits if divisors is None else logits / divisors[part, None].float()
        log_probs = log_probabilities(scaled)
        confidences = _confidences(log_probs, tokens, reads.measures[part], reads.used_measures)
    else:
        confidences = (most - most).float() + 1.0  # NaN where `most` is not finite
    return torch.stack([tokens.int(), confidences.view(torch.int32)], dim=1)


def _confidences(
    log_probs: Tensor, tokens: Tensor, measures: Tensor, used: frozenset[Confidence]
) -> Tensor:
    """Return the confidence of each token by its row's measure: float32 [part]."""
    first, *others = (measure for measure in Confidence if measure in used)
    confidences = confidence_of(log_probs, tokens, first)
    for measure in others:
        uses_measure = measures == tuple(Confidence).index(measure)
        by_measure = confidence_of(log_probs, tokens, measure)
        confidences = torch.where(uses_measure, by_measure, confidences)
    return confidences


def _wanted(row: ScheduledRow) -> list[bool]:
    """Return whether the confidence of each read decides what a row accepts or drafts, or is
    reported.
    """
    is_reported = row.request.options.reports_rejected
    if row.request.plan.checks_drafts:
        return [is_reported] * row.num_proposed + [True] * row.num_masks
    return [is_reported or row.num_reads > 1] * row.num_reads


def _measure(row: ScheduledRow) -> Confidence:
    """Return the confidence measure of a row; drafts are kept with their probability."""
    request = row.request
    return Confidence.PROBABILITY if request.plan.checks_drafts else request.options.confidence


def _temperatures(rows: Sequence[ScheduledRow], by_depth: Sequence[float] | None) -> Tensor | None:
    """Return the divisor of each read's logits, float64 [reads], or None if all are 1."""
    if by_depth is None or not any(_is_calibrated(row) for row in rows):
        return None
    divisors: list[float] = []
    for row in rows:
        if not _is_calibrated(row):
            divisors += [1.0] * row.num_reads
        elif row.request.plan.checks_drafts:
            divisors += [1.0] * row.num_proposed  # the AR predictions that check the drafts
            divisors += [by_depth[depth + 1] for count in row.masks for depth in range(count)]
        else:
            divisors += by_depth[: row.num_proposed]
    return torch.tensor(divisors, dtype=torch.float64)


def _is_calibrated(row: ScheduledRow) -> bool:
    return row.request.options.calibrated or row.request.plan.checks_drafts
