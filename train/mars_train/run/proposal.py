"""Proposes a recipe for a model, its data and the hardware at hand, and estimates the run.

Memory of a worker that trains the whole model is 16 bytes for each weight: float32 weights,
gradients and both moments of AdamW. An adapter leaves 4, the frozen weights, and next to nothing
beside. Activations take what is left, so that a fifth more is asked for. A token that goes through
the model forwards and backwards costs 6 operations for each weight that it is multiplied with
(Kaplan et al. 2020, arXiv 2001.08361, section 2.1), or 4 if the weights are frozen; training
reaches about half of the speed of large products, which is measured. Imports no Ray.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import yaml

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.inspection import check_weights
from mars_platform.checkpoint.number_type import is_bfloat16_slow
from mars_platform.config import build_settings
from mars_platform.data.files import find_files, read_checked_rows
from mars_platform.errors import UserError
from mars_train.data.check import DataCheck, check_data
from mars_train.recipe import DataSettings, Recipe

_HELD_OUT = re.compile(r"(?:^|[-_.])(eval|valid|validation|val|dev|test|held-?out)(?:[-_.]|$)")
_BYTES_WHOLE, _BYTES_FROZEN, _ROOM = 16, 4, 1.2
_TOKENS_AT_ONCE = {"cuda": 16_384, "cpu": 4_096}
_LEAST_CONVERSATIONS, _MOST_CONVERSATIONS, _STEPS_AN_EPOCH, _EPOCHS = 8, 384, 32, 3
_REACHED = 0.5
"""Share of the speed of large products that training reaches."""
_GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """Devices to train on, of one kind."""

    kind: Literal["cuda", "cpu"]
    name: str
    num_devices: int
    memory: int
    precision: Literal["bf16", "no"]
    speed: float
    """Operations a second of one device, in products of large matrices."""

    @classmethod
    def here(cls) -> Hardware:
        """Return this machine's GPUs, or its CPU, with a speed that is measured in a second."""
        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
            name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
            return cls("cuda", name, count, memory, "bf16", _speed("cuda", torch.bfloat16))
        slow = is_bfloat16_slow()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = f"a CPU with {torch.get_num_threads()} cores"
        speed = _speed("cpu", torch.float32 if slow else torch.bfloat16)
        return cls("cpu", name, 1, memory, "no" if slow else "bf16", speed)


def _speed(device: str, dtype: torch.dtype) -> float:
    size = 8192 if device == "cuda" else 1024
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


@dataclass(frozen=True)
class Proposal:
    """A recipe as commented YAML, and what the run is expected to take."""

    text: str
    estimate: list[str]


def propose(model: str, files: Sequence[str], hardware: Hardware) -> Proposal:
    """Propose a recipe for a model, a directory or hub id, and files of conversations.

    Files whose names say so (eval, valid, dev, test, held-out) become the held-out data.

    Raises:
        UserError: model or data cannot be trained, or the model is too large for this machine.
    """
    checkpoint = read_checkpoint(model)
    held_out = [f for f in files if _HELD_OUT.search(Path(f).name.lower()) and "://" not in f]
    train = [file for file in files if file not in held_out] or list(files)
    settings = DataSettings(
        train=train, max_length=checkpoint.max_length, loss_on=_supervised_turns(train)
    )
    found = check_data(settings, checkpoint, None)
    if found.refusals:
        raise UserError(found.refusals[0])
    shapes = check_weights(checkpoint.path)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    size = _Size(num_weights, num_weights - _looked_up(shapes))
    length = _length(found, checkpoint.max_length)
    plan = _Plan.fitting(size, hardware)
    rows = found.counts.num_examples
    wanted = max(_LEAST_CONVERSATIONS, min(_MOST_CONVERSATIONS, rows // _STEPS_AN_EPOCH))
    batch = max(plan.num_workers, min(wanted, rows))
    mean = max(1.0, float(np.minimum(found.lengths, length).mean()))
    at_once = min(-(-batch // plan.num_workers), int(_TOKENS_AT_ONCE[hardware.kind] / (2 * mean)))
    text = _TEMPLATE.format(
        model=json.dumps(model),
        train=json.dumps(train),
        loss_on=settings.loss_on,
        max_length=length,
        over=int((np.array(found.lengths) > length).sum()),
        rows=rows,
        stages=plan.stages(batch, max(1, at_once)),
        evaluation=_evaluation(held_out),
        num_workers=plan.num_workers,
        use_gpu=str(hardware.kind == "cuda").lower(),
        strategy=plan.strategy,
        precision=hardware.precision,
        output=json.dumps(f"{Path(model).name}-mars"),
    )
    build_settings(yaml.safe_load(text), Recipe, source="the proposed recipe")
    tokens = int(np.minimum(found.lengths, length).sum())
    return Proposal(text, [f"data: {found.counts.recognised}", *plan.estimate(tokens, hardware)])


def _supervised_turns(files: list[str]) -> Literal["last", "all"]:
    """Return "all" if most of the first conversations have several turns of the assistant."""
    rows = islice(read_checked_rows(find_files(files), "DATA"), 200)
    counts = [sum(turn.role == "assistant" for turn in row.messages) for _, row, _ in rows]
    return "all" if sum(count > 1 for count in counts) * 2 > len(counts) else "last"


def _looked_up(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the weights of an embedding that is not the output layer as well."""
    if not any(name.endswith("lm_head.weight") for name in shapes):
        return 0
    return sum(math.prod(s) for name, s in shapes.items() if "embed_tokens.weight" in name)


def _length(found: DataCheck, context: int) -> int:
    """Return a limit that 99 of 100 conversations are within, a multiple of 64."""
    needed = float(np.percentile(found.lengths, 99))
    return min(context, 64 * math.ceil(needed / 64))


def _evaluation(held_out: list[str]) -> str:
    if held_out:
        return f"evaluation: {{data: {json.dumps(held_out)}}}  # scored while the model is trained"
    return "# evaluation: {data: [held-out.jsonl]}  # keep some conversations apart to score them"


@dataclass(frozen=True)
class _Size:
    num_weights: int
    num_multiplied: int
    """Weights that each token is multiplied with."""


@dataclass(frozen=True)
class _Plan:
    """The way in which a model of a size is trained."""

    size: _Size
    is_whole: bool
    """Whether all weights are trained; otherwise adapters are."""
    num_workers: int
    strategy: Literal["ddp", "fsdp2"]

    @classmethod
    def fitting(cls, size: _Size, hardware: Hardware) -> _Plan:
        workers = hardware.num_devices
        needed = size.num_weights * _ROOM
        if needed * _BYTES_WHOLE <= hardware.memory:
            return cls(size, True, workers, "ddp")
        if needed * _BYTES_WHOLE <= hardware.memory * workers and workers > 1:
            return cls(size, True, workers, "fsdp2")
        if needed * _BYTES_FROZEN <= hardware.memory:
            return cls(size, False, workers, "ddp")
        raise UserError(
            f"--init: {size.num_weights / 1e9:.1f}B weights need "
            f"{needed * _BYTES_FROZEN / _GIB:.0f} GiB even where adapters are trained, and "
            f"{hardware.name} has {hardware.memory / _GIB:.0f}; take a larger machine or a smaller "
            "model"
        )

    def stages(self, batch: int, at_once: int) -> str:
        sizes = f"epochs: {_EPOCHS}, batch_size: {batch}, micro_batch_size: {at_once}"
        if self.is_whole:  # small models take larger steps
            rate = 1e-5 * (1e9 / self.size.num_weights) ** 0.5
            return _WHOLE.format(sizes=f"{sizes}, learning_rate: {rate:.1e}")
        return _ADAPTERS.format(sizes=sizes)

    def estimate(self, tokens: int, hardware: Hardware) -> list[str]:
        """Return lines on tokens, memory and time.

        An epoch of stage ar is one stream of tokens, of stage mars two, with responses three.
        """
        costs, streams = (6, 3) if self.is_whole else (4, 2)
        answers = 2 if self.is_whole else 0  # as long as training on them twice, once
        work = tokens * (_EPOCHS * (1 + streams) + answers) * costs * self.size.num_multiplied
        hours = work / (hardware.speed * _REACHED * hardware.num_devices) / 3600
        of_each = _BYTES_WHOLE if self.is_whole else _BYTES_FROZEN
        parts = self.num_workers if self.strategy == "fsdp2" else 1
        memory = self.size.num_weights * of_each * _ROOM / parts / _GIB
        many = f"{hardware.num_devices} x " if hardware.num_devices > 1 else ""
        return [
            f"{tokens:,} tokens an epoch, {_EPOCHS} epochs a stage",
            f"{memory:.1f} GiB of memory a worker, of {hardware.memory / _GIB:.0f}, for "
            f"{self.size.num_weights / 1e6:,.0f}M weights",
            f"about {_duration(hours)} on {many}{hardware.name}, at half of the "
            f"{hardware.speed / 1e12:.2g} TFLOP/s measured here",
        ]


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{math.ceil(60 * hours)} min"


_WHOLE = """\
  # learns the data; leave it out if the model is fine-tuned on it already
  - {{objective: ar, {sizes}}}
  # writes the model's own answers, from which masks learn best
  - {{objective: generate, temperature: [0, 1]}}
  # learns to predict several tokens a pass, and keeps what it knows
  - {{objective: mars, block_size: [2, 4], responses: generate, {sizes}}}"""
_ADAPTERS = """\
  # the whole model does not fit: LoRA learns the data and is merged into the weights
  - {{objective: ar, lora: {{rank: 16, alpha: 32}}, {sizes}}}
  # learns to predict several tokens a pass in a draft adapter, served beside the model
  - {{objective: mars, block_size: 4, adapter: {{}}, {sizes}}}"""
_TEMPLATE = """\
# Train with: marsray train THIS-FILE. Every setting: docs/guides/train.md, or --set KEY=VALUE.
model: {{base: {model}}}
data:
  train: {train}
  loss_on: {loss_on}  # last supervises the last answer of a conversation, all every one
  max_length: {max_length}  # tokens; {over:,} of {rows:,} conversations are longer and are cut
stages:
{stages}
{evaluation}
scaling: {{num_workers: {num_workers}, use_gpu: {use_gpu}, strategy: {strategy}}}
precision: "{precision}"
# tracking: {{to: [tensorboard]}}  # or wandb, mlflow, trackio
output: {output}  # the same command resumes an unfinished run in it
"""
