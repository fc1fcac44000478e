"""The one error type for mistakes that the user can put right."""


class UserError(ValueError):
    """A mistake of the user's: the message is one sentence that names the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """
