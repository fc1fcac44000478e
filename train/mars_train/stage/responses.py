"""Writes responses of a model to the prompts of training data, by the serving engine.

A response depends on the model, its conversation and the stage's settings alone, so responses can
be written in any parts, by any number of processes. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.measure.evaluation.decoding import (
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem
from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.recipe import GenerateStage


def generate_responses(
    model: Path,
    data: TokenStore,
    stage: GenerateStage,
    max_length: int,
    output: Path,
    *,
    rows: Sequence[int] | None = None,
    device: str = "cpu",
    on_progress: Callable[[int, str], None] | None = None,
) -> TokenStore:
    """Write a token store of the data's prompts with the model's own responses.

    Args:
        model: checkpoint that responds.
        data: conversations; a prompt is all that comes before the last supervised turn.
        stage: settings of the responses.
        max_length: most tokens of a conversation, prompt and response together.
        output: place of the new store, which must not exist.
        rows: rows of the data to respond to; all by default.
        device: device to run on.
        on_progress: called with the number of finished responses, and their speed in words.

    Returns:
        The store. Its rows are those of the data, in order; the response is supervised, with the
        end token if the model ended it.

    Raises:
        UserError: the model is unusable, or ``output`` exists.
    """
    chosen = range(len(data)) if rows is None else rows
    with TokenStoreWriter(output) as writer:
        responder = Responder(read_checkpoint(model), stage, max_length, device=device)
        found = responder.respond(data, chosen, on_progress=on_progress)
        append_responses(writer, data, chosen, found)
        return writer.finish()


class Responder:
    """A model that responds to prompts of token stores.

    A model that knows masks decodes in mode exact, which is faster and gives the output of mode ar.

    Args:
        checkpoint: the model.
        stage: settings of the responses.
        max_length: most tokens of a conversation, at most the model's context.
        dtype: type of the weights.
        device: device to run on.

    Raises:
        UserError: the weights cannot be loaded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        stage: GenerateStage,
        max_length: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._stage, self._max_length = stage, max_length
        exact = checkpoint.metadata is not None
        setting = DecodingSetting(Mode.EXACT if exact else Mode.AR, 1.0)
        self._setting = setting.sampled(stage.temperature, stage.seed)
        longest = EvalItem("longest", (0,) * max_length, answer=None, states_answer=False)
        self._engine = evaluation_engine(
            checkpoint,
            [longest] * stage.max_num_seqs,  # room for any that run at once
            max_tokens=0,
            max_num_seqs=stage.max_num_seqs,
            exact=exact,
            dtype=dtype,
            device=device,
        )

    def respond(
        self,
        data: TokenStore,
        rows: Sequence[int],
        *,
        on_progress: Callable[[int, str], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """Return the response to the prompt of each row, the end token included.

        Raises:
            UserError: the model gives no finite logits, or a prompt leaves no room.
        """
        items = [_item(data, row) for row in rows]
        room = [self._max_length - len(item.prompt) for item in items]
        if min(room) < 1:
            raise UserError(
                f"data.max_length: {self._max_length} leaves no room behind the prompt of "
                f"{items[room.index(min(room))].source}; raise it, or prepare the data with it"
            )
        most = min(max(room), self._stage.max_tokens or max(room))
        decoded = run_setting(
            self._engine, items, self._setting, max_tokens=most, on_progress=on_progress
        )
        for each in decoded:
            if not each.is_whole:
                raise UserError(
                    f"stages.{self._stage.name}: the model cannot respond to {each.source} of the "
                    f"data ({each.finish_reason}); look for broken weights"
                )
        return [each.tokens[:limit] for limit, each in zip(room, decoded, strict=True)]


def append_responses(
    writer: TokenStoreWriter,
    data: TokenStore,
    rows: Sequence[int],
    responses: Sequence[Sequence[int]],
) -> None:
    """Add rows of the data with their responses, which are supervised, to a store.

    Args:
        writer: the store.
        data: the conversations that gave the prompts.
        rows: row of each response.
        responses: token ids of each response, at least one.
    """
    prompts = [prompt_of(data, row) for row in rows]
    sizes = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
    writer.append(
        keys=np.stack([np.zeros(len(rows), np.int64), np.asarray(rows, np.int64)], axis=1),
        lengths=np.array([sum(size) for size in sizes], np.int32),
        tokens=np.concatenate(
            [part for pair in zip(prompts, responses, strict=True) for part in pair]
        ),
        supervised=np.concatenate([np.arange(p + r) >= p for p, r in sizes]),
    )


def prompt_of(data: TokenStore, row: int) -> NDArray[np.int64]:
    """Return the tokens of a row before its last supervised turn, at least one."""
    input_ids, supervised = data[row]
    begins = np.flatnonzero(supervised[1:] & ~supervised[:-1])
    return input_ids[: begins[-1] + 1 if len(begins) else 1]


def _item(data: TokenStore, row: int) -> EvalItem:
    prompt = tuple(prompt_of(data, row).tolist())
    return EvalItem(f"row {row}", prompt, answer=None, states_answer=False, index=row)
