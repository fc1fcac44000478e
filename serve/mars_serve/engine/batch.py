"""What one step feeds, laid out for the forward pass. Plain integers: knows no tensor, no device.

The rows of a step (one a request) lie side by side, each its committed tokens, then drafts to be
checked, then masks. A row's masks come in groups, one for each number of drafts that may turn out
right: a group sees the tokens, those drafts and itself.
A place is an index into that line, padded at its end to a length that recurs: matrix libraries and
captured graphs prepare themselves once for each length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mars_serve.engine.scheduled_row import ScheduledRow

_EXACT_UP_TO = 8


@dataclass(slots=True)  # as `ScheduledRow` is
class Row:
    """One request's places in a step."""

    start: int
    """Its first place."""
    num_cached: int
    """Tokens whose keys and values are in its pages."""
    num_tokens: int
    """Tokens that it feeds and keeps, drafts included."""
    num_drafts: int
    masks: tuple[int, ...]
    """Masks of each group, by the drafts that it sees: 0 to ``num_drafts`` of them."""
    pages: list[int]
    """Pages of its stored tokens and of those that it feeds."""
    reads_logits: bool
    num_masks: int = field(init=False)
    """Masks of all groups."""
    length: int = field(init=False)
    """Places that it takes."""

    def __post_init__(self) -> None:
        self.num_masks = sum(self.masks)
        self.length = self.num_tokens + self.num_masks

    @property
    def is_causal(self) -> bool:
        """Whether each of its places sees all those before it."""
        return self.num_masks == self.masks[-1]

    def visible(self) -> tuple[list[int], list[int]]:
        """What each of its places sees of the row, counted in places from its start: those before
        the first number, and those from the second one up to itself.
        """
        leading, own = list(range(1, self.num_tokens + 1)), list(range(self.num_tokens))
        begin = self.num_tokens
        for outcome, count in enumerate(self.masks):
            leading += [self.num_tokens - self.num_drafts + outcome] * count
            own += [begin] * count
            begin += count
        return leading, own


@dataclass(frozen=True)
class StepBatch:
    """One step's input."""

    ids: list[int]  # [places]
    positions: list[int]  # [places], position ids; 0 for padding
    rows: list[Row]
    num_places: int
    """Places in use; ids and positions may be longer."""
    scored: list[int] = field(default_factory=list)
    """Places of prompt tokens whose next token's log-probability is to be reported."""

    @property
    def reads(self) -> list[int]:
        """Places whose logits are read: each reading row's last committed token, its drafts and
        its masks.
        """
        places: list[int] = []
        for row in self.rows:
            if row.reads_logits:
                cursor = row.start + row.num_tokens - row.num_drafts - 1
                places += range(cursor, row.start + row.length)
        return places


def bucket(count: int) -> int:
    """The padded length of ``count`` places: few lengths, and at most a quarter more."""
    if count <= _EXACT_UP_TO:
        return count
    step = max(2, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


def build_batch(
    works: Sequence[ScheduledRow], mask_token_id: int | None, multiple_of: int = 1
) -> StepBatch:
    """Lay out a step.

    Args:
        works: each request's share, in order.
        mask_token_id: id of the mask; needed where masks are fed.
        multiple_of: pad the places to a multiple of this, besides to their bucket.
    """
    ids: list[int] = []
    positions: list[int] = []
    scored: list[int] = []
    rows = []
    for work in works:
        request, begin = work.request, work.request.num_cached
        row = Row(
            start=len(ids),
            num_cached=begin,
            num_tokens=work.num_tokens + work.num_drafts,
            num_drafts=work.num_drafts,
            masks=work.masks,
            pages=request.pages,
            reads_logits=work.reads_logits,
        )
        if request.scores_prompt:
            scored += [row.start + position - begin for position in work.scored]
        ids += request.tokens[begin : begin + work.num_tokens]
        ids += [draft.token for draft in request.drafts[: work.num_drafts]]
        positions += range(begin, begin + row.num_tokens)
        cursor = begin + work.num_tokens
        for outcome, count in enumerate(work.masks):
            if count:
                assert mask_token_id is not None
                ids += [mask_token_id] * count
                positions += range(cursor + outcome, cursor + outcome + count)
        rows.append(row)
    num_places = len(ids)
    padding = -(-bucket(num_places) // multiple_of) * multiple_of - num_places
    return StepBatch(ids + [0] * padding, positions + [0] * padding, rows, num_places, scored)
