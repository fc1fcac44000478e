"""Scores decoded items: accuracy, difference from a baseline, and tokens per forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from mars_platform.statistics import Estimate, paired_difference, proportion, ratio_of_totals
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.measure.evaluation.decoding import DecodedItem


@dataclass(frozen=True)
class Score:
    """The score of all items in one setting; every `Estimate` has a 95% interval."""

    num_items: int
    num_checkable: int
    accuracy: Estimate | None
    """Share of the checkable items that are correct; None if no item is checkable."""
    difference: Estimate | None
    """Accuracy minus the baseline's, paired by item; None if there is nothing to compare."""
    tokens_per_forward: Estimate
    positions_per_forward: Estimate
    """Positions of a forward pass that gave tokens, without the prompt before its last token."""
    identical: float | None
    """Share of outputs that equal the baseline's token for token; None without a baseline."""
    mean_tokens: float
    cut_off: float
    """Share of outputs that ended at the token limit."""


def score(decoded: Sequence[DecodedItem], baseline: Sequence[DecodedItem] | None = None) -> Score:
    """Compute the score of one setting from all items, at least one, in any order.

    ``baseline`` has the same items in the setting to compare with, usually one-token decoding; it
    is None if ``decoded`` is itself the baseline.
    """
    num_items = len(decoded)
    checked = [each.correct for each in decoded if each.correct is not None]
    difference = identical = None
    if baseline is not None:
        by_source = {each.source: each for each in baseline}
        assert by_source.keys() == {each.source for each in decoded}, "both have the same items"
        pairs = [(each, by_source[each.source]) for each in decoded]
        difference = _difference(pairs)
        identical = sum(ours.tokens == theirs.tokens for ours, theirs in pairs) / num_items
    passes = [each.num_passes for each in decoded]
    return Score(
        num_items=num_items,
        num_checkable=len(checked),
        accuracy=proportion(sum(checked), len(checked)) if checked else None,
        difference=difference,
        tokens_per_forward=ratio_of_totals([each.num_tokens for each in decoded], passes),
        positions_per_forward=ratio_of_totals([each.num_positions for each in decoded], passes),
        identical=identical,
        mean_tokens=sum(each.num_tokens for each in decoded) / num_items,
        cut_off=sum(each.finish_reason == FinishReason.LENGTH for each in decoded) / num_items,
    )


def _difference(pairs: Sequence[tuple[DecodedItem, DecodedItem]]) -> Estimate | None:
    checked = [
        (ours.correct, theirs.correct)
        for ours, theirs in pairs
        if ours.correct is not None and theirs.correct is not None
    ]
    return paired_difference(*map(list, zip(*checked, strict=True))) if checked else None
