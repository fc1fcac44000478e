"""Replaces the acceptance rule of an engine by drawn lengths, for weights that are random."""

from typing import Any

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.workload import Draws, agreeing, paper_acceptance
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

_AGREEMENT, _MOST_DRAFTS, _SEED = 0.8, 4, 0


class DrawingEngine(Engine):
    """An engine that draws how many tokens each pass accepts.

    By default mode threshold draws from the distribution that the MARS paper measured, 1.79 tokens
    a pass, and in mode exact each draft is right with probability .8 if all before it are.
    """

    def __init__(self, *arguments: Any, draws: Draws | None = None, **options: Any) -> None:
        self.draws = draws or Draws(paper_acceptance(), agreeing(_AGREEMENT, _MOST_DRAFTS), _SEED)
        """Distributions to draw from; may be set between requests."""
        super().__init__(*arguments, draw_accepted=self._draw, **options)

    def finish_step(self, step: Step | None) -> list[StepOutput]:
        """Finish a step, and rate its drafts by the probability that a draw accepts them.

        The engine chooses which outcomes get masks by this confidence, and the weights do not know
        what is drawn.
        """
        outputs = super().finish_step(step)
        for row in step.rows if step is not None else ():
            row.request.drafts = [
                draft._replace(confidence=self.draws.exact.chance(depth))
                for depth, draft in enumerate(row.request.drafts, start=1)
            ]
        return outputs

    def _draw(self, request: Request, num_proposed: int) -> int:
        is_exact = request.options.mode is Mode.EXACT
        lengths = self.draws.exact if is_exact else self.draws.acceptance
        return lengths.draw(self.draws.seed, request.id, request.num_output, num_proposed)
