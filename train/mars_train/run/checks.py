"""Refuses what a run cannot use before anything slow begins.

Whatever is refused here would be refused as well later on, by a worker at the latest. Imports no
Ray or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mars_platform.checkpoint.inspection import Inspection, inspect_model
from mars_platform.data.conversations import read_answer
from mars_platform.errors import UserError, one_line
from mars_train.data.files import find_files, parse_row, read_rows
from mars_train.data.first_rows import FirstRows, check_format, read_first_rows
from mars_train.data.token_store import TokenStore
from mars_train.recipe import EvaluationSettings, MarsStage, Recipe
from mars_train.run.run_directory import RunDirectory
from mars_train.stage.stored_state import refuse_other_runs
from mars_train.storage.directories import Storage

_HELD_OUT_ROWS = 500
_HELD_OUT_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Checked:
    """Parts of a checked recipe that its preparation goes on with."""

    base: Path | None
    """Directory of the model to start from; None for a new one."""
    first_rows: FirstRows | None
    """First rows of the training data; None if all are tokenised already."""


def check_before_start(directory: RunDirectory) -> Checked:
    """Refuse unusable output, storage, model and data of a run's recipe.

    Raises:
        UserError: a setting cannot be used; the message names it and the remedy.
    """
    recipe = directory.recipe
    directory.is_resumed()  # refuses a directory with other content
    base = None if recipe.model.base is None else _check_model(recipe.model.base, recipe)
    first_rows = _check_data(directory)
    if recipe.evaluation is not None:
        _check_held_out(recipe.evaluation)
    if recipe.checkpoints.storage is not None:
        storage = Storage(recipe.checkpoints.storage)
        storage.check()
        refuse_other_runs(storage, recipe)
    return Checked(base, first_rows)


def _check_model(base: str, recipe: Recipe) -> Path:
    found = inspect_model(base)
    if found.max_length is not None:
        recipe.data.check_context(found.max_length)
    if any(isinstance(stage, MarsStage) and stage.adapter is None for stage in recipe.stages):
        _check_mask_row(found)
    _check_target_modules(found, recipe)
    return found.path.absolute()  # workers run in another directory


def _check_mask_row(found: Inspection) -> None:
    """Refuse a mask token of the tokenizer's own that the embedding has no row for."""
    token_id, rows = found.mask_token_id, found.vocabulary_size
    if token_id is not None and rows is not None and token_id >= rows:
        raise UserError(
            f"model: the tokenizer of {found.path} has the mask token at {token_id}, but the "
            f"embedding has {rows} rows; take tokenizer and weights from one checkpoint"
        )


def _check_target_modules(found: Inspection, recipe: Recipe) -> None:
    """Refuse an adapter of layers that the model does not have; no earlier stage adds any."""
    for index, stage in enumerate(recipe.stages):
        adapter = stage.adapter if isinstance(stage, MarsStage) else None
        wanted = set(adapter.target_modules or ()) if adapter is not None else set()
        unknown = sorted(wanted - found.layers) if found.layers else []
        if unknown:
            raise UserError(
                f"stages.{index}.adapter.target_modules: {found.path} has no layer called "
                f"{unknown[0]!r}; it has {', '.join(sorted(found.layers))}"
            )


def _check_data(directory: RunDirectory) -> FirstRows | None:
    recipe = directory.recipe
    if directory.data.exists():
        TokenStore(directory.data)  # opening it refuses a damaged one
        return None
    first_rows = read_first_rows(find_files(recipe.data.train))
    check_format(first_rows, recipe)
    return first_rows


def _check_held_out(settings: EvaluationSettings) -> None:
    """Refuse held-out rows that are no conversations; none of them may be bad."""
    files = find_files(settings.data, "evaluation.data")
    for file in files:
        if not file.endswith(_HELD_OUT_SUFFIXES):
            raise UserError(f"evaluation.data: {file} is compressed; unpack it")
    num_rows = _check_rows(files, min(settings.max_items, _HELD_OUT_ROWS))
    if not num_rows:
        raise UserError("evaluation.data: the files hold no row; name files with conversations")


def _check_rows(files: Sequence[str], most: int) -> int:
    """Return the number of rows, or ``most``; refuse a bad one."""
    rows = ((file, *row) for file in files for row in read_rows(file))
    num_rows = 0
    for file, line, content in islice(rows, most):
        if line == 0:
            raise UserError(f"evaluation.data: {file} {content.decode()}; mend the file")
        try:
            read_answer(parse_row(content))
        except UserError as error:
            raise UserError(
                f"evaluation.data: {file}:{line}: {one_line(error)}; mend or remove the row"
            ) from error
        num_rows += 1
    return num_rows
