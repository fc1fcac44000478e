"""The answer to a request, of which each dialect's writer makes its response and its events."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mars_serve.api.errors import ApiError
from mars_serve.api.outgoing.choices import Choice, Delta, PassDetails, Passes
from mars_serve.api.protocol import ServiceTier
from mars_serve.api.text import TokenBytes
from mars_serve.config.served import ServedModel
from mars_serve.engine.decoding_options import DecodingOptions, Span


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of tokens of an answer; a prompt counts once, however many choices share it."""

    prompt: int
    cached: int
    """Prompt tokens found in the KV cache."""
    output: int
    thinking: int
    """Output tokens of the model's thinking."""


@dataclass(frozen=True)
class Answer:
    """The choices of a request, and what is known of them while and after they are generated."""

    id: str
    """Random part of the response's id, or the client's."""
    model: ServedModel
    choices: list[Choice]
    names: TokenBytes
    tier: ServiceTier
    grammar_field: str | None = None
    """Field of the request that gave a grammar, for error messages."""
    created: int = field(default_factory=lambda: int(time.time()))

    def size_of(self, deltas: Sequence[Sequence[Delta]]) -> int:
        """Return about how many bytes of text take as long as writing the whole response."""
        num_characters = sum(
            len(delta.text) + len(delta.reasoning) for each in deltas for delta in each
        )
        num_reported = sum(len(delta.reported) for each in deltas for delta in each)
        num_reported += sum(len(choice.scored) for choice in self.choices)
        num_likely = max(self.options.num_logprobs or 0, self.options.num_prompt_logprobs or 0)
        return num_characters // 16 + 16 * num_reported * (num_likely + 1)

    @property
    def counts(self) -> TokenCounts:
        """Numbers of tokens so far."""
        prompts = {id(choice.prompt): choice for choice in reversed(self.choices)}.values()
        return TokenCounts(
            prompt=sum(len(choice.prompt.tokens) for choice in prompts),
            cached=sum(choice.passes.num_cached for choice in prompts),
            output=sum(choice.passes.num_tokens for choice in self.choices),
            thinking=sum(choice.passes.num_thinking for choice in self.choices),
        )

    @property
    def passes(self) -> Passes:
        """Totals over the forward passes of all choices."""
        total = Passes()
        for choice in self.choices:
            total.add(choice.passes)
        return total

    @property
    def options(self) -> DecodingOptions:
        """Decoding options of the first choice; those of the others differ only in the seed."""
        return self.choices[0].request.options

    def mars_of(self, delta: Delta) -> dict[str, Any]:
        """Return the ``mars`` object of the event for a forward pass."""
        mars: dict[str, Any] = {"tokens": delta.num_tokens}
        if delta.details is not None:
            mars["pass"] = self._pass_object(delta.details)
        return mars if delta.finish_reason is None else mars | self.mars(delta.choice.passes)

    def mars(self, passes: Passes) -> dict[str, Any]:
        """Return the ``mars`` object, which tells how the choices were decoded."""
        entry = {
            "mode": self.options.mode,
            **_thresholds(passes),
            "forward_passes": passes.num_passes,
            "tokens_per_forward": round(passes.num_tokens / max(passes.num_passes, 1), 4),
        }
        by_span = {span: passes.by_span[span] for span in Span if span in passes.by_span}
        if by_span:
            entry["spans"] = {span: self._span_object(span, each) for span, each in by_span.items()}
        return entry

    def _span_object(self, span: Span, passes: Passes) -> dict[str, Any]:
        spans = self.choices[0].spans
        asked = spans.thresholds.get(span) if spans else None
        return {
            **({} if asked is None else {"requested_confidence_threshold": asked}),
            **_thresholds(passes),
            "tokens": passes.num_tokens,
            "forward_passes": passes.num_passes,
        }

    def _pass_object(self, details: PassDetails) -> dict[str, Any]:
        return {
            "confidence_threshold": details.threshold,
            "accepted": [self._proposal(*each) for each in details.accepted],
            "rejected": [self._proposal(*each) for each in details.rejected],
        }

    def _proposal(self, token: int, confidence: float) -> dict[str, Any]:
        return {"id": token, "token": self.names.name_of(token), "confidence": confidence}


class Writer(Protocol):
    """Writes an answer in the dialect of one endpoint, whole or as server-sent events."""

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """Return the whole response's body; ``deltas`` holds the parts of each choice."""

    def begin(self) -> bytes:
        """Return the events before the first forward pass's, possibly none."""

    def events(self, delta: Delta) -> bytes:
        """Return the events for one forward pass of a choice."""

    def end(self) -> bytes:
        """Return the events behind the last forward pass's."""

    def failed(self, problem: ApiError) -> bytes:
        """Return the last events of a stream that an error ends after it began."""


def _thresholds(passes: Passes) -> dict[str, float]:
    has_moved = passes.min_threshold < passes.max_threshold
    lowest = {"min_confidence_threshold": passes.min_threshold} if has_moved else {}
    return {"confidence_threshold": passes.mean_threshold, **lowest}
