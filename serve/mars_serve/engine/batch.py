"""The layout of one step's input for the forward pass, in plain integers.

The rows of a step, one for each scheduled request, lie side by side in a flattened batch. Each row
holds committed tokens, then drafts to be checked, then masks. The masks come in groups, one for
each number of drafts that may turn out right; a group sees the tokens, those drafts and itself. A
position is an index into the flattened batch, which is padded at its end to a length that recurs:
matrix libraries and captured graphs prepare themselves once for each length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mars_serve.engine.request import Request, RowState
from mars_serve.engine.scheduled_row import Masks, ScheduledRow

COARSE, FINE = 3, 6
"""Leading bits of the lengths of batches, see `bucket`: for graphs, which are captured for each
length, and for steps that are run as they come, where padding takes as long as positions do."""


@dataclass(slots=True)  # a frozen dataclass takes five times as long to make (measured)
class BatchRow:
    """One request's positions in a step."""

    start: int
    """First position of the row."""
    num_cached: int
    """Tokens before the row whose keys and values are in the KV cache."""
    num_tokens: int
    """Tokens that the row feeds and writes to the KV cache, drafts included."""
    num_drafts: int
    masks: Masks
    """Masks of each group; group i sees the first i drafts."""
    pages: list[int]
    """Pages of the cached tokens and of the tokens that the row feeds."""
    reads_logits: bool
    window_pages: list[int] = field(default_factory=list)
    """Pages as above of layers that see the last tokens only; see `WindowPages`."""
    state: RowState | None = None
    """Slots of recurrent layers; None if the model has none."""
    owner: Request | None = None
    """Request whose row it is; None if nothing of it lasts beyond the step."""
    num_masks: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_masks = sum(self.masks)
        self.length = self.num_tokens + self.num_masks

    @property
    def is_causal(self) -> bool:
        """Whether each position sees all positions of the row before it."""
        return self.num_masks == self.masks[-1]

    def visible(self) -> tuple[list[int], list[int]]:
        """Return what each position of the row sees of the row.

        Returns:
            Two lists of one number for each position. The position sees the row's positions before
            the first number, and those from the second number up to itself; both are counted from
            the start of the row.
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

    ids: list[int]  # [positions], token ids
    position_ids: list[int]  # [positions], 0 for padding
    rows: list[BatchRow]
    num_positions: int
    """Positions in use; the lists may be longer, by padding."""
    scored: list[int] = field(default_factory=list)
    """Positions of prompt tokens whose next token's log-probability is reported."""
    slots: list[int] | None = None  # [positions]
    """Slot of the LoRA adapter of each position, or -1; None if no row has one."""

    @cached_property
    def reads(self) -> list[int]:
        """Positions whose logits are read: the last committed token, the drafts and the masks of
        each row that reads logits.
        """
        positions: list[int] = []
        for row in self.rows:
            if row.reads_logits:
                cursor = row.start + row.num_tokens - row.num_drafts - 1
                positions += range(cursor, row.start + row.length)
        return positions

    @cached_property
    def visible(self) -> NDArray[np.int64]:
        """Numbers that say what positions see, see `BatchRow.visible`: [2, positions]."""
        numbers = [(row.start, row.length, row.num_tokens) for row in self.rows]
        starts, lengths, num_tokens = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
        offset = np.arange(self.num_positions) - np.repeat(starts, lengths)
        num_tokens = np.repeat(num_tokens, lengths)
        visible = np.stack([np.minimum(offset + 1, num_tokens), np.minimum(offset, num_tokens)])
        for row in self.rows:
            if not row.is_causal:
                visible[:, row.start : row.start + row.length] = row.visible()
        return visible

    @property
    def has_masks(self) -> bool:
        """Whether any row feeds masks."""
        return any(row.num_masks for row in self.rows)


def bucket(count: int, bits: int = COARSE) -> int:
    """Return the padded length of ``count`` positions, whose binary digits behind the leading
    ``bits`` are 0: with 3 bits it is at most a quarter longer, with 6 a thirty-second.
    """
    step = 1 << max(0, (count - 1).bit_length() - bits)
    return -(-count // step) * step


def build_batch(
    scheduled: Sequence[ScheduledRow],
    mask_token_id: int | None,
    multiple_of: int = 1,
    bits: int = COARSE,
) -> StepBatch:
    """Lay out a step of ``scheduled`` rows, in order, padded to a bucket's length by ``bits``.

    The length becomes a multiple of ``multiple_of``; rows with masks need ``mask_token_id``.
    """
    ids: list[int] = []
    position_ids: list[int] = []
    scored: list[int] = []
    rows = []
    slots: list[int] = []
    for each in scheduled:
        request, begin = each.request, each.request.num_cached
        row = BatchRow(
            start=len(ids),
            num_cached=begin,
            num_tokens=each.num_tokens + each.num_drafts,
            num_drafts=each.num_drafts,
            masks=each.masks,
            pages=request.pages,
            reads_logits=each.reads_logits,
            window_pages=request.window_pages,
            state=request.state,
            owner=request,
        )
        if request.scores_prompt:
            scored += [row.start + index - begin for index in each.scored]
        ids += request.tokens[begin : begin + each.num_tokens]
        ids += [draft.token for draft in request.drafts[: each.num_drafts]]
        position_ids += range(begin, begin + row.num_tokens)
        cursor = begin + each.num_tokens
        for outcome, count in enumerate(each.masks):
            if count:
                assert mask_token_id is not None, "only a model with a mask token feeds masks"
                ids += [mask_token_id] * count
                position_ids += range(cursor + outcome, cursor + outcome + count)
        rows.append(row)
        slots += [request.lora_slot] * row.length
    num_positions = len(ids)
    padding = [0] * (-(-bucket(num_positions, bits) // multiple_of) * multiple_of - num_positions)
    return StepBatch(
        ids=ids + padding,
        position_ids=position_ids + padding,
        rows=rows,
        num_positions=num_positions,
        scored=scored,
        slots=[*slots, *([-1] * len(padding))] if max(slots, default=-1) >= 0 else None,
    )
