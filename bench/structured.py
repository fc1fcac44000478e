"""Outputs under a grammar: whether all of them are valid, and what a token of theirs costs.

    python bench/structured.py MODEL --data eval.jsonl

Every mode decodes the same prompts, greedily and sampled, under a JSON schema and, for comparison,
for as many tokens without it.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from jsonschema import Draft202012Validator
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.api.text import decode
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, GrammarKind, GrammarSpec, Request, Sampling
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.scoring import EvalItem, read_items

_SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 9999},
        "sure": {"enum": ["yes", "no"]},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def _engine(checkpoint: Checkpoint, batch: int) -> Engine:
    pages = batch * -(-checkpoint.max_length // 16)
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=batch, num_pages=pages))
    engine.warm_up()
    return engine


def _run(
    engine: Engine, items: list[EvalItem], options: DecodingOptions, lengths: list[int] | None
) -> tuple[list[list[int]], int, float]:
    """Outputs, passes and seconds."""
    requests = []
    for index, item in enumerate(items):
        own = replace(options, sampling=replace(options.sampling, seed=index))
        if lengths is not None:
            own = replace(own, max_tokens=lengths[index])
        requests.append(Request(str(index), list(item.prompt), own))
    for request in requests:
        engine.add(request)
    num_passes, begin = 0, time.perf_counter()
    while engine.has_work:
        num_passes += len(engine.step())
    seconds = time.perf_counter() - begin
    return [r.tokens[r.num_prompt :] for r in requests], num_passes, seconds


def _is_valid(text: str) -> bool:
    try:
        return bool(Draft202012Validator(_SCHEMA).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


def main(
    model: str,
    data: Annotated[Path, typer.Option(help="Conversations, JSONL or Parquet.")],
    num_items: Annotated[int, typer.Option(min=1)] = 200,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    temperature: Annotated[float, typer.Option()] = 0.8,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(model)
    length = checkpoint.max_length
    items = read_items([data], checkpoint.tokenizer, max_length=length, max_items=num_items)
    room = length - max(len(item.prompt) for item in items)
    engine = _engine(checkpoint, batch)
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    table = Table(
        *("mode", "temperature", "valid", "as ar", "tokens", "tok/fwd", "ms a token", "without"),
        title=f"{len(items)} outputs under a JSON schema, batch {batch}",
    )
    for value in (0.0, temperature):
        expected: list[list[int]] = []
        for mode in (Mode.AR, Mode.EXACT, Mode.THRESHOLD):
            options = DecodingOptions(room, mode, sampling=Sampling(value), grammar=grammar)
            outputs, num_passes, seconds = _run(engine, items, options, None)
            expected = expected or outputs
            num_tokens = sum(map(len, outputs))
            lengths = [len(output) for output in outputs]
            free, _, free_s = _run(engine, items, replace(options, grammar=None), lengths)
            valid = sum(_is_valid(decode(checkpoint.tokenizer, output)) for output in outputs)
            table.add_row(
                mode,
                f"{value:g}",
                f"{valid} of {len(outputs)}",
                f"{sum(a == b for a, b in zip(outputs, expected, strict=True))}",
                f"{num_tokens:,}",
                f"{num_tokens / num_passes:.2f}",
                f"{seconds / num_tokens * 1e3:.2f}",
                f"{free_s / sum(map(len, free)) * 1e3:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
