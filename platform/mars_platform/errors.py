"""Errors that end a command with one line, and the text of any error as one line.

Imports no Ray, torch or HTTP library.
"""

_MESSAGE_CHARACTERS = 300


class UserError(ValueError):
    """A mistake of the user; the message is one sentence that names the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


class Stopped(Exception):
    """The process received SIGTERM and has stopped in good order.

    The command line prints the message and exits with ``status``, as a shell does after SIGTERM.
    """

    status = 143


class Interrupted(Stopped):
    """The process received SIGINT, as from Ctrl-C, and has stopped in good order."""

    status = 130


def one_line(error: Exception) -> str:
    """Return an error's message, or its type if it has none, as one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.encode(errors="backslashreplace").decode()
    is_short = len(text) <= _MESSAGE_CHARACTERS
    return text if is_short else f"{text[:_MESSAGE_CHARACTERS]} ..."
