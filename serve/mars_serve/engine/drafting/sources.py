"""All that gives drafts to an engine's requests besides the model's own masks."""

from __future__ import annotations

from collections.abc import Sequence

from mars_serve.engine.drafting.drafter import Drafter
from mars_serve.engine.drafting.lookup import LookupDrafter
from mars_serve.engine.request import Draft, Request


class DraftSources:
    """A second model, if there is one, and each request's own text, if settings allow it.

    A request whose drafts come from the second model, or from an output that it audits, gets none
    from its text.
    """

    def __init__(self, drafter: Drafter | None, num_lookup_drafts: int, window: int) -> None:
        """Start without requests.

        Args:
            drafter: the second model.
            num_lookup_drafts: see `EngineSettings`.
            window: the model's block size.
        """
        self._drafter = drafter
        num_drafted = drafter.num_drafts if drafter is not None else 0
        self.max_drafts = max(window, num_drafted, num_lookup_drafts)
        """Most drafts of a request in a step, those of masks included."""
        self._lookup = None
        if num_lookup_drafts:
            self._lookup = LookupDrafter(num_lookup_drafts, self.max_drafts)
        self._window = window

    @property
    def has_drafter(self) -> bool:
        """Whether there is a second model."""
        return self._drafter is not None

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        if self._drafter is not None:
            self._drafter.warm_up()

    def propose(self, running: Sequence[Request]) -> None:
        """Add the second model's drafts for the next step; see `Drafter.propose`."""
        if self._drafter is not None:
            window = self._window
            ready = [item for item in running if item.has_drafter and not item.in_prefill(window)]
            self._drafter.propose(ready)

    def take(self, request: Request, num_new: int, own: list[Draft], least_chance: float) -> None:
        """Give a request the drafts of the next step, as far as they are known now.

        Args:
            request: a request whose tokens have grown; it still has the drafts of the last step.
            num_new: number of tokens that the last step gave it.
            own: drafts behind them from the model's own masks.
            least_chance: probability below which a draft, with those before it, is not fed.
        """
        before = request.drafts
        if request.checks_drafts:
            request.set_drafts(own)
        if request.is_audit:
            request.take_audited_drafts()
        elif self._lookup is not None and request.looks_up_drafts:
            self._lookup.follow(request, before[num_new:], least_chance)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended; an unknown request is ignored."""
        for source in (self._drafter, self._lookup):
            if source is not None:
                source.forget(request_id)
