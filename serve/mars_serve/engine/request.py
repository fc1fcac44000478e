"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mars_platform.mode import Confidence, Mode


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    """Its own part of a forward pass failed."""


@dataclass(frozen=True)
class DecodingOptions:
    """What a request asks of decoding; checked before it reaches the engine."""

    max_tokens: int
    """Most output tokens, at least 1."""
    mode: Mode = Mode.THRESHOLD
    threshold: float = 0.95
    """τ in (0, 1]."""
    confidence: Confidence = Confidence.PROBABILITY
    """What is compared with τ."""
    window: int | None = None
    """Masks a step; None leaves the choice, from 0 to the block size, to the engine."""
    priority: int = 0
    """Higher goes first."""

    @property
    def needs_masks(self) -> bool:
        """Whether more than one token a step is asked for; τ = 1 is plain AR decoding."""
        return self.mode is Mode.THRESHOLD and self.threshold < 1.0 and self.window != 0


@dataclass(eq=False)
class Request:
    """State of one request between two steps. Two requests are equal only if they are the same."""

    id: str
    tokens: list[int]
    """Committed tokens: the prompt, then what was accepted."""
    options: DecodingOptions
    tenant: str = ""
    """Requests share stored prefixes only with those of the same tenant."""
    num_prompt: int = field(init=False)
    num_stored: int = 0
    """Leading tokens whose keys and values are in pages."""
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrival: int = -1
    """Place in the order of arrival; the scheduler gives it."""
    page_keys: list[bytes] = field(default_factory=list)
    """Content keys of the leading full pages, as far as they were needed so far."""
    num_reused: int = 0
    """Prompt tokens whose keys and values were found stored when it was first admitted."""
    num_preemptions: int = 0
    """Times that it gave its pages up for another."""

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
        """Tokens of prompt and output at the most."""
        return self.num_prompt + self.options.max_tokens

    def num_masks(self, window: int) -> int:
        """Masks to feed behind the cursor, at most ``window``: none where one token is asked for.

        Depth 0 already gives one token, so that masks past ``max_tokens`` would be wasted.
        """
        if not self.options.needs_masks:
            return 0
        pinned = window if self.options.window is None else self.options.window
        return min(pinned, window, self.options.max_tokens - self.num_output - 1)


@dataclass(frozen=True)
class EngineStatus:
    """How full an engine is, and what it has done since its start."""

    num_requests: int
    """Requests that wait or run."""
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    """Pages that no request holds, those that cache a prefix included."""
    num_reused_tokens: int
    """Tokens that were found stored instead of being computed, over all admissions."""
    num_preemptions: int


@dataclass(frozen=True)
class StepOutput:
    """What one forward pass gave one request."""

    request_id: str
    tokens: list[int]
    """Accepted tokens, an end token included."""
    finish_reason: FinishReason | None
    num_masks: int = 0
    """Masks that the pass fed for the request."""
    confidences: list[float] = field(default_factory=list)
    """Of each accepted token, by the request's own measure."""
    error: str | None = None
    """What failed, where the finish reason says so."""
