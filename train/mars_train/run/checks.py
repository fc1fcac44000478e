"""Refuses what a run cannot use before anything slow begins.

Whatever is refused here would be refused as well later on, by a worker at the latest. Imports no
Ray or torch.
"""

from importlib.util import find_spec
from pathlib import Path

from mars_platform.checkpoint.inspection import Inspection, inspect_model
from mars_platform.data.files import find_files
from mars_platform.errors import UserError
from mars_train.data.token_store import TokenStore
from mars_train.recipe import ArStage, MarsStage, Recipe
from mars_train.run.run_directory import RunDirectory
from mars_train.stage.stored_state import refuse_other_runs
from mars_train.storage.directories import Storage


def check_before_start(directory: RunDirectory) -> Path | None:
    """Refuse unusable output, storage and model of a run's recipe, and data that is missing.

    Returns the directory of the model to start from, None for a new one.

    Raises:
        UserError: a setting cannot be used; the message names it and the remedy.
    """
    recipe = directory.recipe
    directory.is_resumed()  # refuses a directory with other content
    _check_trackers(recipe)
    _check_quantization(recipe)
    base = None if recipe.model.base is None else _check_model(recipe.model.base, recipe)
    if directory.data.exists():
        TokenStore(directory.data)  # opening it refuses a damaged one
    else:
        find_files(recipe.data.train)
    if recipe.evaluation is not None:
        find_files(recipe.evaluation.data, "evaluation.data")
    if recipe.checkpoints.storage is not None:
        storage = Storage(recipe.checkpoints.storage)
        storage.check()
        refuse_other_runs(storage, recipe)
    return base


def _check_trackers(recipe: Recipe) -> None:
    modules = {"tensorboard": "tensorboardX"}  # which Ray Train brings
    for name in recipe.tracking.to if recipe.tracking is not None else ():
        if find_spec(modules.get(name, name)) is None:
            raise UserError(f"tracking.to: {name} is not installed; run pip install {name}")


def _check_model(base: str, recipe: Recipe) -> Path:
    found = inspect_model(base)
    if found.max_length is not None:
        recipe.data.check_context(found.max_length)
    if any(isinstance(stage, MarsStage) and stage.adapter is None for stage in recipe.stages):
        _check_mask_row(found)
    if recipe.begins_with_head and found.mask_token_id is None:
        raise UserError(
            f"model.base: {found.path} has no masks beside which a head could be trained alone; "
            "give a MARS checkpoint, or put a stage of objective mars with train: all first"
        )
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
        for key in ("adapter", "lora"):
            settings = getattr(stage, key, None)
            wanted = set(settings.target_modules or ()) if settings is not None else set()
            unknown = sorted(wanted - found.layers) if found.layers else []
            if unknown:
                raise UserError(
                    f"stages.{index}.{key}.target_modules: {found.path} has no layer called "
                    f"{unknown[0]!r}; it has {', '.join(sorted(found.layers))}"
                )


def _check_quantization(recipe: Recipe) -> None:
    for index, stage in enumerate(recipe.stages):
        lora = stage.lora if isinstance(stage, ArStage | MarsStage) else None
        if lora is not None and lora.quantization and find_spec("bitsandbytes") is None:
            raise UserError(
                f"stages.{index}.lora.quantization: {lora.quantization} needs bitsandbytes; "
                "install marsray[qlora] on every node, or leave it out"
            )
