"""Processes of a server give way to its engines, and these to nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mars_platform.cluster.scheduling import children_wait_for_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="only Linux has this scheduling policy"
)
_CHILD = "import os; print(os.sched_getscheduler(0))"
_ENGINE = (
    "import subprocess, sys; from mars_platform.cluster.scheduling import preempt_others;"
    f"preempt_others(); print(subprocess.check_output([sys.executable, '-c', {_CHILD!r}]).decode())"
)


def policy_of(code: str) -> int:
    """Return the scheduling policy that a new process prints."""
    return int(subprocess.check_output([sys.executable, "-c", code]))


def test_processes_started_in_the_block_wait_for_cores_unless_they_say_otherwise() -> None:
    before = os.sched_getscheduler(0)
    with children_wait_for_cores():
        assert policy_of(_CHILD) == os.SCHED_BATCH
        assert policy_of(_ENGINE) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == before
    assert policy_of(_CHILD) == before
