"""A second, smaller model that proposes tokens, which the engine's own model then checks.

The drafter runs an engine of its own with a shadow of each request: the same tokens and, behind
them, the drafts. Before a step, each shadow is cut back to the tokens committed meanwhile. Drafts
change the speed of decoding, but no output.
Source: arXiv 2604.07023, section 4.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.settings import EngineSettings


class DraftingEngine(Protocol):
    """The part of `Engine` that a drafter uses."""

    window: int
    settings: EngineSettings

    @property
    def max_length(self) -> int:
        """See `Engine.max_length`."""

    def add(self, request: Request) -> None:
        """See `Engine.add`."""

    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""

    def step(self) -> list[StepOutput]:
        """See `Engine.step`."""

    def warm_up(self) -> object:
        """See `Engine.warm_up`."""


class Drafter:
    """Drafts for the requests of one engine, which owns the drafter. Not thread-safe."""

    def __init__(self, engine: DraftingEngine, num_drafts: int, threshold: float = 0.8) -> None:
        """Start without requests.

        Args:
            engine: engine of the drafting model, made from `drafting_checkpoint` for this use only.
            num_drafts: drafts of a request in each step, at least 1.
            threshold: τ of the drafting model's own multi-token decoding; a plain AR model drafts
                one token a pass.
        """
        assert not engine.settings.enable_prefix_caching, "cached tokens of a shadow may be undone"
        self.num_drafts = num_drafts
        self._engine, self._threshold = engine, threshold
        self._shadows: dict[str, Request] = {}

    def propose(self, requests: Sequence[Request]) -> None:
        """Add drafts to requests, behind those that they have.

        This takes at most as many passes as a request gets drafts. A request whose prompt is longer
        than these passes read gets its drafts in a later step.
        """
        wanted = {request.id: (request, self._num_wanted(request)) for request in requests}
        wanted = {name: pair for name, pair in wanted.items() if pair[1] > 0}
        found: dict[str, list[Draft]] = {name: [] for name in wanted}
        for request, _ in wanted.values():
            self._follow(request)
        for _ in range(self.num_drafts):
            if all(len(found[name]) >= number for name, (_, number) in wanted.items()):
                break
            for output in self._engine.step():
                if output.request_id in found:
                    pairs = zip(output.tokens, output.confidences, strict=True)
                    found[output.request_id] += (Draft(*pair) for pair in pairs)
                if output.finish_reason is not None:
                    del self._shadows[output.request_id]
        for name, (request, number) in wanted.items():
            request.drafts += found[name][:number]

    def forget(self, request_id: str) -> None:
        """Drop the shadow of a request that has ended, if there is one."""
        if self._shadows.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        self._engine.warm_up()

    def _num_wanted(self, request: Request) -> int:
        length = len(request.tokens) + len(request.drafts)
        room = min(request.num_left - 1 - len(request.drafts), self._engine.max_length - length)
        return min(self.num_drafts - len(request.drafts), room)

    def _follow(self, request: Request) -> None:
        """Give a request's shadow its tokens and drafts, and keep the cached tokens that agree."""
        tokens = [*request.tokens, *(draft.token for draft in request.drafts)]
        shadow = self._shadows.get(request.id)
        if shadow is None:
            options = DecodingOptions(
                self._engine.max_length - len(tokens),
                Mode.THRESHOLD if self._engine.window else Mode.AR,
                self._threshold if self._engine.window else 1.0,
                sampling=request.options.sampling,
            )
            shadow = self._shadows[request.id] = Request(request.id, tokens, options)
            self._engine.add(shadow)
            return
        num_same = _num_common(shadow.tokens, tokens, shadow.num_prompt)
        shadow.num_cached = min(shadow.num_cached, num_same, len(tokens) - 1)
        shadow.tokens[num_same:] = tokens[num_same:]
        shadow.history = None


def drafting_checkpoint(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return a checkpoint to draft with, whose engine goes on past end tokens.

    Only the target's engine may end a request.

    Raises:
        UserError: its tokens are not the target's.
    """
    special = target.special.never_emitted | checkpoint.special.never_emitted
    # an adapter's mask may be a token without a logit, which needs not be banned
    special |= {each.metadata.mask_token_id for each in (checkpoint, target) if each.metadata}
    ours, theirs = (
        {text: token for text, token in each.tokenizer.get_vocab().items() if token not in special}
        for each in (checkpoint, target)
    )
    if ours != theirs:
        raise UserError(
            f"draft.path: {checkpoint.path} has another tokenizer than {target.path}; use a model "
            "with the same one"
        )
    return replace(checkpoint, special=replace(checkpoint.special, eos=frozenset()))


def _num_common(ours: list[int], theirs: list[int], start: int) -> int:
    """Count the leading tokens that are equal; the first ``start`` are known to be."""
    for index in range(start, min(len(ours), len(theirs))):
        if ours[index] != theirs[index]:
            return index
    return min(len(ours), len(theirs))
