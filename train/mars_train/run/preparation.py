"""Prepares the model that a run starts from, and its held-out set. Imports no Ray."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.files import settle
from mars_platform.cli.report import say
from mars_platform.data.files import read_conversations
from mars_platform.errors import UserError
from mars_train.data.encoding import TrainingEncoder, check_first_rows, check_tokenizer
from mars_train.run.run_directory import RunDirectory
from mars_train.run.scratch import create_model
from mars_train.stage.held_out import HeldOutSet, read_held_out


@dataclass(frozen=True)
class Start:
    """Parts of a run that are made before Ray starts: a model, and a way to score it."""

    checkpoint: Checkpoint
    held_out: HeldOutSet | None
    """Conversations to score the model on; None for no scoring."""


def prepare_start(directory: RunDirectory, base: Path | None, console: Console) -> Start:
    """Keep the recipe, create the model if there is no ``base``, and read the held-out set.

    The directory is cleared if the run is refused.
    """
    recipe = directory.recipe
    with directory.cleared_if_refused():
        directory.keep_recipe()
        checkpoint = read_checkpoint(base or _new_model(directory, console))
        _check_family(checkpoint)
        recipe.data.check_context(checkpoint.max_length)
        check_tokenizer(checkpoint.tokenizer)
        if not directory.data.exists():
            encoder = TrainingEncoder.of(checkpoint.tokenizer, checkpoint.special.eos)
            check_first_rows(recipe, encoder, checkpoint.vocabulary_size)
        held_out = None
        if recipe.evaluation is not None:
            held_out = read_held_out(recipe.evaluation, recipe.data, checkpoint)
    return Start(checkpoint, held_out)


def _check_family(checkpoint: Checkpoint) -> None:
    family = type(checkpoint.config)
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING and family not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise UserError(
            f"model: {checkpoint.path} is of the family {checkpoint.config.model_type!r}, which "
            "has no causal language model; use a decoder, such as Qwen2, Qwen3, Llama or Mistral"
        )


def _new_model(directory: RunDirectory, console: Console) -> Path:
    recipe, path = directory.recipe, directory.new_model
    assert recipe.model.scratch is not None
    if path.exists():
        return path
    texts = (
        text
        for conversation in read_conversations(recipe.data.train, columns=recipe.data.columns)
        for turn in conversation.messages
        for text in (turn.reasoning_content, turn.content)
        if text
    )
    unfinished = path.with_name(".partial-start")
    shutil.rmtree(unfinished, ignore_errors=True)
    create_model(recipe.model.scratch, texts, recipe.data.max_length, unfinished, recipe.seed)
    settle(unfinished, path)
    say(console, f"new model and tokenizer in {path}")
    return path
