"""The outputs of an engine's steps, and its counts.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter

from mars_serve.engine.decoding_options import FinishReason


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, from the model's raw logits at temperature 1."""

    logprob: float
    top: list[tuple[int, float]]
    """Likeliest tokens with their log-probabilities, likeliest first."""
    from_mask: bool
    """Whether a mask of mode threshold gave the value; otherwise it is the exact AR value."""
    rank: int | None = None
    """Place of a prompt's token among all tokens, 1 for the likeliest; None for output tokens."""


@dataclass(slots=True)
class StepOutput:
    """One request's result of one forward pass."""

    request_id: str
    tokens: list[int]
    """Accepted tokens, an end token included."""
    finish_reason: FinishReason | None
    num_masks: int = 0
    """Masks that the pass fed for the request."""
    num_positions: int = field(default=0, compare=False)
    """Positions that the pass fed for the request: committed tokens, drafts and masks."""
    confidences: list[float] = field(default_factory=list)
    """Confidence of each accepted token, by the request's own measure, if the request wants
    `rejected`."""
    rejected: list[tuple[int, float]] = field(default_factory=list)
    """Tokens that were proposed behind the accepted ones and rejected, each with its confidence, if
    the request wants them; none behind the end of the output."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probability of each accepted token, if the request wants them."""
    error: str | None = None
    """Message of the failure behind the finish reasons error and refused."""
    threshold: float = 1.0
    """τ that the pass used; 1.0 in modes ar and exact."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of further prompt tokens, in order from the second one on, if the request
    wants them. A pass that feeds only a part of the prompt may give these and no token."""
    num_prefix_hit_tokens: int = field(default=0, compare=False)
    """Prompt tokens found in the prefix cache, on the request's first output; 0 on later ones."""
    queue_s: float = field(default=0.0, compare=False)
    """Seconds before the request's first step, on its first output; 0 on later ones."""

    def __reduce__(self) -> tuple[type[StepOutput], tuple[object, ...]]:
        """Pickle the values without their names, which takes a third of the time."""
        return StepOutput, _values_of(self)


_values_of = attrgetter(*(each.name for each in fields(StepOutput)))


@dataclass
class EngineCounts:
    """Counts since an engine's start; see `mars_autoscale.policy.reports.EngineStatus`."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_forward_passes: int = 0
    num_row_passes: int = 0
    busy_s: float = 0.0
