"""The server's commands: ``marsray generate``, ``marsray eval`` and ``marsray serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from mars_platform.method.mode import Mode
from mars_serve.engine.request import Outcomes

_MAX_SEED = 2**63 - 1
_FILE_WIDTH = 128  # of tables that go to a file or pipe, where rich assumes 80


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    mode: Annotated[Mode, typer.Option(help="Decoding mode.")] = Mode.THRESHOLD,
    threshold: Annotated[float, typer.Option(help="Confidence threshold in (0, 1].")] = 0.95,
    temperature: Annotated[float, typer.Option(help="In [0, 2]; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Share of the likeliest tokens to choose from, in (0, 1].")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=_MAX_SEED, help="Of the draw; else a random one.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the output has to match.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Output tokens at the most; else 256, or what the context leaves."
        ),
    ] = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt as it is, without chat.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """One completion, its tokens shaded by the forward pass that gave them."""
    from rich.console import Console

    from mars_serve.api.incoming.options import draw_seed
    from mars_serve.cli.completion import generate_once, print_generation, read_json_schema
    from mars_serve.engine.request import Sampling

    if seed is None:
        seed = draw_seed() if temperature else 0
    result = generate_once(
        model,
        prompt,
        mode=mode,
        threshold=threshold,
        max_tokens=max_tokens,
        chat=not raw,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        stop=stop or (),
        grammar=read_json_schema(json_schema) if json_schema else None,
    )
    print_generation(result, Console(), as_json=as_json)


def eval_(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    data: Annotated[
        list[Path], typer.Option(help="Conversations, JSONL or Parquet; may be repeated.")
    ],
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            help="Confidence threshold in (0, 1]; may be repeated. Else 1, .95, .9, .8, .7, .6, .5."
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(help="Decoding mode; may be repeated. Mode ar is always measured."),
    ] = None,
    outcomes: Annotated[
        list[Outcomes] | None,
        typer.Option(help="In mode exact, outcomes that get masks; may be repeated. Else all."),
    ] = None,
    calibrated: Annotated[
        bool, typer.Option(help="Compare calibrated confidence with the thresholds.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="In [0, 2]; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Share of the likeliest tokens to choose from, in (0, 1].")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=_MAX_SEED, help="Of the first conversation's draw.")
    ] = 0,
    max_items: Annotated[
        int | None, typer.Option(min=1, help="Conversations at the most, the first ones.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens at the most, within what the context leaves.")
    ] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Conversations that run at once.")] = 32,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Auto is cuda where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bf16"] | None,
        typer.Option(help="Of the weights; else float32 on the CPU, bf16 on CUDA."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Score a checkpoint on held-out conversations: quality and tokens a forward pass.

    A row's "answer" column makes it checkable. An output is correct if it ends with the answer
    behind the mark "Answer:" or "####"; numbers are compared by value (1,234 is 1234, 72.0 is
    72), all else exactly. Rows without an answer count in tokens a forward pass and in the share
    of outputs that equal one-token decoding's.
    """
    # Spinning threads make a run many times slower once another process wants a core. The kernels
    # read this when they are loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from rich.console import Console

    from mars_serve.engine.request import Sampling
    from mars_serve.measure.evaluation.report import EvalOptions, evaluate, print_evaluation

    options = EvalOptions(
        model,
        data,
        thresholds=threshold or (),
        modes=mode or (),
        outcomes=outcomes or (),
        calibrated=calibrated,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        max_items=max_items,
        max_tokens=max_tokens,
        batch=batch,
        device=device,
        dtype=dtype,
    )
    evaluation = evaluate(options, Console(stderr=True))
    output = Console()
    if not output.is_terminal:
        output.width = _FILE_WIDTH
    print_evaluation(evaluation, output, as_json=as_json)


def serve(
    config: Annotated[Path | None, typer.Argument(help="Settings, a YAML file.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint directory or hub id, or NAME=DIR; may be repeated."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Replicas of each model.")] = None,
    insecure: Annotated[bool, typer.Option(help="Allow addresses other than loopback.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: key.sub=value.")
    ] = None,
) -> None:
    """Serve models behind OpenAI-compatible REST endpoints on Ray Serve."""
    from rich.console import Console

    from mars_serve.cli.serve_settings import serve_settings
    from mars_serve.deploy.run import run_server

    settings = serve_settings(
        config,
        model or [],
        host=host,
        port=port,
        replicas=replicas,
        insecure=insecure,
        overrides=set_ or [],
    )
    run_server(settings, Console())
