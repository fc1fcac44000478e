"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mars_platform.mode import Mode


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class DecodingOptions:
    """What a request asks of decoding; checked before it reaches the engine."""

    max_tokens: int
    """Most output tokens, at least 1."""
    mode: Mode = Mode.THRESHOLD
    threshold: float = 0.95
    """τ in (0, 1]."""

    @property
    def needs_masks(self) -> bool:
        """Whether more than one token a step is asked for; τ = 1 is plain AR decoding."""
        return self.mode is Mode.THRESHOLD and self.threshold < 1.0


@dataclass
class Request:
    """State of one request between two steps."""

    id: str
    tokens: list[int]
    """Committed tokens: the prompt, then what was accepted."""
    options: DecodingOptions
    num_prompt: int = field(init=False)
    num_stored: int = 0
    """Leading tokens whose keys and values are in pages."""
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_unstored(self) -> int:
        """Committed tokens that a step still has to feed; at least 1 while running."""
        return len(self.tokens) - self.num_stored

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output at the most, which pages are reserved for."""
        return self.num_prompt + self.options.max_tokens

    def num_masks(self, window: int) -> int:
        """Masks to feed behind the cursor: none where one token a step is asked for.

        Depth 0 already gives one token, so that masks past ``max_tokens`` would be wasted.
        """
        if not self.options.needs_masks:
            return 0
        return min(window, self.options.max_tokens - self.num_output - 1)


@dataclass(frozen=True)
class EngineStatus:
    """How full an engine is."""

    num_requests: int
    """Requests that wait or run."""
    num_pages: int
    num_free_pages: int


@dataclass(frozen=True)
class StepOutput:
    """What one forward pass gave one request."""

    request_id: str
    tokens: list[int]
    """Accepted tokens, an end token included."""
    finish_reason: FinishReason | None
