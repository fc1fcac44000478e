"""Scores the model in training on held-out conversations: loss by depth, and decoding.

The serving engine decodes, as in `marsray eval`. Every worker scores its share of the
conversations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.data.files import find_files, read_checked_rows
from mars_platform.method.mode import Mode
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.measure.evaluation.scoring import score
from mars_train.data.encoding import TrainingEncoder, encode_conversation
from mars_train.method.layout import collate, lay_out, pack
from mars_train.method.objective import Objective
from mars_train.recipe import DataSettings, EvaluationSettings
from mars_train.stage.history import HeldOutScore, ThresholdScore
from mars_train.stage.parallel import Workers

_BATCH = 16


@dataclass(frozen=True)
class HeldOutSet:
    """Held-out conversations, both as prompts to decode from and with labels for the loss."""

    items: list[EvalItem]
    rows: list[tuple[NDArray[np.int64], NDArray[np.bool_]]]
    """Token ids and a mask of the labels for each conversation's supervised turns, both [length].
    """


def read_held_out(
    settings: EvaluationSettings, data: DataSettings, checkpoint: Checkpoint
) -> HeldOutSet:
    """Read the set and encode it with the model's tokenizer."""
    files = [Path(file) for file in find_files(settings.data, "evaluation.data")]
    items = read_items(
        files,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=settings.max_items,
        columns=data.columns,
    )
    encoder = TrainingEncoder.of(checkpoint.tokenizer, checkpoint.special.eos)
    rows = [
        row
        for _, conversation, _ in islice(
            read_checked_rows(files, "evaluation.data", data.columns), len(items)
        )
        for row in encode_conversation(encoder, conversation, data.loss_on, data.max_length)
    ]
    return HeldOutSet(items, rows)


def score_held_out(
    held_out: HeldOutSet,
    settings: EvaluationSettings,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    workers: Workers,
    step: int,
) -> HeldOutScore:
    """Score a model that was trained for ``step`` optimizer steps.

    Every worker must call this with the same weights, in a copy that the engine may change. A
    checkpoint without a block size is decoded one token at a time only.
    """
    part = slice(workers.rank, None, workers.num_workers)
    decoding = [ONE_TOKEN]
    if checkpoint.metadata is not None:
        below = sorted({t for t in settings.thresholds if t < 1}, reverse=True)
        decoding += [DecodingSetting(Mode.THRESHOLD, threshold) for threshold in below]
    own_losses = _losses_by_depth(model, held_out.rows[part], checkpoint)
    own = _decode(held_out.items[part], decoding, settings, checkpoint, model, workers.device)
    shares = workers.gather((own_losses, own))
    sums, counts = sum(losses for losses, _ in shares)
    scores = []
    for index, setting in enumerate(decoding):
        found = score([item for _, decoded in shares for item in decoded[index]])
        accuracy = found.accuracy.value if found.accuracy else None
        scores.append(ThresholdScore(setting.threshold, accuracy, found.tokens_per_forward.value))
    return HeldOutScore(step, (sums / np.maximum(counts, 1)).tolist(), scores)


def _decode(
    items: Sequence[EvalItem],
    decoding: list[DecodingSetting],
    settings: EvaluationSettings,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    device: torch.device,
) -> list[list[DecodedItem]]:
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
) -> NDArray[np.float64]:
    """Return the sum of losses and the number of labels by depth, [2, B + 1].

    Depth 0 is the AR loss.
    """
    metadata = checkpoint.metadata
    block_size, mask_id = (metadata.block_size, metadata.mask_token_id) if metadata else (None, 0)
    objective = Objective(model, masked=metadata is not None)
    num_depths = (block_size or 0) + 1
    sums, counts = found = np.zeros((2, num_depths))
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
    return found


def warnings_of(
    score: HeldOutScore, start: HeldOutScore, settings: EvaluationSettings
) -> list[str]:
    """Return a warning for each way in which one-token quality fell since the stage began."""
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
    """Return a score as one line of text."""
    parts = [f"AR loss {score.loss_by_depth[0]:.4f}"]
    for item in score.thresholds:
        accuracy = "" if item.accuracy is None else f"{100 * item.accuracy:.1f}% correct, "
        speed = f"{item.tokens_per_forward:.2f} tokens/forward"
        parts.append(f"τ={item.threshold:g}: {accuracy}{speed}")
    return f"step {score.step}, held-out: " + "; ".join(parts)
