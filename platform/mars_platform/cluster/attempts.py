"""Starts what a busy machine may fail to start in time, a bounded number of times.

Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Callable

from mars_platform.errors import UserError, one_line

MAX_ATTEMPTS = 3


def attempt(
    start: Callable[[], None],
    *,
    name: str,
    remedy: str,
    tell: Callable[[str], None],
    errors: tuple[type[Exception], ...] = (Exception,),
) -> None:
    """Call a function until it succeeds, at most `MAX_ATTEMPTS` times.

    Args:
        start: starts something; it can be called again after it has failed.
        name: noun for what is started, which begins each message.
        remedy: what the user may do, which ends the last message.
        tell: takes one line for each failure that another attempt follows.
        errors: exceptions after which another attempt may succeed; never a `ValueError`, because
            arguments that are wrong stay wrong.

    Raises:
        UserError: the last attempt has failed.
    """
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            start()
            return
        except ValueError:
            raise
        except errors as error:
            reason = one_line(error)
            if number == MAX_ATTEMPTS:
                raise UserError(
                    f"{name} did not start in {MAX_ATTEMPTS} attempts ({reason}); {remedy}"
                ) from error
        tell(f"{name} did not start ({reason}); attempt {number + 1} of {MAX_ATTEMPTS} begins")
