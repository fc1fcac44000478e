"""Makes imports of many modules quicker. Imports no Ray, torch or HTTP library."""

import gc
import os
import sys
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


@contextmanager
def without_torch() -> Iterator[None]:
    """Hide torch, which takes seconds to import, from transformers, unless torch is already loaded.

    Its tokenizers and configurations then do without, and this process can never load a model.
    """
    if "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # on models without torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # tells importers that there is none
    try:
        yield
    finally:
        del sys.modules["torch"]
