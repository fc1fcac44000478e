"""The command ``marsray top``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mars_serve.cli.options import AsJson, KeyEnv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from mars_serve.cli.top.client import ServerClient
    from mars_serve.cli.top.load import ModelLoad

_INTERVAL_S = 1.0


def top(
    url: Annotated[
        str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[
        float | None,
        typer.Option(
            min=0.2, help="Seconds between two views.", show_default="1; 10 off a terminal"
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show the load of one interval, and end.")
    ] = False,
    key_env: KeyEnv = None,
    as_json: AsJson = False,
) -> None:
    """Watch a server's load.

    Shows replicas, requests, τ, speed, latencies and the autoscaler's decisions. Redraws on a
    terminal; elsewhere prints a line for each model and interval, or with --json an object. An
    administrator's key also shows who controls τ and what the autoscaler has decided. Goes on when
    the server restarts. With several ingress replicas, requests ended and refused are those of the
    one that answers.
    """
    from contextlib import suppress

    from rich.console import Console

    from mars_serve.cli.server import key_in, server_url
    from mars_serve.cli.top.client import ServerClient

    console = Console()
    is_live = console.is_terminal and not (once or as_json)
    interval = interval or (_INTERVAL_S if is_live or once else 10 * _INTERVAL_S)
    with ServerClient(server_url(url), key_in(key_env)) as client, suppress(KeyboardInterrupt):
        if once:
            _show_once(client, interval, as_json)
        elif is_live:
            _redraw(client, interval, console)
        else:
            _print_on(client, interval, as_json)


def _looks(client: ServerClient, interval: float) -> Iterator[tuple[list[ModelLoad], str]]:
    """Yield the loads of each interval, and why they are not new, which is empty if they are."""
    import time

    from mars_serve.cli.top.client import Away
    from mars_serve.cli.top.load import LoadWindow

    window, loads = LoadWindow(), list["ModelLoad"]()
    while True:
        began_s, problem = time.monotonic(), ""
        try:
            loads = window.add(client.sample())
        except Away as error:
            problem = str(error)
            window.forget()
        yield loads, problem
        time.sleep(max(interval - (time.monotonic() - began_s), 0.0))


def _show_once(client: ServerClient, interval: float, as_json: bool) -> None:
    """Print the load between two samples.

    Raises:
        UserError: the server is away.
    """
    from itertools import islice

    from mars_platform.errors import UserError

    looks = list(islice(_looks(client, interval), 2))
    loads, problem = looks[-1]
    if problem:
        raise UserError(f"URL: {client.url}: {problem}; is the server running?")
    _print(client, loads, "", as_json)


def _print_on(client: ServerClient, interval: float, as_json: bool) -> None:
    for loads, problem in _looks(client, interval):
        _print(client, loads, problem, as_json)


def _print(client: ServerClient, loads: list[ModelLoad], problem: str, as_json: bool) -> None:
    import json
    import time

    from mars_platform.cli.report import jsonable
    from mars_platform.cli.shading import printable
    from mars_serve.cli.top.view import line

    if as_json:
        models = [] if problem else [load.as_dict() for load in loads]
        found = {"time_s": time.time(), "problem": problem or None, "models": models}
        typer.echo(json.dumps(jsonable(found), allow_nan=False))
    elif problem:
        now = time.strftime("%H:%M:%S")
        typer.echo(f"{now} {client.url}: {printable(problem)}; trying again")
    else:
        for load in loads:
            typer.echo(line(load))


def _redraw(client: ServerClient, interval: float, console: Console) -> None:
    from rich.live import Live

    from mars_serve.cli.top.view import picture

    with Live(console=console, screen=True, auto_refresh=False) as live:
        for loads, problem in _looks(client, interval):
            shown = picture(client.url, loads, is_admin=client.is_admin, problem=problem)
            live.update(shown, refresh=True)
