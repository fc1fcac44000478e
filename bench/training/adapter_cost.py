"""Measures a step that trains an adapter beside one that trains the whole model.

Each variant runs in a process of its own, on random conversations and a model of 100 million random
weights. Time is that of the processor, so that other work on the machine disturbs it
little; memory is the process's peak. `one-pass` computes both streams of an adapter together.

    python bench/training/adapter_cost.py [--prompt 64] [--answer 64] [--distil]
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_platform.checkpoint.adapter.layers import attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterSettings
from mars_train.method.adapted import AdapterObjective
from mars_train.method.layout import Batch, collate, lay_out, pack
from mars_train.method.objective import MaskLoss, Objective

VARIANTS = ("whole", "one-pass", "adapter")
VOCABULARY, MASK, BLOCK_SIZE = 32_000, 31_999, 8


@dataclass(frozen=True)
class Options:
    """Sizes of a step."""

    prompt: int
    answer: int
    conversations: int
    rank: int
    distil: bool
    steps: int


@dataclass(frozen=True)
class Measured:
    """Result of one variant."""

    variant: str
    num_trained: int
    cpu_s: float
    """Least seconds of a step."""
    peak_gib: float


def measure(variant: str, options: Options) -> Measured:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    objective = build_objective(variant, options)
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batch, seconds = build_batch(options), []
    for _ in range(options.steps + 1):  # the first allocates memory
        began = time.process_time()
        sums = objective(batch)
        loss = sums.noisy + sums.clean if variant == "whole" else sums.noisy
        torch.autograd.backward(loss / len(batch.labels))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Measured(variant, sum(each.numel() for each in trained), min(seconds[1:]), peak_gib)


def build_objective(variant: str, options: Options) -> Objective:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).train()
    loss = MaskLoss(teacher_weight=1.0 if options.distil else 0.0)
    if variant != "whole":
        attach_adapter(model, AdapterSettings(rank=options.rank), MASK)
    if variant == "adapter":
        return AdapterObjective(model, mask_loss=loss)
    return Objective(model, masked=True, mask_loss=loss)


def build_batch(options: Options) -> Batch:
    rng, length = np.random.default_rng(0), options.prompt + options.answer
    supervised = np.arange(length) >= options.prompt
    layouts = [
        lay_out(rng.integers(5, MASK, length), supervised, BLOCK_SIZE, MASK, int(offset))
        for offset in rng.integers(BLOCK_SIZE, size=options.conversations)
    ]
    return collate(pack(layouts, row_slots=1024), pad_token_id=0)


def main(
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations of a step.")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 32,
    distil: Annotated[bool, typer.Option(help="Learn from the clean stream alone.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Print processor seconds and peak memory of a step, for each variant."""
    options = Options(prompt, answer, conversations, rank, distil, steps)
    results = []
    for variant in VARIANTS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(measure, (variant, options)))
    if as_json:
        print(json.dumps({**asdict(options), "variants": [asdict(each) for each in results]}))
        return
    table = Table("variant", "trained", "CPU s/step", "peak GiB")
    for each in results:
        trained = f"{each.num_trained / 1e6:.1f}M"
        table.add_row(each.variant, trained, f"{each.cpu_s:.2f}", f"{each.peak_gib:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
