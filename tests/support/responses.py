"""The responses of a stage as one process writes them, without shards."""

from __future__ import annotations

from pathlib import Path

from mars_platform.checkpoint.directory import read_checkpoint
from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.recipe import GenerateStage
from mars_train.stage.responses import Responder, append_responses, rows_to_answer


def generate_responses(
    model: Path, data: TokenStore, stage: GenerateStage, max_length: int, output: Path
) -> TokenStore:
    """Write a token store of the data's prompts with the model's own responses."""
    rows = rows_to_answer(stage, len(data))
    with TokenStoreWriter(output) as writer:
        found = Responder(read_checkpoint(model), stage, max_length).respond(data, rows)
        append_responses(writer, data, rows, found)
        return writer.finish()
