"""The oracle: plain MARS decoding of one sequence, without cache, batch or shortcuts.

Every fast path of the engine is compared with it, token for token. Imports no Ray or HTTP library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence, num_accepted


class TokenRoles(Protocol):
    """The tokens of a vocabulary that decoding treats unlike others."""

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a sequence."""

    @property
    def never_emitted(self) -> frozenset[int]:
        """Tokens that are never chosen."""


class Head(Protocol):
    """A draft head, by which a mask's draft depends on the token before it."""

    def share_out(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return masks' logits, [n, vocabulary], as they are behind int64 [n] tokens."""


@dataclass(frozen=True)
class ReferenceOutput:
    """The tokens that each forward pass of one sequence added, end token included."""

    passes: list[list[int]]

    @property
    def tokens(self) -> list[int]:
        """All output tokens in order."""
        return [token for tokens in self.passes for token in tokens]


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    special: TokenRoles,
    *,
    max_tokens: int,
    threshold: float | Sequence[float] = 1.0,
    num_masks: int | Sequence[int] = 0,
    mask_token_id: int | None = None,
    measure: Confidence = Confidence.PROBABILITY,
    forbidden: Callable[[list[int]], Sequence[int]] | None = None,
    head: Head | None = None,
) -> ReferenceOutput:
    """Decode greedily with a sliding window of masks (arXiv 2604.07023, section 3.3).

    Each pass feeds the committed tokens ``x[0..c-1]`` and W masks at the positions ``c..c+W-1``.
    The logits at position ``c - 1 + d`` propose token ``x[c + d]``, at depths d = 0..W. The first
    ``n = num_accepted(...)`` proposals are committed, up to and including an end token.

    Args:
        model: any causal LM.
        prompt: token ids, at least one.
        special: ids that end the sequence, and ids that are never emitted.
        max_tokens: most output tokens.
        threshold: τ in (0, 1]; at 1 no mask is fed, which is plain AR decoding. One number for all
            passes, or one for each pass, to replay the trace that an engine recorded.
        num_masks: W, number of masks fed by a pass; likewise one number or one for each pass.
        mask_token_id: id of the mask; required if masks are fed.
        measure: confidence measure that is compared with the threshold.
        forbidden: function from the output so far, the earlier proposals of a pass included, to the
            tokens that may not follow it.
        head: the model's draft head, which acts at each mask, behind the proposal before it.

    Raises:
        UserError: decoding takes more passes than a sequence has entries.
    """
    committed, passes = list(prompt), list[list[int]]()
    banned = torch.tensor(sorted(special.never_emitted), dtype=torch.long, device=model.device)
    while (num_output := len(committed) - len(prompt)) < max_tokens:
        tau = _value_for_pass("threshold", threshold, len(passes))
        window = int(_value_for_pass("num_masks", num_masks, len(passes))) if tau < 1.0 else 0
        masks = [] if window == 0 else [mask_token_id] * window
        ids = torch.tensor([committed + masks], device=model.device)  # [1, c + W]
        output = model(input_ids=ids, use_cache=False, output_hidden_states=head is not None)
        place = slice(len(committed) - 1, None)
        logits = output.logits[0, place].float()  # [W + 1, vocabulary]
        allowed = logits.index_fill(-1, banned, -torch.inf)
        act = None if head is None else partial(_behind, head, output.hidden_states[-1][0, place])
        proposed = _proposed(allowed, committed[len(prompt) :], act, forbidden)  # [W + 1]
        logits = allowed.index_copy(-1, banned, logits[:, banned])
        sure = confidence(logits, proposed, measure).cpu()  # [W + 1]
        count = num_accepted(sure[None], torch.tensor([tau]), torch.tensor([window + 1]))
        accepted = proposed[: int(count)].tolist()[: max_tokens - num_output]
        ends = [i for i, token in enumerate(accepted) if token in special.eos]
        passes.append(accepted[: ends[0] + 1] if ends else accepted)
        committed += passes[-1]
        if ends:
            break
    return ReferenceOutput(passes)


def _proposed(
    logits: Tensor,
    output: list[int],
    head: Callable[[Tensor, int, int], Tensor] | None,
    forbidden: Callable[[list[int]], Sequence[int]] | None,
) -> Tensor:
    """Return the likeliest token of each depth; a draft head acts on the logits, in place."""
    tokens = list[int]()
    for depth, scores in enumerate(logits):
        if head is not None and depth:
            scores.copy_(head(scores, depth, tokens[-1]))
        left = scores.clone()
        if forbidden is not None:
            left[list(forbidden([*output, *tokens]))] = -torch.inf
        tokens.append(int(left.argmax()))
    return torch.tensor(tokens, device=logits.device)


def _behind(head: Head, hidden: Tensor, logits: Tensor, depth: int, previous: int) -> Tensor:
    """Return a mask's logits, [vocabulary], as a draft head changes them behind a token."""
    token = torch.tensor([previous], device=logits.device)
    return head.share_out(logits[None], hidden[depth, None], token)[0]


def _value_for_pass(name: str, given: float | Sequence[float], index: int) -> float:
    """Return the value of an argument that is one number for all passes, or one for each."""
    if isinstance(given, int | float):
        return given
    if index >= len(given):
        raise UserError(
            f"{name}: those of {len(given)} passes are given and decoding takes more; record the "
            "whole trace or lower max_tokens"
        )
    return given[index]
