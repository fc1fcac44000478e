"""Runs the stages of a recipe on Ray Train, one after the other."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.data
import torch
import transformers
import yaml
from ray.train import CheckpointConfig, DataConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from rich.console import Console

from mars_platform import __version__
from mars_platform.checkpoint import locate_model, read_checkpoint, read_metadata
from mars_platform.cluster import ray_session
from mars_platform.errors import UserError
from mars_train.data import PreparedData, find_files, prepare, read_conversations
from mars_train.progress import shown_progress
from mars_train.recipe import Recipe, Stage
from mars_train.scratch import create_model
from mars_train.worker import StageJob, run_worker

MODEL_DIRECTORY = "model"


def run_recipe(recipe: Recipe, console: Console) -> Path:
    """Run every stage; what the last one trained ends up in ``output/model``.

    The recipe itself is kept in ``output/recipe.yaml``, earlier stages' checkpoints in
    ``output/stages/NAME``, the report on the data in ``output/data.json``.

    Returns:
        The directory of the final checkpoint.

    Raises:
        UserError: something the recipe names is missing, unusable or already there.
    """
    output = recipe.output.resolve()
    if output.exists() and any(output.iterdir()):
        raise UserError(f"output: {output} is not empty; name a new directory or remove it")
    base = _existing_base(recipe)
    find_files(recipe.data.train)
    output.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    (output / "recipe.yaml").write_text(text, encoding="utf-8")
    scaling = recipe.scaling
    min_cpus = int(scaling.num_workers * scaling.cpus_per_worker) + 1  # one for Ray Data
    with ray_session(recipe.cluster, min_cpus=min_cpus):
        try:
            start = base or _new_model(recipe, output, console)
            prepared = _prepare_data(recipe, start, output, console)
        except UserError:
            shutil.rmtree(output)  # nothing is trained yet: the corrected run finds it free
            raise
        for index, stage in enumerate(recipe.stages):
            last = index + 1 == len(recipe.stages)
            target = output / (MODEL_DIRECTORY if last else f"stages/{stage.name}")
            _run_stage(recipe, stage, start, prepared, target, console)
            start = target
    return start


def _existing_base(recipe: Recipe) -> Path | None:
    if recipe.model.base is None:
        return None
    path = locate_model(recipe.model.base)
    read_checkpoint(path)  # refuses what cannot be trained before anything is started
    return path


def _new_model(recipe: Recipe, output: Path, console: Console) -> Path:
    assert recipe.model.scratch is not None
    path = output / "stages" / "start"
    texts = (
        message.content
        for conversation in read_conversations(recipe.data.train)
        for message in conversation.messages
    )
    create_model(recipe.model.scratch, texts, recipe.data.max_length, path, recipe.seed)
    console.print(f"new model and tokenizer in {path}", highlight=False)
    return path


def _prepare_data(recipe: Recipe, start: Path, output: Path, console: Console) -> PreparedData:
    started = time.monotonic()
    with console.status("tokenising the training data"):
        prepared = prepare(recipe.data, start, output / "data", recipe.seed)
    report = json.dumps({**asdict(prepared), "path": str(prepared.path)}, indent=2)
    (output / "data.json").write_text(report + "\n", encoding="utf-8")
    console.print(
        f"data: {prepared.num_examples:,} conversations, {prepared.num_tokens:,} tokens, "
        f"{prepared.num_supervised:,} of them supervised; {prepared.num_truncated:,} conversations "
        f"cut to length, {len(prepared.bad_rows):,} bad rows skipped "
        f"({time.monotonic() - started:.0f} s)",
        highlight=False,
    )
    return prepared


def _run_stage(
    recipe: Recipe,
    stage: Stage,
    start: Path,
    prepared: PreparedData,
    target: Path,
    console: Console,
) -> None:
    """Train one stage and put its checkpoint into ``target``."""
    with shown_progress(console) as board:
        job = StageJob(
            recipe, stage, start, prepared.num_examples, _provenance(recipe, stage), board
        )
        if job.total_steps == 0:
            raise UserError(
                f"data.train: {prepared.num_examples} conversations do not fill one batch of "
                f"stages.{stage.name}.batch_size = {stage.batch_size}; lower it or add data"
            )
        result = _fit(job, prepared)
    assert result.checkpoint is not None
    result.checkpoint.to_directory(str(target))
    console.print(f"stage {stage.name}: checkpoint in {target}", highlight=False)
    metadata = read_metadata(target)
    if metadata is not None and metadata.provenance["embedding_grown"]:
        console.print(
            f"stage {stage.name}: the embedding had no spare row and was grown by one for the mask "
            f"token; the vocabulary is now {metadata.mask_token_id + 1}",
            highlight=False,
        )


def _fit(job: StageJob, prepared: PreparedData) -> Result:
    scaling, output = job.recipe.scaling, job.recipe.output.resolve()
    execution = ray.data.ExecutionOptions(preserve_order=True)  # the same order every time
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker={
                "CPU": scaling.cpus_per_worker,
                **({"GPU": 1} if scaling.use_gpu else {}),
            },
        ),
        run_config=RunConfig(
            name=job.stage.name,
            storage_path=str(output / "runs"),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
        datasets={"train": prepared.dataset()},
        dataset_config=DataConfig(execution_options=execution),
    )
    result: Result = trainer.fit()
    return result


def _provenance(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    return {
        "recipe": recipe.model_dump(mode="json"),
        "stage": stage.name,
        "versions": {
            "marsray": __version__,
            "ray": ray.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
