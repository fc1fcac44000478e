"""Collects how often a model's confidence is right, on held-out conversations, and fits it.

Each conversation is decoded in mode ar, through the engine. At cursors along that output an
ordinary forward pass then gives the token proposed at each depth with its logits. It is right if
it is the output's token at that place. The maths are `mars_platform.checkpoint.calibration`'s.

What is measured is each depth by itself, with the tokens of mode ar before the cursor. In mode
threshold a depth counts only where all before it were accepted, and tokens accepted earlier may
differ from mode ar's. Knows no terminal, no Ray and no HTTP.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.calibration import (
    Bin,
    Calibration,
    Observed,
    calibrate_depth,
    log_probabilities_at,
    log_probability_curves,
    reliability,
)
from mars_platform.checkpoint.directory import Checkpoint, load_model
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.errors import UserError
from mars_platform.method.rules import visibility
from mars_serve.measure.evaluation.decoding import ONE_TOKEN, evaluation_engine, run_setting
from mars_serve.measure.evaluation.items import EvalItem

_MAX_MASKS = 256  # of one forward pass, whose attention grows with the square of its slots
_MAX_LOGITS = 2**22  # held at once; every temperature takes a copy of them
_SEED = 0  # of the choice of cursors
_TITLE_DECODE, _TITLE_OBSERVE = "decode", "calibrate"

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, the number of conversations done, and of all."""


@dataclass(frozen=True)
class Continuation:
    """A conversation with what mode ar made of it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    """At least one token."""


@dataclass(frozen=True)
class Observations:
    """Proposed tokens of several cursors; made by `observe`."""

    depth: Tensor
    """int64 [tokens]."""
    curves: Tensor
    """float32 [tokens, temperatures], see `log_probability_curves`."""
    correct: Tensor
    """bool [tokens]."""

    def at(self, depth: int) -> Observed:
        """Those of one depth."""
        here = self.depth == depth
        return Observed(self.curves[here], self.correct[here])


@dataclass(frozen=True)
class Reliability:
    """Bins of a depth's reliability diagram, over the half that was not fitted on."""

    before: list[Bin]
    after: list[Bin]


@dataclass(frozen=True)
class Measured:
    """The calibration, and what is drawn of it."""

    calibration: Calibration
    reliability: list[Reliability]
    """Of each depth; without bins where no token was observed."""
    num_cursors: int
    """Places that proposals were made at."""


def measure_calibration(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    *,
    max_tokens: int,
    max_cursors: int,
    max_num_seqs: int,
    dtype: torch.dtype,
    device: str,
    on_progress: OnProgress,
) -> Measured:
    """Decode the items, observe what masks propose along the outputs, fit and check.

    Args:
        checkpoint: a MARS one; its weights are loaded, twice in turn.
        items: at least two with different prompts.
        max_tokens: most output tokens of an item; what the context leaves may be less.
        max_cursors: most places to propose tokens at, over all items; at least 2.
        max_num_seqs: items that decode at once.
        dtype: of the weights.
        device: where to run.
        on_progress: told how far it is.

    Raises:
        UserError: the weights cannot be loaded, or all items fall into one half.
    """
    check_halves(items)
    texts = decode_items(
        checkpoint,
        items,
        max_tokens=max_tokens,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        device=device,
        on_progress=on_progress,
    )
    cursors = choose_cursors(texts, max_cursors)
    # the engine changed its model's layers, so that an ordinary forward pass needs another
    model = load_model(checkpoint.path, dtype=dtype).to(device)
    halves: dict[bool, list[Observations]] = {True: [], False: []}
    for num_done, (text, places) in enumerate(zip(texts, cursors, strict=True), start=1):
        halves[is_fitted(text.prompt)] += observe(model, checkpoint, text, places)
        on_progress(_TITLE_OBSERVE, num_done, len(texts))
    return fit(checkpoint, _joined(halves[True]), _joined(halves[False]), len(items))


def decode_items(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    *,
    max_tokens: int,
    max_num_seqs: int,
    dtype: torch.dtype,
    device: str,
    on_progress: OnProgress,
) -> list[Continuation]:
    """Decode every item in mode ar; see `measure_calibration`."""
    engine = evaluation_engine(
        checkpoint,
        items,
        max_tokens=max_tokens,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        device=device,
    )
    outcomes = run_setting(
        engine,
        items,
        ONE_TOKEN,
        max_tokens=max_tokens,
        on_progress=lambda num_done: on_progress(_TITLE_DECODE, num_done, len(items)),
    )
    return [
        Continuation(item.prompt, outcome.tokens)
        for item, outcome in zip(items, outcomes, strict=True)
    ]


def is_fitted(prompt: tuple[int, ...]) -> bool:
    """Whether a prompt belongs to the half to fit on, by a hash: copies are in the same half."""
    return hashlib.sha256(repr(prompt).encode()).digest()[0] % 2 == 0


def check_halves(items: Iterable[EvalItem]) -> None:
    """Refuse items that cannot be split into one half to fit on and one to check on.

    Raises:
        UserError: all fall into one half.
    """
    if len({is_fitted(item.prompt) for item in items}) < 2:
        raise UserError(
            "data: all conversations fall into one of the two halves, to fit on and to check on; "
            "give more of them, with different prompts"
        )


def choose_cursors(texts: Sequence[Continuation], max_cursors: int) -> list[list[int]]:
    """Choose output places at random, the same ones each time: all where they are few enough.

    Args:
        texts: of both halves.
        max_cursors: at least 2; each half gets one half of them at the most.

    Returns:
        Of each text the places in its output, in rising order; none where it has got none.
    """
    chosen: list[list[int]] = [[] for _ in texts]
    for half in (True, False):
        every = [
            (index, place)
            for index, text in enumerate(texts)
            for place in range(len(text.output))
            if is_fitted(text.prompt) is half
        ]
        drawn = random.Random(_SEED).sample(every, min(max_cursors // 2, len(every)))
        for index, place in sorted(drawn):
            chosen[index].append(place)
    return chosen


@torch.inference_mode()
def observe(
    model: PreTrainedModel, checkpoint: Checkpoint, text: Continuation, cursors: Sequence[int]
) -> list[Observations]:
    """Propose tokens at cursors of one text: its tokens once, and a group of masks per cursor.

    A group sees the tokens before its cursor and itself, causally, which is what a pass over those
    tokens with the masks appended computes. Masks that would propose a token past the end of the
    output are left out.

    Args:
        model: with an attention that takes dense masks.
        checkpoint: of the model, a MARS one.
        text: prompt and output.
        cursors: places in the output, in rising order; none is fine.

    Returns:
        One for each forward pass, on the CPU.
    """
    assert checkpoint.metadata is not None
    block_size = checkpoint.metadata.block_size
    step = max(_MAX_MASKS // block_size, 1)
    return [
        _observe_together(model, checkpoint, text, cursors[start : start + step])
        for start in range(0, len(cursors), step)
    ]


def fit(
    checkpoint: Checkpoint, fitting: Observations, checking: Observations, num_items: int
) -> Measured:
    """Fit each depth on one half and measure it on the other."""
    assert checkpoint.metadata is not None
    depths, diagrams = [], []
    for depth in range(checkpoint.metadata.block_size + 1):
        checked = checking.at(depth)
        depths.append(calibrate_depth(depth, fitting.at(depth), checked))
        diagrams.append(
            Reliability(
                *(
                    reliability(log_probabilities_at(checked.curves, heat).exp(), checked.correct)
                    for heat in (1.0, depths[-1].temperature)
                )
            )
        )
    calibration = Calibration(
        weights=weights_fingerprint(checkpoint.path), num_items=num_items, depths=tuple(depths)
    )
    return Measured(calibration, diagrams, depths[0].num_fitted + depths[0].num_checked)


def _observe_together(
    model: PreTrainedModel, checkpoint: Checkpoint, text: Continuation, cursors: Sequence[int]
) -> Observations:
    """One forward pass; see `observe`."""
    assert checkpoint.metadata is not None
    start = len(text.prompt)
    tokens = [*text.prompt, *text.output[: cursors[-1]]]  # all before the last cursor
    # a slot's block is its position where it holds a token, and its cursor where it holds a mask:
    # then a mask sees its own group and the tokens strictly before its cursor
    slots = [(position, position, 0) for position in range(len(tokens))]
    reads = []  # (slot, depth, place in the output)
    for cursor in cursors:
        reads.append((start + cursor - 1, 0, cursor))
        num_masks = min(checkpoint.metadata.block_size, len(text.output) - 1 - cursor)
        for depth in range(1, num_masks + 1):
            reads.append((len(slots), depth, cursor + depth))
            slots.append((start + cursor + depth - 1, start + cursor, 1))
    tokens += [checkpoint.metadata.mask_token_id] * (len(slots) - len(tokens))
    positions, blocks, noisy = torch.tensor(slots, device=model.device).T.unsqueeze(1)  # [1, slots]
    visible = visibility(torch.zeros_like(positions), positions, blocks, noisy.bool())
    hidden = model.base_model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=positions,
        attention_mask=visible.unsqueeze(1),  # [1, 1, slots, slots]
        use_cache=False,
    ).last_hidden_state[0]  # [slots, width]
    where, depth, place = torch.tensor(reads).T  # [reads] each
    curves, proposed = _propose(model, checkpoint, hidden[where.to(model.device)])
    return Observations(depth, curves, proposed == torch.tensor(text.output)[place])


def _propose(
    model: PreTrainedModel, checkpoint: Checkpoint, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Curves [reads, temperatures] and tokens [reads] of [reads, width] states, on the CPU."""
    head: Any = model.get_output_embeddings()
    banned = torch.tensor(sorted(checkpoint.special.never_emitted), device=model.device)
    curves, proposed = [], []
    size = max(_MAX_LOGITS // model.config.vocab_size, 1)
    for part in torch.split(hidden, size):
        logits: Tensor = head(part)  # [part, vocabulary]
        tokens = logits.index_fill(-1, banned, -torch.inf).argmax(-1)
        curves.append(log_probability_curves(logits, tokens).cpu())
        proposed.append(tokens.cpu())
    return torch.cat(curves), torch.cat(proposed)


def _joined(parts: Sequence[Observations]) -> Observations:
    assert parts, "each half has a cursor"
    return Observations(
        torch.cat([part.depth for part in parts]),
        torch.cat([part.curves for part in parts]),
        torch.cat([part.correct for part in parts]),
    )
