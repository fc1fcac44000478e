"""Measures a MARS checkpoint on real text: what its masks know, and how fast it is for that.

    python -m bench.beds.code MODEL --data eval.jsonl [--adapter DIR]

Greedy and sampled outputs are told apart, and for each the share that ends in a loop: loops are
easy to draft, so that they make tokens a pass look better than they are. Tokens a pass are those of
mode exact with all masks for every outcome; they depend on no clock. The speed is that of the
engine with its own choice of drafts: all ways to decode take the same prompts in turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.beds.command import telling_mistakes
from bench.beds.report import markdown
from bench.beds.scores import conversation_rows, distributions, drafting
from bench.engine_runs import EngineRun, decode, settings_for, warm_engine

from mars_platform.checkpoint.adapter.adapted import load_weights, read_model
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.cli.report import check_output_files, write_json
from mars_platform.data.conversations import Conversation
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import ratio_of_totals
from mars_serve.cli.options import Dtype
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import (
    DecodingSetting,
    device_and_dtype,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_train.data.files import read_conversations

TEMPERATURES = (0.0, 0.7, 1.0)
_BATCH = 16
_MAX_PERIOD, _MIN_REPEATS, _MIN_LOOP = 32, 3, 24


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return whether an output ends with the same tokens over and over.

    A loop is a sequence of at most `_MAX_PERIOD` tokens that comes `_MIN_REPEATS` times or more and
    makes up the last `_MIN_LOOP` tokens or more.
    """
    for period in range(1, min(_MAX_PERIOD, len(tokens) // _MIN_REPEATS) + 1):
        length = max(period * _MIN_REPEATS, _MIN_LOOP)
        end = tokens[-length:]
        if length <= len(tokens) and all(
            one == other for one, other in zip(end, end[period:], strict=False)
        ):
            return True
    return False


def measure(
    model: str,
    data: Path,
    *,
    num_items: int,
    max_tokens: int,
    num_timed: int,
    rounds: int,
    batches: Sequence[int],
    dtype: str,
    num_lookup_drafts: int = 0,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Return all figures of a checkpoint, or of a model with an adapter, as JSON.

    Likelihood and outputs are those of float32; the speed is that of ``dtype``.

    Raises:
        UserError: the model or the data is unusable, or the model is a plain AR checkpoint.
    """
    checkpoint = read_model(model, adapter)
    if checkpoint.metadata is None:
        raise UserError(f"MODEL: {model} is a plain AR checkpoint; name one that knows masks")
    items = read_items(
        [data], checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=num_items
    )
    if max(batches) > len(items):
        raise UserError(f"--batch: {max(batches)} is more than the {len(items)} conversations")
    conversations = list(read_conversations([str(data)]))
    return {
        "model": str(checkpoint.path),
        "adapter": None if adapter is None else str(adapter),
        "block_size": checkpoint.metadata.block_size,
        "num_items": len(items),
        "num_lookup_drafts": num_lookup_drafts,
        "dtype": dtype,
        "likelihood": likelihood(checkpoint, conversations),
        "outputs": {
            f"{temperature:g}": output_figures(checkpoint, items, temperature, max_tokens)
            for temperature in TEMPERATURES
        },
        "speed": [
            {"batch": batch, **found}
            for batch in batches
            for found in speeds(
                engines(checkpoint, batch, getattr(torch, dtype), num_lookup_drafts),
                items[: max(num_timed, batch)],
                max_tokens,
                rounds,
            )
        ],
    }


def likelihood(checkpoint: Checkpoint, conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the AR loss of held-out responses in nats per token, and in bits per byte of text."""
    model = load_weights(checkpoint, dtype=torch.float32)
    found = distributions(model, model, conversation_rows(checkpoint, conversations))
    num_bytes = sum(len(each.messages[-1].content.encode()) for each in conversations)
    nats = sum(found["loss"])
    return {
        "nats_per_token": nats / sum(found["labels"]),
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "entropy_per_token": sum(found["entropy"]) / sum(found["labels"]),
    }


def output_figures(
    checkpoint: Checkpoint, items: Sequence[EvalItem], temperature: float, max_tokens: int
) -> dict[str, Any]:
    """Return agreement and tokens a pass over one-token outputs at a temperature."""
    engine = evaluation_engine(checkpoint, items, max_tokens=max_tokens, max_num_seqs=_BATCH)
    setting = DecodingSetting(Mode.AR, 1.0, sampling=Sampling(temperature=temperature))
    outputs = run_setting(engine, items, setting, max_tokens=max_tokens)
    model = load_weights(checkpoint, dtype=torch.float32)
    found = drafting(checkpoint, model, items, outputs, temperature)
    loops = [ends_in_loop(output.tokens) for output in outputs]
    return found | {"ends_in_loop": loops}


def engines(
    checkpoint: Checkpoint, batch: int, dtype: torch.dtype, num_lookup_drafts: int
) -> dict[str, Engine]:
    """Return an engine for each kind of drafts, with room for a batch."""
    settings = settings_for(checkpoint, batch)
    drafts = {"masks": 0, "masks and text": num_lookup_drafts}
    return {
        name: warm_engine(
            checkpoint, settings.model_copy(update={"num_lookup_drafts": most}), dtype=dtype
        )
        for name, most in drafts.items()
        if most or name == "masks"
    }


def speeds(
    engines: dict[str, Engine], items: Sequence[EvalItem], max_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Return tokens a second of each way to decode at each temperature, and its speed over ar.

    The ways take turns; a ratio compares two runs of one round, and the median of all rounds is
    returned with the least and the largest ratio.
    """
    ways = [(Mode.AR, "masks"), *((Mode.EXACT, drafts) for drafts in engines)]
    found = []
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature=temperature)
        runs: list[list[EngineRun]] = []
        for turn in range(rounds + 1):
            runs.append([])
            for mode, drafts in ways:
                options = DecodingOptions(max_tokens, mode, sampling=sampling)
                requests = [
                    _request(f"{mode}-{turn}-{each.index}", each, options) for each in items
                ]
                runs[-1].append(decode(engines[drafts], requests))
        timed = runs[1:]  # the first round shows the engines how much is accepted
        found += [
            {"temperature": temperature, "mode": str(mode)}
            | {"drafts": drafts if mode is Mode.EXACT else "none"}
            | _compared([each[way] for each in timed], [each[0] for each in timed])
            for way, (mode, drafts) in enumerate(ways)
        ]
    return found


def _compared(ours: Sequence[EngineRun], theirs: Sequence[EngineRun]) -> dict[str, Any]:
    """Return the speed of runs, beside that of others which they took turns with."""
    ratios = [
        one.tokens_per_s / other.tokens_per_s for one, other in zip(ours, theirs, strict=True)
    ]
    return {
        "tokens_per_s": statistics.median(each.tokens_per_s for each in ours),
        "over_ar": [statistics.median(ratios), min(ratios), max(ratios)],
        "tokens_per_pass": ours[-1].tokens_per_forward,
    }


def _request(name: str, item: EvalItem, options: DecodingOptions) -> Request:
    sampling = replace(options.sampling, seed=item.index)
    return Request(name, list(item.prompt), replace(options, sampling=sampling))


def tables(found: dict[str, Any]) -> str:
    """Return the figures as Markdown tables."""
    fit = found["likelihood"]
    depths = [f"depth {depth + 1}, %" for depth in range(found["block_size"])]
    outputs, timed = [], []
    for temperature, each in found["outputs"].items():
        agreed = [
            f"{100 * right / drafts:.1f}"
            for right, drafts in zip(each["right"], each["drafts"], strict=True)
        ]
        loops = each["ends_in_loop"]
        kept = [index for index, loop in enumerate(loops) if not loop]
        row = [_name(temperature), _tokens_a_pass(each, range(len(loops)))]
        row += [_tokens_a_pass(each, kept), f"{100 * statistics.mean(loops):.1f}"]
        outputs.append([*row, f"{statistics.mean(each['tokens']):.0f}", *agreed])
    for each in found["speed"]:
        median, low, high = each["over_ar"]
        row = [_name(each["temperature"]), each["batch"], each["mode"], each["drafts"]]
        row += [f"{each['tokens_per_s']:.0f}", f"{median:.2f} ({low:.2f}-{high:.2f})"]
        timed.append([*row, f"{each['tokens_per_pass']:.2f}"])
    return "\n\n".join(
        [
            f"AR likelihood: {fit['nats_per_token']:.3f} nats a token, "
            f"{fit['bits_per_byte']:.3f} bits a byte.",
            markdown(
                ["outputs", "tokens a pass", "without loops", "loops, %", "mean tokens", *depths],
                outputs,
            ),
            markdown(
                [found["dtype"], "batch", "mode", "drafts", "tokens/s", "over ar", "tokens a pass"],
                timed,
            ),
        ]
    )


def _name(temperature: str | float) -> str:
    return "greedy" if float(temperature) == 0 else f"at temperature {temperature}"


def _tokens_a_pass(found: dict[str, Any], indices: Sequence[int]) -> str:
    if not indices:
        return "none"
    tokens, passes = ([found[key][index] for index in indices] for key in ("tokens", "passes"))
    rate = ratio_of_totals(tokens, passes)
    return f"{rate.value:.3f} ({rate.low:.3f}-{rate.high:.3f})"


def main(
    model: Annotated[str, typer.Argument(help="MARS checkpoint, or the model of an adapter.")],
    data: Annotated[Path, typer.Option(help="Held-out conversations, JSONL.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapter of the model.")] = None,
    items: Annotated[int, typer.Option(min=2, help="Conversations to decode.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an output.")] = 160,
    timed: Annotated[int, typer.Option(min=1, help="Conversations of a timed round.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 5,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Conversations that are decoded at once when timed; repeatable."),
    ] = None,
    dtype: Dtype = None,
    lookup_drafts: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Most drafts from the text in further timed rounds; 0 for none."
        ),
    ] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measure a checkpoint, and print its figures as Markdown."""
    torch.set_num_threads(threads)
    with telling_mistakes():
        check_output_files({"--out": out})
        found = measure(
            model,
            data,
            num_items=items,
            max_tokens=max_tokens,
            num_timed=timed,
            rounds=rounds,
            batches=batch or [1],
            dtype=device_and_dtype("cpu", dtype, model)[1],
            num_lookup_drafts=lookup_drafts,
            adapter=adapter,
        )
        typer.echo(tables(found))
        if out is not None:
            write_json(out, found)


if __name__ == "__main__":
    typer.run(main)
