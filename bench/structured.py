"""Checks outputs under a grammar, and measures what the grammar costs per token.

    python -m bench.structured MODEL --data eval.jsonl

Every mode decodes the same prompts, greedily and sampled, under a JSON schema. For comparison it
decodes them again without the schema, for as many tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.engine_runs import decode, settings_for, warm_engine
from jsonschema import Draft202012Validator
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.api.text import decode as decode_text
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    GrammarKind,
    GrammarSpec,
    Sampling,
)
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.items import EvalItem, read_items

_SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 9999},
        "sure": {"enum": ["yes", "no"]},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def _requests(items: list[EvalItem], options: DecodingOptions, lengths: list[int]) -> list[Request]:
    """Return one request per item, with its own seed and at most ``lengths[i]`` tokens."""
    sampling = options.sampling
    return [
        Request(
            str(index),
            list(item.prompt),
            replace(options, sampling=replace(sampling, seed=index), max_tokens=length),
        )
        for index, (item, length) in enumerate(zip(items, lengths, strict=True))
    ]


def _is_valid(text: str) -> bool:
    try:
        return bool(Draft202012Validator(_SCHEMA).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    data: Annotated[Path, typer.Option(help="Conversations, JSONL or Parquet.")],
    num_items: Annotated[int, typer.Option(min=1, help="Conversations to decode.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 8,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled runs.")] = 0.8,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Print how many outputs are valid, and the time per token with and without the schema."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(model)
    length = checkpoint.max_length
    items = read_items([data], checkpoint.tokenizer, max_length=length, max_items=num_items)
    max_tokens = length - max(len(item.prompt) for item in items)
    engine = warm_engine(checkpoint, settings_for(checkpoint, batch))
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    table = Table(
        *("mode", "temperature", "valid", "as ar", "tokens", "tok/fwd", "ms a token", "without"),
        title=f"{len(items)} outputs under a JSON schema, batch {batch}",
    )
    for value in (0.0, temperature):
        expected: list[list[int]] = []
        for mode in (Mode.AR, Mode.EXACT, Mode.THRESHOLD):
            options = DecodingOptions(max_tokens, mode, sampling=Sampling(value), grammar=grammar)
            run = decode(engine, _requests(items, options, [max_tokens] * len(items)))
            lengths = [len(output) for output in run.outputs]
            free = decode(engine, _requests(items, replace(options, grammar=None), lengths))
            expected = expected or run.outputs
            valid = sum(_is_valid(decode_text(checkpoint.tokenizer, each)) for each in run.outputs)
            table.add_row(
                mode,
                f"{value:g}",
                f"{valid} of {len(run.outputs)}",
                f"{sum(a == b for a, b in zip(run.outputs, expected, strict=True))}",
                f"{run.num_tokens:,}",
                f"{run.tokens_per_forward:.2f}",
                f"{1e3 / run.tokens_per_s:.2f}",
                f"{1e3 / free.tokens_per_s:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
