"""Makes the models of the varied bed: data, a start model, and stages trained without Ray."""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from bench.beds.variants import Responses, Variant
from bench.training.published import PerConversationTrainer, fill_last_block
from bench.training.quiet import Quiet

from mars_platform.checkpoint.directory import read_tokenizer
from mars_platform.cli.report import writing
from mars_platform.errors import UserError
from mars_train.data.demo import write_demo_data
from mars_train.data.encoding import encode_rows
from mars_train.data.files import read_conversations, read_rows
from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.data.varied_tasks import draw_varied
from mars_train.recipe import DataSettings, GenerateStage, MarsStage, Recipe
from mars_train.run.scratch import create_model
from mars_train.stage.job import StageJob
from mars_train.stage.parallel import Workers
from mars_train.stage.responses import generate_responses
from mars_train.stage.trainer import MODEL, StageTrainer

AR = "ar"
"""Name of the AR checkpoint, which all variants of all seeds continue from."""
MAX_TOKENS = 160
"""Most tokens of an output; those of the data have fewer."""
TEMPERATURES: dict[Responses, list[float]] = {
    "greedy": [0.0],
    "sampled": [1.0],
    "mixed": [0.0, 1.0],
}
"""Temperatures of each kind of responses."""
RECIPE = Path(__file__).parents[1] / "recipes" / "varied.yaml"


@dataclass(frozen=True)
class Sizes:
    """Numbers that make a bed smaller, for a trial; None leaves those of the recipe."""

    examples: int = 40_000
    """Training conversations."""
    items: int = 300
    """Held-out conversations."""
    responses: int = 8_000
    """Training prompts that the AR checkpoint responds to, for variants that train on responses."""
    ar_steps: int | None = None
    """Steps of stage ar."""
    mars_steps: int | None = None
    """Steps of today's stage mars; those of a variant are a multiple of it."""


class Bed:
    """The directory of a bed: its data, start models, checkpoints and results."""

    def __init__(self, work: Path, sizes: Sizes) -> None:
        self.work = work
        self.sizes = sizes

    @property
    def held_out(self) -> Path:
        """File of the held-out conversations."""
        return self.work / "data/eval.jsonl"

    @property
    def tokens(self) -> Path:
        """Token store of the training conversations as they were drawn."""
        return self.work / "tokens"

    @property
    def filled_tokens(self) -> Path:
        """Token store of the same conversations, filled up with end tokens."""
        return self.work / "tokens-filled"

    @property
    def start(self) -> Path:
        """Directory of the untrained model."""
        return self.work / "start"

    @property
    def ar_model(self) -> Path:
        """Directory of the AR checkpoint."""
        return self.model(0, AR)

    def model(self, seed: int, name: str) -> Path:
        """Return the directory of a seed's trained model."""
        return self.storage(seed, name) / MODEL

    def storage(self, seed: int, name: str) -> Path:
        """Return the directory of a training run's checkpoints."""
        return self.work / "models" / f"seed{seed}-{name}"

    def recipe(self, seed: int = 0) -> Recipe:
        """Return the bed's recipe with both stages."""
        return Recipe.model_validate(self._settings(seed))

    def _settings(self, seed: int) -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
        content["data"]["train"] = [str(self.work / "data/train.jsonl")]
        content |= {"output": str(self.work), "seed": seed}
        content["checkpoints"] = {"every_steps": 1_000}
        for each, steps in zip(
            content["stages"], (self.sizes.ar_steps, self.sizes.mars_steps), strict=True
        ):
            each["max_steps"] = steps or each["max_steps"]
        return content

    @property
    def window(self) -> int:
        """Masks of a step when models are scored: the block size of the recipe's stage mars."""
        stage = self.recipe().stages[1]
        assert isinstance(stage, MarsStage)
        return stage.block_sizes[-1]

    def train_ar(self) -> dict[str, Any]:
        """Train the AR checkpoint, and return the time that it took."""
        stage = self._settings(0)["stages"][0]
        return self._train(0, AR, stage, self.start, tokens=self.tokens)

    def stage_of(self, variant: Variant) -> dict[str, Any]:
        """Return the settings of a variant's stage."""
        stage: dict[str, Any] = self._settings(0)["stages"][1]
        return stage | {"max_steps": round(stage["max_steps"] * variant.steps), **variant.stage}

    def recipe_of(self, seed: int, stage: dict[str, Any], start: Path) -> Recipe:
        """Return the recipe of one stage that continues from a model."""
        own = {"model": {"base": str(start)}, "stages": [stage]}
        return Recipe.model_validate(self._settings(seed) | own)

    def train_variant(self, seed: int, variant: Variant) -> dict[str, Any]:
        """Train a variant from the AR checkpoint, and return the time that it took."""
        responses = None
        if variant.responses is not None:
            responses = self.responses(variant.responses)
        filled = variant.convention == "end-filling"
        return self._train(
            seed,
            variant.name,
            self.stage_of(variant),
            self.ar_model,
            tokens=self.filled_tokens if filled else self.tokens,
            responses=responses,
            trainer=PerConversationTrainer
            if variant.convention == "per-conversation"
            else StageTrainer,
        )

    def _train(
        self,
        seed: int,
        name: str,
        stage: dict[str, Any],
        start: Path,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Train one stage, unless its model is there; its time is kept beside it."""
        storage = self.storage(seed, name)
        seconds = storage / "seconds.json"
        if not seconds.exists():
            used = train(self.recipe_of(seed, stage, start), start, storage, **kwargs)
            seconds.write_text(json.dumps(used))
        return {"train": json.loads(seconds.read_text())}

    def responses(self, kind: Responses) -> Path:
        """Return the directory of responses that the AR checkpoint wrote."""
        return self.work / "responses" / kind

    def generate(self, kind: Responses) -> None:
        """Write responses of the AR checkpoint to training prompts, unless they are there."""
        out = self.responses(kind)
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            data = TokenStore(self.tokens)
            stage = GenerateStage(
                objective="generate",
                temperature=TEMPERATURES[kind],
                max_tokens=MAX_TOKENS,
                max_responses=self.sizes.responses,
                max_num_seqs=64,
            )
            max_length = self.recipe().data.max_length
            generate_responses(self.ar_model, data, stage, max_length, out)

    def make_ready(self) -> None:
        """Make data, tokens and the start model, unless they are there.

        Raises:
            UserError: the directory has other data or was run with other steps, or cannot be
                written.
        """
        data = self.work / "data"
        if data.exists():
            self._check_data()
        else:
            unfinished = self.work / "data.partial"
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
            with writing(self.work):
                unfinished.mkdir(parents=True)
            sizes = self.sizes
            write_demo_data(
                unfinished, draw_varied, num_train=sizes.examples, num_eval=sizes.items, seed=0
            )
            unfinished.rename(data)
        self._check_steps()
        recipe = self.recipe()
        assert recipe.model.scratch is not None
        if not self.start.exists():
            unfinished = self.work / "start.partial"
            conversations = read_conversations(recipe.data.train)
            texts = (message.content for talk in conversations for message in talk.messages)
            create_model(recipe.model.scratch, texts, recipe.data.max_length, unfinished, seed=0)
            unfinished.rename(self.start)
        if not self.tokens.exists():
            store_tokens(recipe.data, self.start, self.tokens)
        if not self.filled_tokens.exists():
            fill_last_block(
                TokenStore(self.tokens),
                self.filled_tokens,
                block_size=self.window,
                end_token=read_tokenizer(self.start).eos_token_id,
                max_length=recipe.data.max_length,
            )

    def _check_steps(self) -> None:
        """Refuse other numbers of steps than those of the results, and note them for later."""
        now = [each["max_steps"] for each in self._settings(0)["stages"]]
        file = self.work / "steps.json"
        if not file.exists():
            file.write_text(json.dumps(now))
        if (before := json.loads(file.read_text())) != now:
            raise UserError(
                f"WORK: {self.work} was run with {before[0]} steps of stage ar and {before[1]} of "
                f"stage mars, not {now[0]} and {now[1]}; name another directory, or give "
                "--ar-steps and --mars-steps as before"
            )

    def _check_data(self) -> None:
        """Refuse data of another generator or in other numbers."""
        lines = [_lines(self.work / "data" / name) for name in ("train.jsonl", "eval.jsonl")]
        first = draw_varied(random.Random(0)).row()  # the first task is held out
        if [*map(len, lines)] != [self.sizes.examples, self.sizes.items] or (
            lines[1][0] != json.dumps(first)
        ):
            raise UserError(
                f"WORK: {self.work} has data that is not this bed's with {self.sizes.examples} "
                f"training conversations and {self.sizes.items} held-out ones; name another "
                "directory, or give --examples and --items as before"
            )


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def store_tokens(data: DataSettings, tokenizer: Path, out: Path) -> None:
    """Tokenise conversations into a store, as ``marsray train`` does, in this process."""
    with TokenStoreWriter(out) as writer:
        for file, name in enumerate(data.train):
            lines = [
                {"file": file, "line": line, "content": content}
                for line, content in read_rows(name)
            ]
            table = encode_rows(
                pa.Table.from_pylist(lines), str(tokenizer), data.loss_on, data.max_length
            )
            assert set(table["status"].to_pylist()) == {"used"}, "every conversation fits"
            writer.append(
                keys=np.stack([table["file"].to_numpy(), table["line"].to_numpy()], axis=1),
                lengths=pc.list_value_length(table["input_ids"]).to_numpy(),
                tokens=pc.list_flatten(table["input_ids"]).to_numpy(),
                supervised=pc.list_flatten(table["supervised"]).to_numpy(),
            )
        writer.finish()


def train(
    recipe: Recipe,
    start: Path,
    storage: Path,
    *,
    tokens: Path,
    responses: Path | None = None,
    trainer: type[StageTrainer] = StageTrainer,
) -> dict[str, float]:
    """Train the recipe's only stage on one thread; return wall-clock and CPU seconds."""
    began, began_cpu = time.perf_counter(), _cpu_seconds()
    job = StageJob(
        recipe=recipe,
        stage=recipe.trained_stages[0],
        storage=str(storage),
        start=str(start),
        data=str(tokens),
        held_out=None,
        provenance={},
        responses=None if responses is None else str(responses),
    )
    trainer(job, Workers("ddp", use_gpu=False, precision="no"), Quiet()).run()
    return {"wall_s": time.perf_counter() - began, "cpu_s": _cpu_seconds() - began_cpu}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
