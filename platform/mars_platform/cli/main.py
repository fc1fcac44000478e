"""The ``marsray`` command, assembled from the packages' entry points.

Heavy imports happen inside the commands, so that ``marsray --help`` is instant.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.console import Console

from mars_platform import __version__
from mars_platform.errors import Interrupted, Stopped, UserError, one_line

_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
_INTERRUPTED = Interrupted.status


def _show_version(value: bool) -> None:
    if value:
        Console().print(f"marsray {__version__}", highlight=False)
        raise typer.Exit


def _root(
    context: typer.Context,
    _debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
    _version: Annotated[
        bool | None,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = None,
) -> None:
    """Train, serve and autoscale language models that emit several tokens per forward pass."""
    show_help_without_command(context)


def show_help_without_command(context: typer.Context) -> None:
    """Show the help of a group of commands that is called without a command; its callback."""
    if context.invoked_subcommand is None:
        Console().print(context.get_help(), markup=False, highlight=False)
        raise typer.Exit


def build_cli() -> typer.Typer:
    """Build the command line with every installed command.

    A command whose module cannot be imported says so when it is called: the others, above all
    ``marsray doctor``, must work where a package is broken.
    """
    cli = typer.Typer(rich_markup_mode=None)
    cli.callback(invoke_without_command=True)(_root)
    for entry in sorted(entry_points(group="marsray.commands"), key=lambda item: item.name):
        try:
            command = entry.load()
        except Exception as error:
            cli.command(entry.name, context_settings=_ANY_ARGUMENTS)(_broken(entry.name, error))
            continue
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=entry.name)
        else:
            cli.command(entry.name)(command)
    return cli


def _broken(name: str, error: Exception) -> Callable[[], None]:
    def command() -> None:
        raise UserError(
            f"marsray {name} cannot be loaded ({one_line(error)}); run marsray doctor, which says "
            "what is missing"
        )

    command.__doc__ = "Cannot be loaded here; marsray doctor says why."
    return command


def main() -> None:
    """Entry point of the ``marsray`` script."""
    if not sys.stderr.isatty():  # progress bars belong on terminals only
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit status: 0 on success, 2 for the user's mistakes, 1 for other errors, 130 after an
        interrupt and 143 after SIGTERM; all but success print one line on stderr.
    """
    debug = "--debug" in arguments[:1]
    command = typer.main.get_command(build_cli())
    try:
        status = command.main(args=arguments, prog_name="marsray", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", _INTERRUPTED)
    except (UserError, Stopped) as error:
        if debug:
            raise
        return _fail(str(error), 2 if isinstance(error, UserError) else error.status)
    except Exception as error:
        if debug:
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        return _fail(f"{type(error).__name__}: {first_line} (--debug shows the traceback)", 1)
    if status == _INTERRUPTED:  # typer turns an interrupt into a silent exit
        return _fail("interrupted", _INTERRUPTED)
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    # a name of a file may hold characters that steer the terminal
    text = "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in message
    )
    Console(stderr=True, soft_wrap=True).print(
        f"error: {text}", style="red", markup=False, highlight=False
    )
    return status
