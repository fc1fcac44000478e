"""All that gives drafts to an engine's requests."""

from mars_serve.engine.drafting.lookup import LookupDrafter
from mars_serve.engine.request import MAX_AUDIT_DRAFTS, Draft, Request


class DraftSources:
    """The model's own masks and, if settings allow it, each request's own text.

    A request that audits an output has its drafts from that output alone.
    """

    def __init__(self, num_lookup_drafts: int, window: int, *, has_states: bool = False) -> None:
        """Start without requests; ``num_lookup_drafts`` is explained in `EngineSettings`.

        If recurrent layers have states, the log in a slot bounds audits as well.
        """
        self.max_drafts = max(window, num_lookup_drafts)
        """Most drafts of a request in a step, those of masks included."""
        self.max_audit_drafts = self.max_drafts if has_states else MAX_AUDIT_DRAFTS
        """Most drafts of a request that audits an output."""
        self._lookup = None
        if num_lookup_drafts:
            self._lookup = LookupDrafter(num_lookup_drafts, self.max_drafts)

    def take(self, request: Request, num_new: int, own: list[Draft], least_chance: float) -> None:
        """Give a request, which got ``num_new`` tokens in the last step, the drafts of the next
        one.

        ``request`` still has the drafts of the last step; ``own`` come from the model's masks. A
        draft that is less likely than ``least_chance``, with those before it, is not fed.
        """
        before, plan = request.drafts, request.plan
        if plan.checks_drafts and (own or before):
            request.set_drafts(own)
        if request.is_audit:
            request.take_audited_drafts(self.max_audit_drafts)
        elif self._lookup is not None and plan.checks_drafts and plan.leaves_masks:
            self._lookup.follow(request, before[num_new:], least_chance)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended; an unknown request is ignored."""
        if self._lookup is not None:
            self._lookup.forget(request_id)
