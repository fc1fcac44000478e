"""Errors that end a command with one line: a mistake of the user, or an order to terminate."""


class UserError(ValueError):
    """A mistake of the user; the message is one sentence that names the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


class Stopped(Exception):
    """The process received SIGTERM and has stopped in good order.

    The command line prints the message and exits with status 143, as a shell does after SIGTERM.
    """
