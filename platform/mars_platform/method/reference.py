"""The oracle: plain MARS decoding of one sequence, without cache, batch or shortcuts.

Every fast path is compared with it, token for token. Knows transformers' forward pass only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence, num_accepted


@dataclass(frozen=True)
class Decoded:
    """What one sequence decoded to: the tokens of each forward pass, end token included."""

    passes: list[list[int]]

    @property
    def tokens(self) -> list[int]:
        """All output tokens in order."""
        return [token for tokens in self.passes for token in tokens]


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    special: SpecialTokens,
    *,
    max_tokens: int,
    threshold: float | Sequence[float] = 1.0,
    num_masks: int | Sequence[int] = 0,
    mask_token_id: int | None = None,
    measure: Confidence = Confidence.PROBABILITY,
) -> Decoded:
    """Decode greedily with a sliding window of masks (arXiv 2604.07023, section 3.3).

    Args:
        model: any causal LM.
        prompt: token ids, at least one.
        special: ids that end the sequence, and ids never emitted.
        max_tokens: most output tokens.
        threshold: τ in (0, 1]; at 1 no mask is fed and this is plain AR decoding. A sequence gives
            that of each pass, so that the trace recorded from an engine can be replayed.
        num_masks: window B, masks fed behind the cursor; likewise.
        mask_token_id: id of the mask; needed where masks are fed.
        measure: what is compared with the threshold.

    Raises:
        UserError: decoding takes more passes than a sequence has entries for.
    """
    committed, passes = list(prompt), list[list[int]]()
    banned = torch.tensor(sorted(special.never_emitted), dtype=torch.long, device=model.device)
    while (num_output := len(committed) - len(prompt)) < max_tokens:
        limit = _of_pass("threshold", threshold, len(passes))
        window = int(_of_pass("num_masks", num_masks, len(passes))) if limit < 1.0 else 0
        masks = [] if window == 0 else [mask_token_id] * window
        ids = torch.tensor([committed + masks], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0]
        logits = logits[len(committed) - 1 :]  # [window + 1, vocabulary]
        proposed = logits.index_fill(-1, banned, -torch.inf).argmax(-1)
        sure = confidence(logits, proposed, measure).cpu()
        count = num_accepted(sure[None], torch.tensor([limit]), torch.tensor([window + 1]))
        accepted = proposed[: int(count)].tolist()[: max_tokens - num_output]
        ends = [i for i, token in enumerate(accepted) if token in special.eos]
        passes.append(accepted[: ends[0] + 1] if ends else accepted)
        committed += passes[-1]
        if ends:
            break
    return Decoded(passes)


def _of_pass(name: str, given: float | Sequence[float], index: int) -> float:
    """What a pass has of a number that may be given for each pass."""
    if isinstance(given, int | float):
        return given
    if index >= len(given):
        raise UserError(
            f"{name}: those of {len(given)} passes are given and decoding takes more; record the "
            "whole trace or lower max_tokens"
        )
    return given[index]
