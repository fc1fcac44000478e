"""Writes responses of a model to the prompts of training data, by the serving engine.

A response depends on the model, its conversation and the stage's settings alone, so responses can
be written in any parts, by any number of processes. Imports no Ray.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.measure.evaluation.decoding import (
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem
from mars_train.data.token_store import TokenStore, TokenStoreWriter, temperatures
from mars_train.recipe import GenerateStage


def rows_to_answer(stage: GenerateStage, num_rows: int) -> NDArray[np.int64]:
    """Return the rows of the data that a stage responds to, ascending: int64 [responses]."""
    count = min(num_rows, stage.max_responses or num_rows)
    return np.arange(count, dtype=np.int64) * num_rows // count


class Responder:
    """A model that responds to prompts of token stores.

    A model that knows masks decodes in mode exact, which is faster and gives the output of mode ar.
    A conversation has at most ``max_length`` tokens, which the model's context has to hold.

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
        self._setting = DecodingSetting(Mode.EXACT if exact else Mode.AR, 1.0)
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

    def respond(self, data: TokenStore, rows: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Return the response to the prompt of each row, int64 [responses], the end token included.

        Raises:
            UserError: the model gives no finite logits, or a prompt leaves no room.
        """
        items = [_item(data, int(row)) for row in rows]
        room = [self._max_length - len(item.prompt) for item in items]
        if min(room) < 1:
            raise UserError(
                f"data.max_length: {self._max_length} leaves no room behind the prompt of "
                f"{items[room.index(min(room))].source}; raise it, or prepare the data with it"
            )
        most = min(max(room), self._stage.max_tokens or max(room))
        decoded = self._decoded(items, rows, most)
        for each in decoded:
            if not each.is_whole:
                raise UserError(
                    f"stages.{self._stage.name}: the model cannot respond to {each.source} of the "
                    f"data ({each.finish_reason}); look for broken weights"
                )
        return [each.tokens[:limit] for limit, each in zip(room, decoded, strict=True)]

    def _decoded(
        self, items: Sequence[EvalItem], rows: NDArray[np.int64], max_tokens: int
    ) -> list[DecodedItem]:
        """Decode each row's item at the temperature that is drawn for the row."""
        stage, found = self._stage, dict[int, DecodedItem]()
        drawn = temperatures(rows, stage.seed, stage.temperatures)
        for temperature in stage.temperatures:
            places = np.flatnonzero(drawn == temperature).tolist()
            decoded = run_setting(
                self._engine,
                [items[place] for place in places],
                self._setting.sampled(temperature, stage.seed),
                max_tokens=max_tokens,
            )
            found |= zip(places, decoded, strict=True)
        return [found[place] for place in range(len(items))]


def append_responses(
    writer: TokenStoreWriter,
    data: TokenStore,
    rows: NDArray[np.int64],
    responses: Sequence[Sequence[int]],
) -> None:
    """Add rows of ``data`` with their responses, which are supervised, to a store.

    ``rows``, int64 [responses], is the row of each response, which has at least one token id.
    """
    prompts = [prompt_of(data, int(row)) for row in rows]
    sizes = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
    writer.append(
        keys=np.stack([np.zeros_like(rows), rows], axis=1),
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
