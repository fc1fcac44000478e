"""Compares what masks say with what the model writes, from every position of its outputs.

A step of mode exact with a fixed window and masks for every outcome depends on nothing but the
output and the drafts behind each of its prefixes. So one forward pass over an output gives all of
these drafts, agreement by depth, and the number of passes that mode exact would take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.method.rules import visibility
from mars_serve.engine.sampling.noise import gumbel_noise

Choice = Callable[[Tensor, Tensor], Tensor]
"""Function from logits [reads, vocabulary] and the absolute positions [reads] of the tokens that
they propose, to the tokens chosen, int64 [reads]."""

_CURSORS = 32
"""Prefixes whose masks share a forward pass; more see less of each other and cost more."""


def likeliest(logits: Tensor, positions: Tensor) -> Tensor:
    """Choose as at temperature 0."""
    del positions
    return logits.argmax(-1)


@dataclass(frozen=True)
class Sampled:
    """A choice as the engine makes it at a temperature, with its keyed noise."""

    temperature: float
    seed: int

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        seeds = torch.full_like(positions, self.seed)
        noise = gumbel_noise(seeds, positions, logits.shape[-1])
        return (logits / self.temperature + noise).argmax(-1)


@torch.inference_mode()
def mask_drafts(
    model: PreTrainedModel,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    mask_token_id: int,
    window: int,
    never_emitted: Collection[int],
    choose: Choice = likeliest,
) -> NDArray[np.int64]:
    """Return the tokens that masks draft behind each prefix of an output.

    Args:
        model: the model, with sdpa attention.
        prompt: tokens of the prompt, at least one.
        output: tokens that the model wrote.
        mask_token_id: token of the masks.
        window: masks behind each prefix, B.
        never_emitted: tokens that are never chosen.
        choose: the choice among the logits.

    Returns:
        int64 [output tokens, B]: entry [i, d - 1] is drafted at depth d behind the prompt and
        ``output[:i]``, for the place of ``output[i + d]``.
    """
    tokens, banned = [*prompt, *output[:-1]], torch.tensor(sorted(never_emitted))
    found = []
    for first in range(0, len(output), _CURSORS):
        cursors = torch.arange(first, min(first + _CURSORS, len(output))) + len(prompt)
        depths = torch.arange(1, window + 1)
        places = (cursors[:, None] + depths - 1).flatten()  # positions of the masks
        clean = torch.arange(int(cursors[-1]))
        ids = torch.cat(
            [
                torch.tensor(tokens[: len(clean)]),
                places.new_full((), mask_token_id).expand(len(places)),
            ]
        )
        blocks = torch.cat([clean, cursors.repeat_interleave(window)])
        positions = torch.cat([clean, places])
        noisy = torch.arange(len(ids)) >= len(clean)
        mask = visibility(torch.zeros_like(ids)[None], positions[None], blocks[None], noisy[None])
        hidden = model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask[:, None],
            use_cache=False,
        ).last_hidden_state[0, len(clean) :]
        logits = model.get_output_embeddings()(hidden).float().index_fill(-1, banned, -torch.inf)
        found.append(choose(logits, places + 1).view(len(cursors), window))
    drafts: NDArray[np.int64] = torch.cat(found).numpy()
    return drafts


def right_drafts(drafts: NDArray[np.int64], output: Sequence[int]) -> NDArray[np.bool_]:
    """Return which drafts equal the output's tokens, bool [tokens, B]; none past its end does."""
    num, window = drafts.shape
    padded = np.concatenate([np.asarray(output, dtype=np.int64), np.full(window, -1)])
    targets = np.lib.stride_tricks.sliding_window_view(padded[1:], window)[:num]
    right: NDArray[np.bool_] = drafts == targets
    return right


def counts_by_depth(right: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return right drafts and all drafts within the output by depth, int64 [2, B]."""
    num, window = right.shape
    totals = np.maximum(num - np.arange(1, window + 1), 0)
    return np.stack([right.sum(0), totals])


def exact_passes(right: NDArray[np.bool_]) -> int:
    """Return the forward passes of mode exact with masks for every outcome.

    The first pass reads the prompt and gives one token; each later one gives the leading run of
    right drafts and one token more.
    """
    runs = right.cumprod(axis=1).sum(axis=1)
    cursor, passes = 0, 1
    while cursor + 1 < len(right):
        cursor += int(runs[cursor]) + 1
        passes += 1
    return passes


def ideal_passes(num_tokens: int, window: int) -> int:
    """Return the passes of `exact_passes` if every draft is right."""
    return 1 + -(-(num_tokens - 1) // (window + 1))
