"""Plans what a request's rows feed into steps, and which tokens are accepted. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mars_platform.method.mode import LiveDecoding, Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes, Span


@dataclass(frozen=True, slots=True)
class DecodingPlan:
    """How a request is decoded until its mode or τ changes; see `Request.follow`.

    A row feeds the request's uncached tokens, and the token that the model chooses behind the last
    of them is accepted. What else a row feeds and accepts depends on the mode:

    - ar: nothing.
    - threshold: the row feeds masks. Their tokens are accepted up to the first whose confidence is
      below τ, without a check. At τ = 1 none would be, so no masks are fed.
    - exact: the row feeds drafts, which the step before has left, and masks for some of the
      outcomes of checking them: none of the drafts right, the first alone, up to all. Drafts are
      accepted up to the first that is not the token that the model chooses in its place. The tokens
      of the masks of the outcome that came about are the drafts of the next step, beside those that
      the request's own text gives.
    """

    threshold: float
    window: int | None
    """Masks of a row, in mode exact of each outcome; 0 if rows feed none, and None for the model's
    block size or what the engine chooses."""
    outcomes: Outcomes | None
    """Outcomes that get masks if the engine does not choose them; None for the last one."""
    checks_drafts: bool
    """Whether rows are in mode exact: the request's own, or in place of a live τ of 1."""
    leaves_masks: bool
    """Whether the engine chooses how many masks a row feeds. In mode exact it also decides which of
    the drafts are worth a position, and the request's own text may give some."""

    @classmethod
    def of(cls, options: DecodingOptions, span: Span, live: LiveDecoding) -> DecodingPlan:
        """Plan steps of ``span`` by a request's own mode and τ, or ``live`` if it gives no τ."""
        checks_drafts, threshold = options.mode is Mode.EXACT, 1.0
        if options.mode is Mode.THRESHOLD:
            own = options.threshold_in(span)
            followed = max(live.threshold_of(options.tier), options.min_threshold)
            threshold = followed if own is None else own
            checks_drafts = own is None and live.is_exact and threshold >= 1.0
        window = options.window if checks_drafts or threshold < 1.0 else 0
        return cls(
            threshold=threshold,
            window=window,
            outcomes=options.outcomes,
            checks_drafts=checks_drafts,
            leaves_masks=window is None and options.outcomes is None,
        )

    def num_masks(self, block_size: int, num_left: int, outcome: int = 0) -> int:
        """Return the most masks that are of use for ``outcome``, the number of drafts that are
        right.

        ``block_size`` is the model's, or another limit. A pass gives one token without masks, so
        masks past ``num_left``, the output tokens that may still be accepted, would be wasted. In
        mode exact the next pass, which checks what the masks propose, gives a token of its own,
        too.
        """
        given = outcome + (2 if self.checks_drafts else 1)
        most = block_size if self.window is None else min(self.window, block_size)
        return max(0, min(most, num_left - given))

    def masks(self, block_size: int, num_left: int, num_drafts: int) -> tuple[int, ...]:
        """Return the masks of each outcome, from none of the drafts right to all of them, of a row
        whose masks the engine does not choose; see `num_masks`.
        """
        if not self.checks_drafts:
            return (self.num_masks(block_size, num_left),)
        num_drafts = min(num_drafts, max(num_left, 1) - 1)
        first = 0 if self.outcomes is Outcomes.ALL else num_drafts
        return tuple(
            self.num_masks(block_size, num_left, outcome) if outcome >= first else 0
            for outcome in range(num_drafts + 1)
        )
