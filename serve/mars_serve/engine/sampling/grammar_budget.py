"""Divides a step's time among the grammars of its rows, cheap ones first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mars_serve.engine.sampling.grammar import GrammarError, Matcher, PutOff


@dataclass
class GrammarBudget:
    """CPU time of the stepping thread that grammars may take, over all steps of an engine.

    Grammars that take little, as nearly all do, are never made to wait. The others wait while the
    steps so far have taken more than their share; so no number of them slows other requests down
    for long.
    """

    step_s: float = 0.05
    """Seconds of each step, on average."""
    light_s: float = 0.005
    """Most seconds of the last step of a grammar that never waits."""
    left_s: float = field(default=0.0, init=False)
    """Seconds left to the current step; negative if grammars have taken more."""

    def begin(self, matchers: Sequence[Matcher | None]) -> StepGrammars:
        """Begin a step, given the matcher of each of its rows or None."""
        self.left_s = min(self.left_s, 0.0) + self.step_s
        return StepGrammars(self, matchers)

    def is_light(self, matcher: Matcher) -> bool:
        """Whether a grammar takes little time; those not yet used are not known to."""
        return matcher.last_s is not None and matcher.last_s <= self.light_s

    def charge(self, matcher: Matcher) -> None:
        """Count the time that a grammar has taken since the last call."""
        self.left_s -= matcher.total_s - matcher.charged_s
        matcher.charged_s = matcher.total_s


class StepGrammars:
    """The grammars of one step's rows."""

    def __init__(self, budget: GrammarBudget, matchers: Sequence[Matcher | None]) -> None:
        self._budget = budget
        self.outcomes: dict[Matcher | None, GrammarError | PutOff] = {}
        """Results of the rows whose grammars have failed or wait."""
        heavy = [each for each in matchers if each is not None and not budget.is_light(each)]
        # With nobody else in the step, there would be nothing to wait for.
        self._first = min(heavy, key=cost, default=None) if len(heavy) == len(matchers) else None

    def allowed(self, matcher: Matcher, tokens: Sequence[int]) -> Tensor | None:
        """Return `Matcher.allowed_after`, or None if the row has another outcome."""
        if matcher in self.outcomes:
            return None
        may_wait = not tokens and matcher is not self._first
        if may_wait and self._budget.left_s <= 0 and not self._budget.is_light(matcher):
            self.outcomes[matcher] = PutOff()
            return None
        try:
            return matcher.allowed_after(tokens)
        except (GrammarError, PutOff) as error:
            self.outcomes[matcher] = error
            return None
        finally:
            self._budget.charge(matcher)


def cost(matcher: Matcher | None) -> float:
    """Return the CPU seconds that an output's grammar has taken; 0 without one."""
    return 0.0 if matcher is None else matcher.total_s
