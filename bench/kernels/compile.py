"""Compiles the engine's Triton kernels for GPUs that need not be there, and tells what they take.

    python bench/kernels/compile.py --capability 8.0 --capability 9.0 --only "7B"

Prints a table: the warps of a block, the registers and the bytes of stack of a thread, to which
registers spill, and the shared memory of a block. Needs Triton (on a machine without a GPU:
``pip install triton``). To use another version, put it before the installed one on ``PYTHONPATH``.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from launches import LAUNCHES, QUICK, Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from mars_serve.engine.attention import paged
from mars_serve.engine.kernels import attention_triton
from mars_serve.engine.kernels.attention import LARGE_MEMORY

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0")
SHARED = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory that a block may take, by compute capability."""


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def recorded(launch: Launch, capability: tuple[int, int]) -> list[Kernel]:
    """Return the kernels that a launcher launches on a GPU of a compute capability."""
    kernels: list[Kernel] = []
    is_large = capability in LARGE_MEMORY

    def run(function: Any, *arguments: Any, **options: Any) -> None:
        del options["grid"], options["warmup"]
        kernels.append(Kernel(function, arguments, options))

    with (
        patch.object(JITFunction, "run", run),
        patch.object(attention_triton, "has_large_memory", lambda _: is_large),
        patch.object(paged, "has_large_memory", lambda _: is_large),
    ):
        launch()
    return kernels


def compiled(kernel: Kernel, capability: tuple[int, int]) -> Any:
    """Compile a kernel as its launch on such a GPU would."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend, function = make_backend(target), kernel.function
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*kernel.arguments, **kernel.options)
    packed = function._pack_args(backend, kernel.options, bound, specialization, options)
    options, signature, constexprs, attributes = packed
    source = ASTSource(function, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def resources(kernel: Any) -> tuple[int, int]:
    """Return a compiled kernel's registers and its bytes of stack, for each thread."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output([str(tools / "cuobjdump"), "-res-usage", file.name])
    registers, stack = (int(_found(rf"{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    return registers, stack


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout + done.stderr


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]


def rows(names: Iterable[str], capabilities: list[tuple[int, int]]) -> Iterator[tuple[Any, ...]]:
    """Yield launch, kernel, capability, warps, registers, stack, shared memory and seconds."""
    for name, capability in product(names, capabilities):
        if "8-bit" in name and capability < (8, 9):
            continue  # such GPUs cannot convert these numbers
        for kernel in recorded(LAUNCHES[name], capability):
            started = time.perf_counter()
            binary = compiled(kernel, capability)
            seconds = time.perf_counter() - started
            shared = binary.metadata.shared
            assert shared <= SHARED[capability] * 1024, f"{name}: {shared} bytes do not fit"
            registers, stack = resources(binary)
            yield (
                name,
                kernel.function.__name__,
                f"{capability[0]}.{capability[1]}",
                binary.metadata.num_warps,
                registers,
                stack,
                f"{shared / 1024:.1f}",
                f"{seconds:.1f}",
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of launches to compile")
    parser.add_argument("--quick", action="store_true", help="compile a few launches only")
    parser.add_argument("--capability", action="append", help=f"by default {CAPABILITIES}")
    options = parser.parse_args()
    asked = options.capability or CAPABILITIES
    capabilities = [tuple(int(part) for part in each.split(".")) for each in asked]
    print(f"Triton {triton.__version__}, Python {sys.version.split()[0]}\n")
    print("| launch | kernel | capability | warps | registers | stack, B | shared, KiB | s |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    names = QUICK if options.quick else [name for name in LAUNCHES if options.only in name]
    for row in rows(names, capabilities):
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
