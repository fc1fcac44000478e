"""The command ``marsray bench``, a group: ``marsray bench decode``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mars_platform.cli import show_help_without_command

_FILE_WIDTH = 120  # of tables that go to a file or pipe, where rich assumes 80

bench = typer.Typer(rich_markup_mode=None)


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Side-by-side benchmarks."""
    show_help_without_command(context)


@bench.command()
def decode(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint directory or hub id; or give --untrained.")
    ] = None,
    untrained: Annotated[
        str | None,
        typer.Option(
            help="Random weights instead: a config.json, or qwen2-100m, qwen2.5-0.5b, qwen2.5-7b.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Conversations, JSONL or Parquet; else random prompts are generated."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="ar, threshold, exact, exact-all, exact-last, hf-generate, hf-generate+packed, "
            "hf-continuous, hf-continuous+packed or block-sync; may be repeated. Else all."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Batch size; may be repeated. Else 1, 4, 8, 16, 32."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each contender is timed.")] = 5,
    num_requests: Annotated[
        int, typer.Option(min=1, help="Requests a run at the most, where two batches are not more.")
    ] = 48,
    prompt_tokens: Annotated[
        tuple[int, int], typer.Option(help="Length of a generated prompt, least and most.")
    ] = (16, 256),
    output_tokens: Annotated[
        tuple[int, int], typer.Option(help="Length of its output, least and most.")
    ] = (16, 256),
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens for a conversation at the most.")
    ] = 256,
    threshold: Annotated[float, typer.Option(help="Confidence threshold in (0, 1].")] = 0.95,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Draw the lengths of accepted runs from this JSON file, or paper-gsm8k-0.95, "
            "which is the default for untrained weights.",
        ),
    ] = None,
    agreement: Annotated[
        float | None,
        typer.Option(
            help="In mode exact, draw each draft right with this probability, if all before it "
            "are, in place of --acceptance."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths, draws and weights.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; else torch's choice.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the weights; else float32 on the CPU, bfloat16 on CUDA."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the engine's model (engine.compile).")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens a second over batch size into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Decode the same prompts with marsray's engine and with others, in turn.

    Generated prompts ignore end tokens: every output has its given length. With --acceptance the
    number of tokens that a pass gives is drawn instead of decided by the model, for measuring what
    steps cost where no trained weights are at hand. Its file holds {"tokens_per_forward": {"1":
    0.6, "2": 0.4}}: how often a pass gives so many tokens. With --agreement, lengths outside mode
    exact are drawn too. The contender exact leaves it to the engine which outcomes of a check get
    masks; exact-all and exact-last give them to all outcomes, or to that of all drafts being right.
    """
    import torch
    from rich.console import Console

    from mars_serve.bench.decode import CONTENDERS, DecodeOptions, compare
    from mars_serve.bench.report import check_plot_file, plot_comparison, print_comparison
    from mars_serve.bench.workload import RaggedShape

    if threads is not None:
        torch.set_num_threads(threads)
    if plot is not None:
        check_plot_file(plot)
    options = DecodeOptions(
        model=model,
        untrained=untrained,
        prompts=prompts,
        contenders=contender or CONTENDERS,
        batches=batch or DecodeOptions.batches,
        rounds=rounds,
        num_requests=num_requests,
        shape=RaggedShape(prompt_tokens, output_tokens),
        max_tokens=max_tokens,
        threshold=threshold,
        acceptance=acceptance,
        agreement=agreement,
        seed=seed,
        device=device,
        dtype=dtype or ("bfloat16" if device == "cuda" else "float32"),
        compiled=compiled,
    )
    comparison = compare(options, Console(stderr=True))
    output = Console()
    if not output.is_terminal:
        output.width = _FILE_WIDTH
    print_comparison(comparison, output, as_json=as_json)
    if plot is not None:
        plot_comparison(comparison, plot)
