"""The commands ``marsray bench decode`` and ``marsray bench load``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mars_platform.checkpoint.number_type import NumberType
from mars_platform.cli.main import show_help_without_command
from mars_serve.cli.options import AsJson, KeyEnv
from mars_serve.measure.options import Adapter

_FILE_WIDTH = 120  # columns of a table in a file or pipe
_LOAD_WIDTH = 160
_INTERRUPTED = 130  # the shell's status for SIGINT

bench = typer.Typer(rich_markup_mode=None)


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Benchmark decoding, or a server under load."""
    show_help_without_command(context)


@bench.command()
def decode(
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint directory or hub id; leave it out with --untrained."),
    ] = None,
    adapter: Adapter = None,
    untrained: Annotated[
        str | None,
        typer.Option(
            help="Use random weights of this size: a config.json, qwen2-100m, qwen2.5-0.5b or "
            "qwen2.5-7b.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Conversations in JSONL or Parquet; by default random prompts."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="Decoder to measure: ar, threshold, exact or hf-generate. May be repeated; by "
            "default all."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Batch size. May be repeated; by default 1, 4, 8, 16 and 32."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of times that each contender is timed.")
    ] = 5,
    num_requests: Annotated[
        int, typer.Option(min=1, help="Requests per run, but at least two batches.")
    ] = 48,
    prompt_tokens: Annotated[
        tuple[int, int], typer.Option(help="Shortest and longest generated prompt, in tokens.")
    ] = (16, 256),
    output_tokens: Annotated[
        tuple[int, int], typer.Option(help="Shortest and longest output of a generated prompt.")
    ] = (16, 256),
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of output tokens for a conversation.")
    ] = 256,
    threshold: Annotated[float, typer.Option(help="Confidence threshold in (0, 1].")] = 0.95,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Draw the number of tokens accepted per pass from this JSON file or from "
            "paper-gsm8k-0.95, the default for untrained weights."
        ),
    ] = None,
    agreement: Annotated[
        float | None,
        typer.Option(
            help="In mode exact, accept each draft with this probability if all before it were "
            "accepted; replaces --acceptance."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths, draws and weights.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of CPU threads; by default torch's choice.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device to run on.")] = "cpu",
    dtype: Annotated[
        NumberType | None,
        typer.Option(
            help="Type of the weights; by default the one that the model is stored in, and for "
            "untrained weights float32 on the CPU, bfloat16 on CUDA."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the speed of decoders on the same prompts.

    The modes of marsray's engine and Hugging Face generate take turns. Outputs of generated prompts
    ignore end tokens, so that each has its drawn length. With --acceptance, the number of tokens
    accepted per pass is drawn instead of decided by the model; so step times can be measured
    without trained weights. Its file holds the relative frequency of each number, such as
    {"tokens_per_forward": {"1": 0.6, "2": 0.4}}. With --agreement, numbers of tokens outside mode
    exact are drawn, too.
    """
    import torch
    from rich.console import Console

    from mars_platform.cli.report import output_console
    from mars_serve.bench.decode.options import CONTENDERS, DecodeOptions, default_dtype
    from mars_serve.bench.decode.report import print_comparison
    from mars_serve.bench.decode.run import compare
    from mars_serve.bench.decode.workload import RaggedShape

    if threads is not None:
        torch.set_num_threads(threads)
    options = DecodeOptions(
        model=model,
        adapter=adapter,
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
        dtype=dtype or default_dtype(model, device),
    )
    comparison = compare(options, Console(stderr=True))
    print_comparison(comparison, output_console(_FILE_WIDTH), as_json=as_json)


@bench.command()
def load(
    trace: Annotated[Path, typer.Option(help="File of requests to replay; may end in .gz.")],
    model: Annotated[str, typer.Option(help="Name of the served model.")],
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    speedup: Annotated[
        float, typer.Option(help="Factor by which the trace is replayed faster.")
    ] = 1.0,
    trace_format: Annotated[
        str | None, typer.Option(help="azure, mooncake or csv; by default guessed from the file.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations in JSONL; each request sends the next one. By default, random "
            "prompts of the trace's lengths are sent."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Largest number of output tokens for a conversation; by default as in the trace."
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Shares of tiers to draw from, such as priority=.1,default=.6,flex=.3; by "
            "default as in the trace."
        ),
    ] = None,
    objective_ttft_s: Annotated[
        float, typer.Option(help="Objective for the time to first token, in seconds.")
    ] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds after which no more requests are sent; by default never."),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(help="Largest number of requests; the first ones are sent.")
    ] = 100_000,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a request is given up.")
    ] = 600.0,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of drawn tiers and prompts. A server caches the prompts that it has seen, "
            "so use another seed for a second test."
        ),
    ] = 0,
    key_env: KeyEnv = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow a server on another machine.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="File to write the figures to; - prints them instead."),
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="File to write a row for each request to.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Image file to plot to; its suffix sets the format.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="HTML page to write, with figure and tables.")
    ] = None,
) -> None:
    """Replay a request trace against a running server.

    Prints the latencies and rejections that clients saw. Each request is sent at its time in the
    trace, without waiting for others. A rejected or failed request misses the objective and has
    infinite latencies. Ctrl-C ends the test and reports the requests so far. Rows of --data with an
    "answer" are checked in the same way as by marsray eval.
    """
    from functools import partial

    from mars_platform.cli.progress import progress_display
    from mars_platform.cli.report import STANDARD_OUTPUT, output_console
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
        "page_file": page,
    }
    options = build_settings(given, LoadOptions, source="options")
    with progress_display() as display:
        test = run_load(options, partial(display.update, "bench load"))
    if json_file != STANDARD_OUTPUT:
        print_load(test, output_console(_LOAD_WIDTH))
    write_files(test)
    if test.replayed.was_interrupted:
        raise typer.Exit(_INTERRUPTED)
