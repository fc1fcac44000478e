"""The server's commands: ``marsray generate`` and ``marsray serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mars_platform.mode import Mode


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    mode: Annotated[Mode, typer.Option(help="Decoding mode.")] = Mode.THRESHOLD,
    threshold: Annotated[float, typer.Option(help="Confidence threshold in (0, 1].")] = 0.95,
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

    from mars_serve.generate import generate_once, print_generation

    result = generate_once(
        model, prompt, mode=mode, threshold=threshold, max_tokens=max_tokens, chat=not raw
    )
    print_generation(result, Console(), as_json=as_json)


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

    from mars_serve.command_settings import serve_settings
    from mars_serve.run import run_server

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
