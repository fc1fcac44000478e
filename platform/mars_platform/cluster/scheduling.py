"""Chooses which processes of a server may interrupt each other on its cores.

By default Linux lets a thread that wakes up interrupt one that computes. On few cores the many
short wake-ups of HTTP then stop one thread of a matrix product, for which all others wait. Imports
no Ray, torch or HTTP library.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CAN_CHOOSE = hasattr(os, "SCHED_BATCH")  # on Linux alone


@contextmanager
def children_wait_for_cores() -> Iterator[None]:
    """Let processes that this thread starts in the block wait until a core is free or yielded.

    They have their full share of the cores, but do not interrupt what runs when they wake up
    (``SCHED_BATCH``, see sched(7)). Their own children inherit this.
    """
    if not _CAN_CHOOSE:
        yield
        return
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def preempt_others() -> None:
    """Let this thread, and those that it starts, interrupt others again when they wake up."""
    if _CAN_CHOOSE:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
