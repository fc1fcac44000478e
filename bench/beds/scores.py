"""Scores a checkpoint on held-out conversations: speed, quality, agreement and distributions.

All figures are kept by item, so that two checkpoints are compared on the same conversations.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.beds.agreement import (
    Choice,
    Sampled,
    counts_by_depth,
    exact_passes,
    ideal_passes,
    likeliest,
    mask_drafts,
    right_drafts,
)
from bench.beds.models import MAX_TOKENS
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.adapted import load_weights, read_model
from mars_platform.checkpoint.directory import Checkpoint, load_model
from mars_platform.checkpoint.references import ADAPTER_FILE
from mars_platform.data.conversations import Conversation
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Sampling
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_train.data.encoding import encode_conversation, training_encoder
from mars_train.data.files import read_conversations

TEMPERATURE = 0.7
THRESHOLDS = (0.95, 0.8)
_BATCH = 32

Row = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids of a conversation, and which of them are labels, both [length]."""


def score_checkpoint(path: Path, ar_path: Path, held_out: Path) -> dict[str, Any]:
    """Return all figures of a checkpoint as JSON.

    Args:
        path: directory of a checkpoint, or of an adapter of the AR checkpoint; without
            ``mars.json`` nothing is drafted.
        ar_path: AR checkpoint, from whose distributions the divergence is measured.
        held_out: JSONL file of conversations with answers.
    """
    began = time.perf_counter()
    is_adapter = (path / ADAPTER_FILE).exists()
    checkpoint = read_model(ar_path, path) if is_adapter else read_model(path)
    items = read_items([held_out], checkpoint.tokenizer, max_length=checkpoint.max_length)
    decoded = _decode(checkpoint, items)
    model = load_weights(checkpoint, dtype=torch.float32)
    rows = conversation_rows(checkpoint, read_conversations([str(held_out)]))
    found: dict[str, Any] = {
        "settings": {name: by_item(each) for name, each in decoded.items()},
        "distributions": distributions(model, load_model(ar_path), rows),
    }
    if checkpoint.metadata is not None:
        for name, setting in (("exact", "one-token"), ("exact-sampled", "one-token-sampled")):
            temperature = TEMPERATURE if setting.endswith("sampled") else 0.0
            found[name] = drafting(checkpoint, model, items, decoded[setting], temperature)
    found["score_s"] = time.perf_counter() - began
    return found


def _decode(checkpoint: Checkpoint, items: Sequence[EvalItem]) -> dict[str, list[DecodedItem]]:
    sampling = Sampling(temperature=TEMPERATURE)
    settings = {
        "one-token": ONE_TOKEN,
        "one-token-sampled": DecodingSetting(Mode.AR, 1.0, sampling=sampling),
    }
    if checkpoint.metadata is not None:
        settings |= {
            f"tau-{each:g}": DecodingSetting(
                Mode.THRESHOLD, each, window=checkpoint.metadata.block_size
            )
            for each in THRESHOLDS
        }
    engine = evaluation_engine(checkpoint, items, max_tokens=MAX_TOKENS, max_num_seqs=_BATCH)
    return {
        name: run_setting(engine, items, setting, max_tokens=MAX_TOKENS)
        for name, setting in settings.items()
    }


def by_item(decoded: Sequence[DecodedItem]) -> dict[str, list[Any]]:
    """Return tokens, passes and correctness of each item."""
    return {
        "tokens": [each.num_tokens for each in decoded],
        "passes": [each.num_passes for each in decoded],
        "correct": [each.correct for each in decoded],
    }


def drafting(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    items: Sequence[EvalItem],
    outputs: Sequence[DecodedItem],
    temperature: float,
) -> dict[str, Any]:
    """Return what mode exact takes for the outputs, and the agreement of masks with them.

    As many masks are fed as the model knows.

    Returns:
        ``tokens``, ``passes`` and ``ideal_passes`` by item; ``right`` and ``drafts`` by depth,
        summed over every position of every output.
    """
    assert checkpoint.metadata is not None
    window = checkpoint.metadata.block_size
    found: dict[str, list[int]] = {"tokens": [], "passes": [], "ideal_passes": []}
    counts = np.zeros((2, window), np.int64)
    for item, output in zip(items, outputs, strict=True):
        choose: Choice = Sampled(temperature, seed=item.index) if temperature else likeliest
        drafts = mask_drafts(
            model,
            item.prompt,
            output.tokens,
            mask_token_id=checkpoint.metadata.mask_token_id,
            window=window,
            never_emitted=checkpoint.special.never_emitted,
            choose=choose,
        )
        right = right_drafts(drafts, output.tokens)
        counts += counts_by_depth(right)
        found["tokens"].append(output.num_tokens)
        found["passes"].append(exact_passes(right))
        found["ideal_passes"].append(ideal_passes(output.num_tokens, window))
    return {**found, "right": counts[0].tolist(), "drafts": counts[1].tolist()}


def conversation_rows(checkpoint: Checkpoint, conversations: Iterable[Conversation]) -> list[Row]:
    """Encode conversations; the last turn of each is supervised."""
    encoder = training_encoder(checkpoint.tokenizer)
    return [
        encode_conversation(encoder, conversation, "last", checkpoint.max_length)
        for conversation in conversations
    ]


@torch.inference_mode()
def distributions(
    model: PreTrainedModel, start: PreTrainedModel, rows: Sequence[Row]
) -> dict[str, list[float]]:
    """Return sums over the labels of each conversation, in nats.

    Returns:
        ``labels``, their number; ``loss``, the AR loss; ``entropy`` of the model; ``divergence``,
        the Kullback-Leibler divergence of the model from ``start``, KL(start || model).
    """
    found: dict[str, list[float]] = {"labels": [], "loss": [], "entropy": [], "divergence": []}
    size = min(model.config.vocab_size, start.config.vocab_size)  # a mask token may have a new row
    for ids, supervised in rows:
        labels_at = np.flatnonzero(supervised[1:])
        labels = torch.from_numpy(ids[labels_at + 1])
        ours, theirs = (_log_probabilities(each, ids, size)[labels_at] for each in (model, start))
        found["labels"].append(len(labels))
        found["loss"].append(float(-ours.gather(-1, labels[:, None]).sum()))
        found["entropy"].append(float(-(ours.exp() * ours).sum()))
        found["divergence"].append(float((theirs.exp() * (theirs - ours)).sum()))
    return found


def _log_probabilities(model: PreTrainedModel, ids: NDArray[np.int64], size: int) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(ids[:-1])[None], use_cache=False).logits
    return logits[0, :, :size].float().log_softmax(-1)
