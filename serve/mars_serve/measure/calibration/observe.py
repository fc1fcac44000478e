"""Observes which tokens masks propose along an output, and whether they are right.

A proposed token is right if it is the output's token at that index. Each depth is measured by
itself, behind the output's own tokens. In mode threshold a depth counts only if all depths before
it were accepted, and the tokens accepted earlier may differ from mode ar's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.calibration import Observed, log_probability_curves
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.translations import ProposedRuns
from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence, visibility
from mars_platform.mixing.head import Head, decoder_of

OTHERS = (Confidence.MARGIN, Confidence.ENTROPY)
"""Measures of confidence other than probability."""
_MAX_MASKS = 256  # of one pass, because attention grows with the square of the positions
_MAX_LOGITS = 2**22  # computed at once, because every temperature takes a copy of them
_SEED = 0  # for the choice of cursors


@dataclass(frozen=True)
class Continuation:
    """A conversation's prompt and its output in mode ar."""

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    output: tuple[int, ...]
    """Token ids of the output, at least one."""


@dataclass(frozen=True)
class Observations:
    """The tokens proposed at several cursors."""

    depth: Tensor
    """int64 [tokens], depth of each token."""
    curves: Tensor
    """float32 [tokens, temperatures], see `log_probability_curves`."""
    correct: Tensor
    """bool [tokens], whether each token is right."""
    others: Tensor
    """float32 [tokens, `OTHERS`], further measures of each token's confidence at temperature 1."""

    @property
    def runs(self) -> ProposedRuns:
        """What masks proposed, cursor by cursor."""
        cursor = (self.depth == 0).cumsum(0) - 1
        proposed = self.depth > 0
        num_cursors = int(cursor[-1]) + 1 if len(cursor) else 0
        return ProposedRuns(num_cursors, cursor[proposed], self.correct[proposed])

    def at(self, depth: int) -> Observed:
        """Return the observations of one depth."""
        here = self.depth == depth
        return Observed(self.curves[here], self.correct[here])

    @classmethod
    def joined(cls, parts: Sequence[Observations]) -> Observations:
        """Join at least one part."""
        return cls(
            depth=torch.cat([part.depth for part in parts]),
            curves=torch.cat([part.curves for part in parts]),
            correct=torch.cat([part.correct for part in parts]),
            others=torch.cat([part.others for part in parts]),
        )


def is_fitted(prompt: tuple[int, ...]) -> bool:
    """Return whether a prompt is in the half to fit on; a hash keeps copies in the same half."""
    return hashlib.sha256(repr(prompt).encode()).digest()[0] % 2 == 0


def choose_cursors(texts: Sequence[Continuation], max_cursors: int) -> list[list[int]]:
    """Choose the output indices to propose tokens at, at random but the same ones each time.

    Args:
        texts: continuations of both halves.
        max_cursors: most cursors over all texts, at least 2; each half gets at most half of them.

    Returns:
        Output indices of each text, in rising order.
    """
    chosen: list[list[int]] = [[] for _ in texts]
    for half in (True, False):
        candidates = [
            (number, cursor)
            for number, text in enumerate(texts)
            for cursor in range(len(text.output))
            if is_fitted(text.prompt) is half
        ]
        drawn = random.Random(_SEED).sample(candidates, min(max_cursors // 2, len(candidates)))
        for number, cursor in sorted(drawn):
            chosen[number].append(cursor)
    return chosen


@torch.inference_mode()
def observe(
    model: PreTrainedModel, checkpoint: Checkpoint, text: Continuation, cursors: Sequence[int]
) -> list[Observations]:
    """Propose tokens at the cursors of one text.

    A pass feeds the text once, and a group of masks for each cursor. A group sees the tokens before
    its cursor and itself, causally, which is what a pass over those tokens with the masks appended
    computes. Masks that would propose a token past the end of the output are left out.

    Args:
        model: the model, with an attention that takes dense masks.
        checkpoint: the model's checkpoint, a MARS one.
        text: prompt and output.
        cursors: output indices in rising order; may be empty.

    Returns:
        The observations of each forward pass, on the CPU.
    """
    assert checkpoint.metadata is not None
    step = max(_MAX_MASKS // checkpoint.metadata.block_size, 1)
    return [
        _observe_together(model, checkpoint, text, cursors[start : start + step])
        for start in range(0, len(cursors), step)
    ]


def _observe_together(
    model: PreTrainedModel, checkpoint: Checkpoint, text: Continuation, cursors: Sequence[int]
) -> Observations:
    """Observe the cursors in one forward pass; see `observe`."""
    assert checkpoint.metadata is not None
    start = len(text.prompt)
    tokens = [*text.prompt, *text.output[: cursors[-1]]]
    # The columns are position id, block and noisiness. A token's block is its own position id, and
    # a mask's is its cursor: a mask then sees its group and the tokens strictly before the cursor.
    positions = [(index, index, 0) for index in range(len(tokens))]
    reads = []  # (position, depth, output index)
    for cursor in cursors:
        reads.append((start + cursor - 1, 0, cursor))
        num_masks = min(checkpoint.metadata.block_size, len(text.output) - 1 - cursor)
        for depth in range(1, num_masks + 1):
            reads.append((len(positions), depth, cursor + depth))
            positions.append((start + cursor + depth - 1, start + cursor, 1))
    tokens += [checkpoint.metadata.mask_token_id] * (len(positions) - len(tokens))
    columns = torch.tensor(positions, device=model.device).T.unsqueeze(1)
    position_ids, blocks, noisy = columns  # [1, positions] each
    visible = visibility(torch.zeros_like(position_ids), position_ids, blocks, noisy.bool())
    hidden_states = decoder_of(model)(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=position_ids,
        attention_mask=visible.unsqueeze(1),  # [1, 1, positions, positions]
        use_cache=False,
    ).last_hidden_state[0]  # [positions, width]
    read_positions, depth, index = torch.tensor(reads).T  # [reads] each
    states = hidden_states[read_positions.to(model.device)]
    curves, others, proposed = _propose(model, checkpoint, states)
    return Observations(
        depth=depth,
        curves=curves,
        correct=proposed == torch.tensor(text.output)[index],
        others=others,
    )


def _propose(
    model: PreTrainedModel, checkpoint: Checkpoint, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return curves [reads, temperatures], other confidences [reads, `OTHERS`] and tokens [reads].

    ``hidden_states`` are [reads, width].
    """
    head = Head(model)
    banned = torch.tensor(sorted(checkpoint.special.never_emitted), device=model.device)
    curves, others, proposed = [], [], []
    size = max(_MAX_LOGITS // checkpoint.vocabulary_size, 1)
    for part in torch.split(hidden_states, size):
        logits = head(part)  # [part, vocabulary]
        tokens = logits.index_fill(-1, banned, -torch.inf).argmax(-1)
        curves.append(log_probability_curves(logits, tokens).cpu())
        others.append(
            torch.stack([confidence(logits, tokens, measure) for measure in OTHERS], -1).cpu()
        )
        proposed.append(tokens.cpu())
    return torch.cat(curves), torch.cat(others), torch.cat(proposed)
