"""Replaces the acceptance rule of engines whose weights are random by drawn lengths.

By default mode threshold draws from the distribution that the MARS paper measured, 1.79 tokens a
pass, and in mode exact each draft is right with probability .8 if all before it are.
"""

from __future__ import annotations

from typing import Any

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.workload import (
    PAPER_ACCEPTANCE,
    AcceptanceDistribution,
    agreeing,
    read_acceptance,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request

_AGREEMENT, _MOST_DRAFTS, _SEED = 0.8, 4, 0


class DrawingEngine(Engine):
    """An engine that draws how many tokens each pass accepts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.threshold_lengths = read_acceptance(PAPER_ACCEPTANCE)
        """Distribution outside mode exact; may be set between requests, as the next."""
        self.exact_lengths = agreeing(_AGREEMENT, _MOST_DRAFTS)
        """Distribution in mode exact."""
        super().__init__(*arguments, draw_accepted=self._draw, **options)

    def finish_step(self, step: Any) -> Any:
        """Finish a step, and rate its drafts by the chance that a draw accepts them.

        The engine chooses which outcomes get masks by this rating, and random weights do not know
        what is drawn.
        """
        outputs = super().finish_step(step)
        for row in step.rows if step is not None else ():
            row.request.drafts = [
                draft._replace(confidence=self.exact_lengths.chance(depth))
                for depth, draft in enumerate(row.request.drafts, start=1)
            ]
        return outputs

    def _draw(self, request: Request, num_proposed: int) -> int:
        is_exact = request.options.mode is Mode.EXACT
        lengths: AcceptanceDistribution = self.exact_lengths if is_exact else self.threshold_lengths
        return lengths.draw(_SEED, request.id, request.num_output, num_proposed)
