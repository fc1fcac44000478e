"""Scores the model being trained on held-out conversations: loss by depth, and decoding.

Decoding goes through the serving engine, as `marsray eval` does. Every worker scores its share of
the conversations. Knows no optimizer, checkpoint or cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.measure.evaluation.scoring import (
    ONE_TOKEN,
    EvalItem,
    Outcome,
    Setting,
    evaluation_engine,
    read_items,
    run_setting,
    score,
)
from mars_train.data.pipeline import encode_conversation, find_files, read_conversations
from mars_train.method.layout import collate, lay_out, pack
from mars_train.method.objective import Objective
from mars_train.recipe import DataSettings, EvaluationSettings
from mars_train.stage.history import HeldOutScore, ThresholdScore
from mars_train.stage.parallel import Workers

_BATCH = 16


@dataclass(frozen=True)
class HeldOutSet:
    """Held-out conversations, twice: as prompts to decode from, and with labels for the loss."""

    items: list[EvalItem]
    rows: list[tuple[NDArray[np.int64], NDArray[np.bool_]]]
    """Token ids and which of them are labels, of each conversation."""


def read_held_out(
    settings: EvaluationSettings, data: DataSettings, checkpoint: Checkpoint
) -> HeldOutSet:
    """Read the set with the tokenizer of the model that is trained.

    Raises:
        UserError: a file is missing, or a row is bad; every row has to be right.
    """
    found = find_files(settings.data, "evaluation.data")
    if any("://" in file for file in found):
        raise UserError("evaluation.data: give local files; remote ones are read for training only")
    files = [Path(file) for file in found]
    items = read_items(
        files,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=settings.max_items,
    )
    conversations = read_conversations(found, "evaluation.data")
    rows = [
        encode_conversation(checkpoint.tokenizer, conversation, data.loss_on, data.max_length)
        for conversation, _ in zip(conversations, items, strict=False)
    ]
    return HeldOutSet(items, rows)


@dataclass(frozen=True)
class _Share:
    """What one worker found on its part of the set."""

    loss_sums: NDArray[np.float64]  # [B + 1], nats by depth
    num_labels: NDArray[np.int64]  # [B + 1]
    outcomes: list[list[Outcome]]  # [thresholds][items of the share]


def score_held_out(
    held_out: HeldOutSet,
    settings: EvaluationSettings,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    workers: Workers,
    step: int,
) -> HeldOutScore:
    """Score a model; every worker must call it, with the same weights.

    Args:
        held_out: the whole set.
        settings: thresholds and limits.
        checkpoint: tokenizer, special tokens and block size of the model; one without a block
            size is decoded one token at a time only.
        model: a copy of the model, which the engine takes over.
        workers: who shares the work.
        step: optimizer steps that the model has seen.
    """
    part = slice(workers.rank, None, workers.num_workers)
    sums, counts = _losses_by_depth(model, held_out.rows[part], checkpoint)
    decoding = _settings(settings, checkpoint)
    outcomes = _decode(held_out.items[part], decoding, settings, checkpoint, model, workers.device)
    shares: list[_Share] = workers.gather(_Share(sums, counts, outcomes))
    labels = np.maximum(sum(share.num_labels for share in shares), 1)
    losses = sum(share.loss_sums for share in shares) / labels
    scores = []
    for index, setting in enumerate(decoding):
        found = score([outcome for share in shares for outcome in share.outcomes[index]])
        accuracy = found.accuracy.value if found.accuracy else None
        scores.append(ThresholdScore(setting.threshold, accuracy, found.tokens_per_forward.value))
    return HeldOutScore(step, losses.tolist(), scores)


def _settings(settings: EvaluationSettings, checkpoint: Checkpoint) -> list[Setting]:
    below = sorted({t for t in settings.thresholds if t < 1}, reverse=True)
    if checkpoint.metadata is None:
        return [ONE_TOKEN]
    return [ONE_TOKEN, *(Setting(Mode.THRESHOLD, threshold) for threshold in below)]


def _decode(
    items: Sequence[EvalItem],
    decoding: list[Setting],
    settings: EvaluationSettings,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    device: torch.device,
) -> list[list[Outcome]]:
    if not items:
        return [[] for _ in decoding]
    engine = evaluation_engine(
        checkpoint,
        items,
        max_tokens=settings.max_tokens,
        max_num_seqs=_BATCH,
        model=model,
        device=str(device),
    )
    return [
        run_setting(engine, items, setting, max_tokens=settings.max_tokens) for setting in decoding
    ]


@torch.no_grad()
def _losses_by_depth(
    model: PreTrainedModel,
    rows: Sequence[tuple[NDArray[np.int64], NDArray[np.bool_]]],
    checkpoint: Checkpoint,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Cross-entropy sums and labels by depth; depth 0 is the clean stream's. [B + 1] each"""
    metadata = checkpoint.metadata
    block_size, mask_id = (metadata.block_size, metadata.mask_token_id) if metadata else (None, 0)
    objective = Objective(model, masked=metadata is not None)
    num_depths = (block_size or 0) + 1
    sums, counts = np.zeros(num_depths), np.zeros(num_depths, np.int64)
    for start in range(0, len(rows), _BATCH):
        layouts = [lay_out(*row, block_size, mask_id) for row in rows[start : start + _BATCH]]
        batch = collate(pack(layouts, row_slots=1), pad_token_id=0).to(model.device)
        clean, noisy = (losses.double().cpu().numpy() for losses in objective.label_losses(batch))
        depths = batch.depths.cpu().numpy()
        masked = depths > 0
        sums += np.bincount(depths[masked], noisy[masked], num_depths)
        counts += np.bincount(depths[masked], minlength=num_depths)
        sums[0] += clean.sum()
        counts[0] += len(clean)
    return sums, counts


def warnings_of(
    score: HeldOutScore, start: HeldOutScore, settings: EvaluationSettings
) -> list[str]:
    """What to warn of: one-token quality that falls behind the model that the stage began with."""
    ours, theirs = score.one_token.accuracy, start.one_token.accuracy
    found = []
    if ours is not None and theirs is not None and theirs - ours > settings.max_accuracy_drop:
        found.append(
            f"one-token accuracy is {100 * ours:.1f}%, {100 * (theirs - ours):.1f} points below "
            f"the {100 * theirs:.1f}% that the stage began with"
        )
    rise = score.loss_by_depth[0] - start.loss_by_depth[0]
    if rise > settings.max_loss_rise:
        found.append(
            f"the AR loss on held-out data is {score.loss_by_depth[0]:.4f} nats, {rise:.4f} above "
            "that of the model that the stage began with"
        )
    return [f"step {score.step}: {text}; lower learning_rate or raise ar_weight" for text in found]


def describe(score: HeldOutScore) -> str:
    """A score in a line."""
    parts = [f"AR loss {score.loss_by_depth[0]:.4f}"]
    for item in score.thresholds:
        accuracy = "" if item.accuracy is None else f"{100 * item.accuracy:.1f}% correct, "
        speed = f"{item.tokens_per_forward:.2f} tokens/forward"
        parts.append(f"τ={item.threshold:g}: {accuracy}{speed}")
    return f"step {score.step}, held-out: " + "; ".join(parts)
