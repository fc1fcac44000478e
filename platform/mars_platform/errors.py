"""How a command ends early: a mistake that the user can put right, or an order to stop."""


class UserError(ValueError):
    """A mistake of the user's: the message is one sentence that names the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


class Stopped(Exception):
    """The process was told to terminate and has done so in good order.

    The command line prints the message and exits with status 143, the shell's for SIGTERM.
    """
