"""The commands ``marsray generate``, ``marsray eval`` and ``marsray serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mars_platform.cli.options import with_options
from mars_platform.method.mode import Mode
from mars_serve.cli.options import AsJson, Page, let_idle_threads_sleep
from mars_serve.measure.options import (
    MAX_SEED,
    Adapter,
    EvalOptions,
    Model,
    Temperature,
    TopP,
)

_FILE_WIDTH = 128  # columns of a table in a file or pipe


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Prompt to complete.")],
    adapter: Adapter = None,
    mode: Annotated[
        Mode | None,
        typer.Option(help="Decoding mode; by default threshold with --threshold, else exact."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Confidence threshold in (0, 1]; 0.95 in mode threshold.")
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Sampling seed; by default random.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the output before this string. May be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the output must satisfy.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest number of output tokens; by default 256 if the context has room."
        ),
    ] = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt without a chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Complete one prompt, with tokens shaded by forward pass."""
    from rich.console import Console

    from mars_platform.cli.progress import working
    from mars_serve.api.incoming.options import draw_seed
    from mars_serve.cli.completion import generate_once, print_completion, read_json_schema
    from mars_serve.engine.decoding_options import Sampling

    if seed is None:
        seed = draw_seed() if temperature else 0
    with working(f"loading {model} and completing the prompt"):
        result = generate_once(
            model,
            prompt,
            adapter=adapter,
            mode=mode,
            threshold=threshold,
            max_tokens=max_tokens,
            chat=not raw,
            sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
            stop=stop or (),
            grammar=read_json_schema(json_schema) if json_schema else None,
        )
    print_completion(result, Console(), as_json=as_json)


@with_options
def eval_(
    options: EvalOptions,
    plot: Annotated[
        Path | None, typer.Option(help="Plot quality over speed into this .png or .svg file.")
    ] = None,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Score a checkpoint on held-out conversations.

    Reports quality and tokens per forward pass for each mode and threshold. A row with an "answer"
    is checked: the output is correct if it ends with "Answer:" or "####" and that answer. Numbers
    are compared by value (1,234 equals 1234, 72.0 equals 72), all else exactly. Rows without an
    answer count towards tokens per forward pass and the share of outputs equal to those of mode ar.
    """
    let_idle_threads_sleep()

    from rich.console import Console

    from mars_platform.cli.pictures import write_pictures
    from mars_platform.cli.report import check_output_files, output_console
    from mars_serve.measure.evaluation.evaluate import evaluate
    from mars_serve.measure.evaluation.report import picture_of, print_evaluation

    check_output_files({"--plot": plot, "--html": page})
    evaluation = evaluate(options, Console(stderr=True))
    output = output_console(_FILE_WIDTH)
    print_evaluation(evaluation, output, as_json=as_json)
    write_pictures(
        lambda: picture_of(evaluation),
        title=f"marsray eval {options.model}",
        show=lambda console: print_evaluation(evaluation, console, as_json=False),
        plot=plot,
        page=page,
    )


def serve(
    config: Annotated[Path | None, typer.Argument(help="YAML file with the settings.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint directory or hub id, or NAME=DIR. May be repeated."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory of an adapter of the model, or NAME=DIR where there are several models."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Number of replicas of each model.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option(help="Allow other addresses than loopback without keys.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: key.sub=value.")
    ] = None,
) -> None:
    """Serve models behind OpenAI-compatible REST endpoints."""
    from rich.console import Console

    from mars_serve.cli.serve_settings import serve_settings
    from mars_serve.deploy.run import run_server

    settings = serve_settings(
        config,
        model or [],
        adapters=adapter or [],
        host=host,
        port=port,
        replicas=replicas,
        insecure=insecure,
        overrides=set_ or [],
    )
    run_server(settings, Console())
