"""Makes imports of many modules quicker. Imports no Ray, torch or HTTP library."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be collected while modules are imported in the block, which then stay.

    The collector would look through all that is loaded so far, again and again: a sixth of the time
    that torch and transformers take.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
