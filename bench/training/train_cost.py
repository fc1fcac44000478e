"""Measures what MARS training costs over AR fine-tuning, in this project's layout and a naive one.

    python -m bench.training.train_cost --data long-prompts

One process runs all variants of `train_variants` in turn on each batch, with the same model and
optimizer; the order is reversed from one batch to the next. A step is everything from token ids to
the optimizer's update.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from bench.training.train_variants import VARIANTS, Example, Options, Step, Variants, build_examples
from rich.console import Console
from rich.table import Table

# --- measurement ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Results of one variant."""

    variant: str
    step_s: float
    """Median over rounds of a round's mean seconds per step."""
    rounds_s: list[float]
    """Seconds per step of each round."""
    first_loss: float
    tokens_per_s: float
    """Tokens per second of the conversations, without padding and copies."""
    slots_per_step: float
    padding_share: float
    peak_mib: float
    mfu: float | None


def measure(options: Options, variants: Sequence[str]) -> list[Measured]:
    """Run all rounds of some variants."""
    examples = build_examples(options)
    size = options.batch_size
    batches = [examples[at : at + size] for at in range(0, len(examples), size)]
    runner = Variants(options)
    first = {variant: runner.first_loss(variant, batches[0]) for variant in variants}
    for variant in variants:
        for batch in batches[:2]:  # allocates memory and compiles
            runner.step(variant, batch)
    peaks = {variant: peak_mib(runner, variant, batches[0]) for variant in variants}
    rounds: dict[str, list[float]] = {variant: [] for variant in variants}
    found: dict[str, list[Step]] = {variant: [] for variant in variants}
    for _ in range(options.rounds):
        spent = dict.fromkeys(variants, 0.0)
        for index, batch in enumerate(batches):
            for variant in variants if index % 2 == 0 else reversed(variants):
                seconds, step = timed_step(runner, variant, batch)
                spent[variant] += seconds
                found[variant].append(step)
        for variant in variants:
            rounds[variant].append(spent[variant] / len(batches))
    num_tokens = sum(len(example.ids) for example in examples) / len(batches)
    return [
        Measured(
            variant,
            step_s=(step_s := statistics.median(rounds[variant])),
            rounds_s=rounds[variant],
            first_loss=first[variant],
            tokens_per_s=num_tokens / step_s,
            slots_per_step=statistics.mean(step.num_slots for step in found[variant]),
            padding_share=sum(step.num_padding for step in found[variant])
            / sum(step.num_slots for step in found[variant]),
            peak_mib=peaks[variant],
            mfu=utilisation(runner, variant, batches, step_s),
        )
        for variant in variants
    ]


def timed_step(runner: Variants, variant: str, batch: Sequence[Example]) -> tuple[float, Step]:
    """Run a step and wait for the device; returns the step's seconds and sizes."""
    started = time.perf_counter()
    step = runner.step(variant, batch)
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, step


def peak_mib(runner: Variants, variant: str, batch: Sequence[Example]) -> float:
    """Return the peak memory of tensors in one step, with weights and optimizer state, in MiB."""
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        runner.step(variant, batch)
        return torch.cuda.max_memory_allocated() / 2**20
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        with torch.profiler.profile(profile_memory=True) as profiler:
            runner.step(variant, batch)
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "[memory]"]
    in_step: int = max(event["Total Allocated"] for event in memory)
    state = [tensor for values in runner.optimizer.state.values() for tensor in values.values()]
    held = sum(tensor.nbytes for tensor in [*runner.model.parameters(), *state])
    peak: int = held + in_step
    return peak / 2**20


def utilisation(
    runner: Variants, variant: str, batches: Sequence[Sequence[Example]], step_s: float
) -> float | None:
    """Return the share of the device's peak that the method's needed operations reach.

    Needed are 6 operations per weight of the layers and token of the skipped layout, and per weight
    of the output layer and prediction, for the naive variants too. Attention is not counted.
    """
    if runner.options.peak_tflops is None:
        return None
    block_size = runner.options.block_size if variant.startswith("mars") else None
    layouts = [runner.lay_out(example, block_size) for batch in batches for example in batch]
    slots = sum(len(layout.tokens) for layout in layouts)
    predictions = sum(len(item.labels) + int((item.depths > 0).sum()) for item in layouts)
    head: int = runner.model.get_output_embeddings().weight.numel()
    body: int = (
        sum(parameter.numel() for parameter in runner.model.parameters()) - head
    )  # they are tied
    flops = 6 * (body * slots + head * predictions) / len(batches)
    return flops / step_s / (runner.options.peak_tflops * 1e12)


# --- the report -----------------------------------------------------------------------------------


def ratio(measured: dict[str, Measured], over: str, under: str) -> tuple[float, float, float]:
    """Return median, lowest and highest ratio over rounds of one variant's time to another's."""
    pairs = zip(measured[over].rounds_s, measured[under].rounds_s, strict=True)
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def compare(results: list[Measured]) -> dict[str, dict[str, float]]:
    """Return ratios of time and peak memory by pair of variants."""
    by_name = {result.variant: result for result in results}
    pairs = [("mars", "ar"), ("mars-naive", "ar-naive"), ("mars-naive", "ar"), ("ar-naive", "ar")]
    compared: dict[str, dict[str, float]] = {}
    for over, under in pairs:
        if over not in by_name or under not in by_name:
            continue
        median, lowest, highest = ratio(by_name, over, under)
        compared[f"{over} / {under}"] = {
            "time": median,
            "time_lowest": lowest,
            "time_highest": highest,
            "memory": by_name[over].peak_mib / by_name[under].peak_mib,
        }
    return compared


def show(options: Options, facts: dict[str, float], results: list[Measured]) -> None:
    """Print the results as a table, and the ratios."""
    console = Console(width=120)
    console.print(" ".join(f"{name}={value}" for name, value in asdict(options).items()))
    console.print(
        f"{facts['prompt_tokens']:.1f} prompt and {facts['response_tokens']:.1f} response tokens a "
        f"conversation ({facts['prompt_per_response']:.2f} to 1)"
    )
    columns = ["variant", "ms/step", "s/epoch", "tokens/s", "slots", "padding", "peak MiB", "MFU"]
    table = Table(*columns, "first loss")
    for result in results:
        table.add_row(
            result.variant,
            f"{1e3 * result.step_s:.1f}",
            f"{result.step_s * options.steps:.2f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.slots_per_step:.0f}",
            f"{100 * result.padding_share:.1f}%",
            f"{result.peak_mib:.0f}",
            "" if result.mfu is None else f"{100 * result.mfu:.1f}%",
            f"{result.first_loss:.5f}",
        )
    console.print(table)
    for name, found in compare(results).items():
        console.print(
            f"{name}: {found['time']:.2f}x the time "
            f"({found['time_lowest']:.2f}-{found['time_highest']:.2f}), "
            f"{found['memory']:.2f}x the peak memory"
        )


def describe(examples: Sequence[Example]) -> dict[str, float]:
    """Return mean tokens of prompts and responses."""
    response = statistics.mean(int(example.supervised.sum()) for example in examples)
    prompt = statistics.mean(int(np.flatnonzero(item.supervised)[0]) for item in examples)
    return {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "prompt_per_response": prompt / response,
    }


def main(
    model: Annotated[str, typer.Option(help="demo, or qwen2.5-0.5b with random weights.")] = "demo",
    data: Annotated[
        str, typer.Option(help="demo, or long-prompts: three times the response.")
    ] = "demo",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, or bf16 by autocast.")] = "float32",
    attention: Annotated[str, typer.Option(help="sdpa, or flex (CUDA only).")] = "sdpa",
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the layers.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations per step.")] = 32,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Conversations per pass; all of a step by default.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=4, help="Use random conversations of this many tokens.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="MARS block size B.")] = 4,
    row_slots: Annotated[int, typer.Option(min=1, help="Slots of a packed row.")] = 192,
    ar_row_slots: Annotated[
        int | None, typer.Option(min=1, help="Slots of an AR row; as for MARS by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps per epoch.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Epochs of each variant.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    peak_tflops: Annotated[float | None, typer.Option(help="Peak of the device, for MFU.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data and weights.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Run these variants only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Print seconds per step and peak memory of MARS and AR training, packed and naive."""
    assert attention in ("sdpa", "flex"), attention
    options = Options(
        model=model,
        data=data,
        device=device,
        dtype=dtype,
        attention=attention,  # type: ignore[arg-type]
        compile=compile_,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size or batch_size,
        length=length,
        block_size=block_size,
        row_slots=row_slots,
        ar_row_slots=ar_row_slots or row_slots,
        steps=steps,
        rounds=rounds,
        threads=threads,
        peak_tflops=peak_tflops,
        seed=seed,
    )
    torch.set_num_threads(threads)
    results = measure(options, only or VARIANTS)
    facts = describe(build_examples(options))
    if as_json:
        shown = {"options": asdict(options), "data": facts, "ratios": compare(results)}
        print(json.dumps({**shown, "variants": [asdict(result) for result in results]}, indent=1))
    else:
        show(options, facts, results)


if __name__ == "__main__":
    typer.run(main)
