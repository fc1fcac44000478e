"""The command ``marsray bench``, a group: ``marsray bench decode`` and ``marsray bench load``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mars_platform.cli.main import show_help_without_command

_FILE_WIDTH = 120  # of tables that go to a file or pipe, where rich assumes 80
_LOAD_WIDTH = 160
_INTERRUPTED = 130  # the shell's status for SIGINT

bench = typer.Typer(rich_markup_mode=None)


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Benchmarks: of decoding side by side, and of a server under load."""
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

    from mars_platform.cli.output_files import check_plot_file
    from mars_serve.bench.decode.report import plot_comparison, print_comparison
    from mars_serve.bench.decode.run import CONTENDERS, DecodeOptions, compare
    from mars_serve.bench.decode.workload import RaggedShape

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


@bench.command()
def load(
    trace: Annotated[Path, typer.Option(help="Requests to replay; may end in .gz.")],
    model: Annotated[str, typer.Option(help="Name of the served model.")],
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    speedup: Annotated[
        float, typer.Option(help="Times that the trace is played faster than it was.")
    ] = 1.0,
    trace_format: Annotated[
        str | None, typer.Option(help="azure, mooncake or csv; else guessed from the file.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations to ask, JSONL; each request takes the next one. Else prompts of "
            "the trace's lengths are made up."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Output tokens for a conversation at the most; else the trace's."),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Draw each request's tier: priority=.1,default=.6,flex=.3. Else the trace's own."
        ),
    ] = None,
    objective_ttft_s: Annotated[
        float, typer.Option(help="Seconds in which the first token should come.")
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of sending at the most; else the whole trace.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(help="Requests at the most, the first ones.")
    ] = 100_000,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a request is given up.")
    ] = 600.0,
    seed: Annotated[
        int,
        typer.Option(
            help="Of classes and made-up prompts. A server that has seen prompts has them stored: "
            "take another one for a second test."
        ),
    ] = 0,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the server's key.")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="The server may be another machine.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the figures to.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="File to write a row for each request to.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to draw; its suffix says the format.")
    ] = None,
) -> None:
    """Replay a request trace against a running server, and report what its clients saw.

    Each request is sent at its time, whatever became of others. A request that was rejected or
    failed never met the objective, and its times are infinite. Ctrl-C ends the test with what there
    is. Rows of --data with an "answer" are checked, as marsray eval does it.
    """
    from functools import partial

    from rich.console import Console

    from mars_platform.cli.progress import progress_display
    from mars_platform.config import build_settings
    from mars_serve.bench.load.report import print_load, write_files
    from mars_serve.bench.load.run import LoadOptions, run_load

    given = {
        "trace": trace,
        "trace_format": trace_format,
        "speedup": speedup,
        "url": url,
        "allow_remote": allow_remote,
        "model": model,
        "data": data,
        "max_tokens": max_tokens,
        "classes": classes,
        "objective_ttft_s": objective_ttft_s,
        "duration_s": duration,
        "max_requests": max_requests,
        "timeout_s": timeout_s,
        "seed": seed,
        "key_env": key_env,
        "json_file": json_file,
        "csv_file": csv_file,
        "plot_file": plot,
    }
    options = build_settings(given, LoadOptions, source="options")
    with progress_display(Console(stderr=True)) as display:
        test = run_load(options, partial(display.update, "bench load"))
    output = Console()
    if not output.is_terminal:
        output.width = _LOAD_WIDTH
    print_load(test, output)
    write_files(test)
    if test.replayed.was_interrupted:
        raise typer.Exit(_INTERRUPTED)
