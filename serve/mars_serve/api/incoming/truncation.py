"""Cuts prompts to the number of tokens that a request wants to keep."""

from __future__ import annotations

from dataclasses import dataclass

from mars_serve.api.errors import invalid_value
from mars_serve.api.incoming.sizes import most_tokens
from mars_serve.api.protocol import GenerationRequest
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

_FIELD = "truncate_prompt_tokens"


@dataclass(frozen=True)
class Truncation:
    """How prompts are cut."""

    num_kept: int | None = None
    """Most tokens that a prompt keeps; None if it is not cut."""
    keeps_last: bool = True
    """Whether a prompt keeps its last tokens and not its first ones."""

    def cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens that a prompt keeps."""
        if self.num_kept is None or len(tokens) <= self.num_kept:
            return tokens
        return tokens[-self.num_kept :] if self.keeps_last else tokens[: self.num_kept]


def truncation_of(
    body: GenerationRequest, model: ServedModel, limits: LimitSettings, default_tokens: int
) -> Truncation:
    """Return how a request's prompts are cut.

    Args:
        body: The request's body.
        model: The model that generates.
        limits: The server's limits.
        default_tokens: Output tokens for which there must be room if the body does not say.

    Raises:
        ApiError: status 400: more tokens are to be kept than a prompt may have.
    """
    wanted, most = body.truncate_prompt_tokens, most_tokens(model, limits)
    if wanted is None:
        return Truncation()
    if wanted > most:
        reason = f"{wanted} exceeds the {most} tokens that a prompt may have; lower it"
        raise invalid_value(_FIELD, reason)
    if wanted < 0:
        num_output = body.limit[1]
        room = model.max_length - (default_tokens if num_output is None else num_output)
        wanted = max(1, min(most, room))
    return Truncation(wanted, keeps_last=body.truncation_side != "right")
