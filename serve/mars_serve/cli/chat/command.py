"""The command ``marsray chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from mars_platform.cli.options import AsJson, complete_directories, with_options
from mars_platform.config import Settings
from mars_platform.method.mode import Mode
from mars_serve.measure.options import Adapter, Temperature

if TYPE_CHECKING:
    from rich.console import Console

    from mars_serve.cli.chat.answer import ChatModel

_PROMPT = "> "


class ChatOptions(Settings):
    """Options of ``marsray chat``."""

    target: Annotated[str, typer.Argument(metavar="URL|MODEL", autocompletion=complete_directories)]
    """Address of a server, such as http://127.0.0.1:8000, or a checkpoint directory or hub id to
    run here."""
    model: str | None = None
    """Model of the server; by default its only one."""
    adapter: Adapter = None
    mode: Mode | None = None
    """Decoding mode; by default threshold with a τ, else the model's own."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Confidence threshold in (0, 1]; by default the model's."""
    system: str = ""
    """Instruction at the beginning."""
    temperature: Temperature = 0.0
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of an answer."""
    key_env: str | None = None
    """Environment variable that holds the server's key."""


@with_options
def chat(options: ChatOptions, as_json: AsJson = False) -> None:
    """Talk to a model, with tokens shaded by forward pass.

    Each answer comes with its figures. Lines that begin with a slash are commands; /help lists
    them. Questions may also come from a file or pipe, one a line.
    """
    from rich.console import Console

    from mars_platform.cli.report import say
    from mars_serve.cli.chat.answer import DecodingChoice
    from mars_serve.cli.chat.conversation import ChatConversation

    found = _model(options)
    console, errors = Console(), Console(stderr=True)
    choice = DecodingChoice(
        options.mode, options.threshold, options.max_tokens, options.temperature
    )
    conversation = ChatConversation(
        found, console, choice=choice, system=options.system, as_json=as_json
    )
    if sys.stdin.isatty():
        hint = f"{found.name}; /help shows the commands, Ctrl-D ends the chat"
        say(errors, hint, style="dim")
        conversation.run(_typed(errors))
    elif conversation.run(line.rstrip("\n") for line in sys.stdin):
        raise typer.Exit(1)


def _model(options: ChatOptions) -> ChatModel:
    from mars_platform.errors import UserError

    target = options.target
    if "://" in target:
        if options.adapter is not None:
            raise UserError("--adapter: the server has chosen its models' adapters; leave it out")
        from mars_platform.cli.addresses import key_in
        from mars_serve.cli.chat.remote import RemoteModel, server_url

        return RemoteModel(server_url(target), key_in(options.key_env), options.model)
    if options.model is not None:
        raise UserError("--model: only a server has several; leave it out")
    from mars_platform.checkpoint.metadata import locate_model
    from mars_platform.cli.progress import working

    locate_model(target)  # a download shows its own progress
    with working(f"loading {target}"):
        from mars_serve.cli.chat.local import LocalModel

        return LocalModel(target, options.adapter)


def _typed(errors: Console) -> Iterator[str]:
    import readline  # noqa: F401 - gives input() a line editor and a history

    while True:
        try:
            yield input(_PROMPT if sys.stdout.isatty() else "")
        except EOFError:
            errors.print()
            return
        except KeyboardInterrupt:
            errors.print("\nCtrl-D ends the chat", style="dim")
