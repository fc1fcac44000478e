"""Triton kernels, in the interpreter, equal their twins in plain torch; and GPUs can have them.

The interpreter of versions before 3.9 fails on loops whose length a tensor gives. So one of its own
runs them, which `make test` installs beside the environment, where torch may need an older one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreted.attention_cases import CASES, TOLERANCES, Case

ROOT = Path(__file__).parents[4]

TRITON = ROOT / "build" / "triton"
HAS_OWN = (TRITON / "triton").is_dir()
IS_INSTALLED = importlib.util.find_spec("triton") is not None

needs_interpreter = pytest.mark.skipif(
    not HAS_OWN, reason="needs the Triton that make test installs in build/triton"
)
needs_triton = pytest.mark.skipif(
    not HAS_OWN and not IS_INSTALLED, reason="needs Triton, which make test installs"
)


def environment(variables: dict[str, str], *first: Path) -> dict[str, str]:
    """Variables of a process that finds what this one finds, behind some directories."""
    path = os.pathsep.join(map(str, [*first, *sys.path]))
    return {**os.environ, "PYTHONPATH": path, **variables}


COMPARE = """
import torch
from interpreted import acceptance_cases, adapter_cases, attention_cases, recurrence_cases

torch.set_num_threads(1)  # the tensors are tiny
for cases in (adapter_cases, acceptance_cases, recurrence_cases, attention_cases):
    cases.main()
"""


@pytest.fixture(scope="module")
def lines() -> list[Any]:
    """Run all comparisons, and return the lines of JSON that they print.

    They have a process of their own, since Triton reads TRITON_INTERPRET when it is imported and
    other tests must not see that.
    """
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=environment({"TRITON_INTERPRET": "1"}, TRITON),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_attention_equals_dense_attention(case: Case, lines: list[Any]) -> None:
    (result,) = [each for each in lines[3:] if each["id"] == case.id]
    assert "error" not in result, result["error"]
    assert result["difference"] < TOLERANCES[case.dtype]


@needs_interpreter
def test_the_kernel_of_an_adapter_equals_its_twin(lines: list[Any]) -> None:
    num_cases, largest = lines[0]
    assert num_cases == 27
    assert set(largest) == {"torch.float32", "torch.float16"}


@needs_interpreter
def test_proposals_and_confidences_equal_their_twins(lines: list[Any]) -> None:
    num_reads, num_nans, _ = lines[1]
    assert num_reads == 192
    assert num_nans == 48  # four damaged reads of eight, by three measures, four times


@needs_interpreter
def test_states_and_convolutions_equal_those_of_each_path(lines: list[Any]) -> None:
    assert lines[2] == 2


@needs_triton
def test_one_module_adds_the_kernels_of_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_INSTALLED:
        monkeypatch.syspath_prepend(TRITON)
    importlib.import_module("mars_serve.engine.kernels.gpu")
    operators = {name for name in torch._C._dispatch_get_all_op_names() if "marsray::" in name}
    on_cpu, on_gpu = (
        {name for name in operators if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
        for key in ("CPU", "CUDA")
    )
    assert {"marsray::paged_attention", "marsray::propose"} <= on_cpu
    assert on_cpu <= on_gpu


@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    script = ROOT / "bench" / "kernels" / "compile.py"
    command = [sys.executable, str(script), "--capability", "9.0", "--quick"]
    variables = environment({"TRITON_CACHE_DIR": str(tmp_path)}, *[TRITON][IS_INSTALLED:])
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = {line.split(" | ")[1] for line in done.stdout.splitlines() if " | 9.0 | " in line}
    assert kernels == {
        "add_low_rank_kernel",
        "attend_kernel",
        "combine_kernel",
        "combine_pieces_kernel",
        "convolve_kernel",
        "scan_kernel",
        "summarize_kernel",
    }
