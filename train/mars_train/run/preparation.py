"""Prepares a run: the model to start from, the training data, and the held-out set."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from rich.console import Console

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.errors import UserError
from mars_train.data.files import read_conversations
from mars_train.data.pipeline import check_vocabulary, prepare
from mars_train.data.token_store import TokenStore
from mars_train.method.batches import num_steps
from mars_train.run.run_directory import RunDirectory
from mars_train.run.scratch import create_model
from mars_train.stage.held_out import HeldOutSet, read_held_out


def prepare_run(
    directory: RunDirectory, base: Path | None, console: Console
) -> tuple[Path, HeldOutSet | None]:
    """Prepare a run in its directory, unless that is done already.

    Args:
        directory: the directory of the run; it is cleared if the run is refused.
        base: the model to start from; None to create one.
        console: the console to print to.

    Returns:
        The checkpoint to start from, and the held-out set.

    Raises:
        UserError: the recipe's model or data is unusable.
    """
    recipe, is_prepared = directory.recipe, directory.data.exists()
    directory.keep_recipe()
    try:
        start = base or _new_model(directory, console)
        checkpoint = read_checkpoint(start)
        if recipe.data.max_length > checkpoint.max_length:
            raise UserError(
                f"data.max_length: {recipe.data.max_length} exceeds the {checkpoint.max_length} "
                "tokens that the model's context holds; lower it"
            )
        if is_prepared:
            store = TokenStore(directory.data)
            text = f"{len(store):,} conversations, {store.num_tokens:,} tokens, prepared before"
            console.print(f"data: {text}", highlight=False)
        else:
            _prepare_data(directory, checkpoint, console)
        held_out = None
        if recipe.evaluation is not None:
            held_out = read_held_out(recipe.evaluation, recipe.data, checkpoint)
    except UserError:
        if not is_prepared:
            directory.clear()
        raise
    return start, held_out


def _new_model(directory: RunDirectory, console: Console) -> Path:
    recipe, path = directory.recipe, directory.new_model
    assert recipe.model.scratch is not None
    if path.exists():
        return path
    texts = (
        message.content
        for conversation in read_conversations(recipe.data.train)
        for message in conversation.messages
    )
    unfinished = path.with_name(".partial-start")
    shutil.rmtree(unfinished, ignore_errors=True)
    create_model(recipe.model.scratch, texts, recipe.data.max_length, unfinished, recipe.seed)
    unfinished.rename(path)
    console.print(f"new model and tokenizer in {path}", highlight=False)
    return path


def _prepare_data(directory: RunDirectory, checkpoint: Checkpoint, console: Console) -> None:
    recipe, started = directory.recipe, time.monotonic()
    with console.status("tokenising the training data"):
        counts = prepare(recipe.data, checkpoint.path, directory.data)
    console.print(
        f"data: {counts.num_examples:,} conversations, {counts.num_tokens:,} tokens, "
        f"{counts.num_supervised:,} of them supervised; {counts.num_truncated:,} conversations "
        f"cut to length, {counts.num_bad:,} bad rows skipped ({directory.report}); "
        f"{time.monotonic() - started:.0f} s",
        highlight=False,
    )
    check_vocabulary(counts.max_token_id, checkpoint.config.vocab_size)
    for stage in recipe.stages:
        if num_steps(stage, counts.num_examples) == 0:
            raise UserError(
                f"data.train: {counts.num_examples} conversations do not fill one batch of "
                f"stages.{stage.name}.batch_size = {stage.batch_size}; lower it or add data"
            )
