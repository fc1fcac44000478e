"""One request's share of a step, as the scheduler plans it."""

from dataclasses import dataclass, field

from mars_serve.engine.request import Request

Masks = tuple[int, ...]
"""Masks of each outcome of a row, from no draft right to all of them right."""


@dataclass(slots=True)  # a frozen dataclass takes five times as long to make (measured)
class ScheduledRow:
    """One request's share of a step: committed tokens, then drafts, then masks."""

    request: Request
    num_tokens: int
    """Committed tokens that the row feeds."""
    masks: Masks
    """Masks of each outcome, from no draft right to all of them right."""
    reads_logits: bool
    """Whether the row reaches the cursor, so that the step proposes tokens for it."""
    borders: tuple[int, ...] = ()
    """Pages that prompts have in common with the row which wait for it; see `Memory.waits`."""
    num_drafts: int = field(init=False)
    """Leading drafts of the request that the row feeds."""
    num_masks: int = field(init=False)
    """Masks of all outcomes together."""
    num_proposed: int = field(init=False)
    """Tokens that the step may accept, if the row reads logits."""
    num_group_proposals: int = field(init=False)
    """Tokens that groups of masks behind drafts propose; those of the actual outcome are used."""
    num_positions: int = field(init=False)
    """Positions that the row takes in the step."""

    def __post_init__(self) -> None:
        self.num_drafts = len(self.masks) - 1
        self.num_masks = sum(self.masks)
        checks = self.request.plan.checks_drafts
        self.num_proposed = 1 + (self.num_drafts if checks else self.num_masks)
        self.num_group_proposals = self.num_masks if checks else 0
        self.num_positions = self.num_tokens + self.num_drafts + self.num_masks

    @property
    def num_reads(self) -> int:
        """Positions whose logits the step reads for the row."""
        return self.num_proposed + self.num_group_proposals

    def group(self, outcome: int, start: int = 0) -> range:
        """Return the reads of the masks behind an outcome of checking drafts, if the row's first
        read is ``start``.
        """
        begin = start + self.num_proposed + sum(self.masks[:outcome])
        return range(begin, begin + self.masks[outcome])

    @property
    def has_own_masks(self) -> bool:
        """Whether the row feeds masks of the model itself, not those of a LoRA adapter."""
        lora = self.request.lora
        return self.num_masks > 0 and (lora is None or not lora.has_masks)

    @property
    def scored(self) -> range:
        """Prompt positions at which the step scores the next prompt token."""
        request = self.request
        if not request.scores_prompt:
            return range(0)
        assert request.num_cached <= request.num_scored, "every position is scored in order"
        end = min(request.num_cached + self.num_tokens, request.num_prompt - 1)
        return range(request.num_scored, end)
