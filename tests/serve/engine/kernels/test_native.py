"""Functions of C++ compute what torch does, and are compiled and kept where that can be done."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.attention_steps import AttentionStep
from decoding.engine_requests import make_request
from decoding.engines import Engines, Models, oracle, passes_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.native import NativeAttention
from mars_serve.engine.decoder.merged import MergedLayer
from mars_serve.engine.execution.linear import NativeLinear, pack_linears
from mars_serve.engine.kernels import native as native_module
from mars_serve.engine.kernels.native import Native, native_for, why_not_native

CPU = torch.device("cpu")
SIZES = [1, 15, 16, 17, 40]
EPSILON = 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    found: torch.dtype = request.param
    return found


@pytest.fixture
def native(dtype: torch.dtype) -> Native:
    found = native_for(CPU, dtype)
    assert found is not None, why_not_native(CPU, dtype)
    return found


def check(own: Tensor, exact: Tensor) -> None:
    """Compare numbers with those of float32."""
    tolerance = 2e-6 if own.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(own.float(), exact, rtol=tolerance, atol=2e-6, equal_nan=True)


def normed(inputs: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(inputs.float(), weight.shape, weight, EPSILON)


def gated(inputs: Tensor) -> Tensor:
    gate, up = inputs.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated(heads: Tensor, rotation: Tensor) -> Tensor:
    cosines, sines = rotation.float()[..., None, :]
    first, second = heads.float().chunk(2, dim=-1)
    return heads.float() * cosines + torch.cat((-second, first), dim=-1) * sines


@pytest.mark.parametrize("num_rows", [1, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_added_normed_and_gated(
    native: Native, dtype: torch.dtype, size: int, num_rows: int
) -> None:
    inputs, added = torch.randn(2, 1, num_rows, 2 * size, dtype=dtype)
    weight = torch.randn(2 * size)
    check(native.norm(inputs, weight, EPSILON), normed(inputs, weight))
    sums, outputs = native.add_norm(inputs, added, weight, EPSILON)
    assert torch.equal(sums, inputs + added)
    check(outputs, normed(sums, weight))
    check(native.gate(4 * inputs), gated(4 * inputs))


@pytest.mark.parametrize("num_rows", [0, 1, 6, 7, 13, 38])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (66, 63), (64, 64), (160, 130)])
def test_rows_are_multiplied_each_by_itself(
    native: Native, dtype: torch.dtype, num_inputs: int, num_outputs: int, num_rows: int
) -> None:
    inputs = torch.randn(1, num_rows, num_inputs, dtype=dtype)
    layer = nn.Linear(num_inputs, num_outputs, dtype=dtype)
    if num_rows > 1:
        inputs[0, 1, 1] = torch.nan
    own = NativeLinear(layer, native)
    outputs = own(inputs)
    exact = layer.double()(inputs.double())
    tolerance = 3e-6 if dtype == torch.float32 else 2**-7
    assert outputs.dtype == dtype
    torch.testing.assert_close(
        outputs.double(), exact, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    for row in range(num_rows):
        torch.testing.assert_close(
            own(inputs[:, row]), outputs[:, row], rtol=0, atol=0, equal_nan=True
        )


class Router(nn.Module):
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = (nn.Linear(512, 1024).requires_grad_(False) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.experts.weight) + self.shared(inputs)


def test_a_layer_whose_weight_is_read_stays_as_it_is() -> None:
    model: Any = Router()
    inputs, shared = torch.randn(3, 512), model.shared
    expected = model(inputs)
    pack_linears(model, timed=False)
    assert model.shared is not shared, "others are packed"
    torch.testing.assert_close(model(inputs), expected)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("head_dim", [2, 30, 32, 34, 80])
def test_heads_are_rotated_in_place_and_values_left_alone(
    native: Native, dtype: torch.dtype, head_dim: int, num_rows: int, has_norms: bool
) -> None:
    heads = torch.randn(num_rows, 7, head_dim, dtype=dtype)
    rotation, weights = torch.randn(2, num_rows, head_dim).to(dtype), torch.randn(2, head_dim)
    query, key, value = (part.clone() for part in heads.split([4, 2, 1], dim=1))
    if has_norms:
        query, key = (
            normed(part, weight).to(dtype)
            for part, weight in zip((query, key), weights, strict=True)
        )
    norms = [(weight, EPSILON) if has_norms else None for weight in weights]

    native.rotate(heads.view(num_rows, -1), (rotation[0], rotation[1]), [4, 2], *norms)

    exact = rotated(torch.cat((query, key), dim=1), rotation)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(heads[:, :6].float(), exact, rtol=tolerance, atol=3 * tolerance)
    assert torch.equal(heads[:, 6:], value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 3, 18, 21, 37])
def test_numbers_that_are_not_finite_stay_so_and_in_their_row(
    native: Native, dtype: torch.dtype, place: int, bad: float
) -> None:
    inputs, weight = torch.randn(5, 38, dtype=dtype), torch.ones(38)
    inputs[2, place] = bad
    check(native.norm(inputs, weight, EPSILON), normed(inputs, weight))
    sums, outputs = native.add_norm(inputs, inputs, weight, EPSILON)
    check(sums, 2 * inputs.float())
    check(outputs, normed(sums, weight))
    check(native.gate(inputs), gated(inputs))
    rotation = torch.randn(2, 5, 38, dtype=dtype)
    exact = rotated(inputs[:, None], rotation)[:, 0]
    native.rotate(inputs, (rotation[0], rotation[1]), [1, 0])
    assert torch.equal(inputs.isnan(), exact.isnan())
    assert torch.equal(inputs.isinf(), exact.isinf())


@pytest.mark.parametrize("number", [-3e38, -1e20, -100.0, 100.0, 1e20])
def test_the_largest_numbers_are_gated(native: Native, dtype: torch.dtype, number: float) -> None:
    inputs = torch.tensor([[number] * 17 + [1.0] * 17], dtype=dtype)
    check(native.gate(inputs), gated(inputs))


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def test_a_row_depends_on_no_other_row_and_no_number_of_threads(
    native: Native, dtype: torch.dtype
) -> None:
    inputs, weight = torch.randn(600, 34, dtype=dtype), torch.randn(34)

    def computed(rows: Tensor) -> list[Tensor]:
        turned, rotation = rows.clone(), (inputs[:1].expand(len(rows), -1).contiguous(),) * 2
        native.rotate(turned, rotation, [1, 0], (weight, EPSILON))
        sums = native.add_norm(rows, rows, weight, EPSILON)
        return [turned, *sums, native.norm(rows, weight, EPSILON), native.gate(rows)]

    expected = computed(inputs)
    with threads(3):
        together = computed(inputs)
    alone = zip(*(computed(row[None]) for row in inputs), strict=True)
    for rows, other, singly in zip(expected, together, alone, strict=True):
        assert torch.equal(rows, other)
        assert torch.equal(rows, torch.cat(singly))


def test_callers_do_not_disturb_each_other_nor_a_forked_process(
    native: Native, dtype: torch.dtype
) -> None:
    layer = NativeLinear(nn.Linear(66, 3000, dtype=dtype), native)
    batches = [torch.randn(num_rows, 66, dtype=dtype) for num_rows in (1, 2, 7, 40)]
    with threads(1):
        expected = [layer(batch).view(torch.int16).numpy() for batch in batches]

    def differs(index: int) -> bool:
        torch.set_num_threads(3)
        # torch's own functions with threads wait for ever in a forked process
        found = layer(batches[index % 4]).view(torch.int16).numpy()
        return not np.array_equal(found, expected[index % 4])

    with threads(3), ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(differs, range(400)))
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(any(map(differs, range(40))))
        assert os.waitpid(child, 0)[1] == 0


def test_attention_of_a_row_depends_on_no_other_row_and_no_number_of_threads(
    native: Native, dtype: torch.dtype
) -> None:
    step = AttentionStep([(90, 1, (3,)), (7, 1, (0,)), (3, 40, (2,))], CPU, dtype)
    sizes = {"num_pages": step.num_pages, "page_size": step.page_size}
    attention = NativeAttention(step.group, native=native, **sizes, **step.types)
    cached = [part.transpose(2, 3) for part in (attention.keys, attention.values)]
    expected = step.attend(attention, cached)
    for row in step.batch.rows[1:]:
        own = slice(row.start, row.start + row.length)
        for part in (step.query, step.key, step.value):
            part[own] = torch.inf
        for pages in step.pages:
            pages[row.pages] = torch.nan
    with threads(3):
        changed = step.attend(attention, cached)
    end = step.batch.rows[1].start
    assert torch.equal(expected[:end], changed[:end])
    assert changed[end:].isnan().all()


@contextmanager
def memory_left(num_bytes: int) -> Iterator[None]:
    """Let this process allocate so many bytes more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_short_memory_is_an_error_in_each_thread(native: Native, dtype: torch.dtype) -> None:
    logits, divisors = torch.zeros(2, 2**24, dtype=dtype), np.ones(2, np.float32)
    with threads(2), memory_left(2**25), pytest.raises(MemoryError, match="a function of C"):
        native.propose(logits, torch.tensor([0]), divisors)
    step = AttentionStep([(0, 1, (0,))], CPU, dtype, num_heads=96, num_kv_heads=1, head_dim=2**18)
    sizes = {"num_pages": step.num_pages, "page_size": step.page_size}
    attention = NativeAttention(step.group, native=native, **sizes, **step.types)
    cached = [part.transpose(2, 3) for part in (attention.keys, attention.values)]
    with memory_left(110 * 2**20), pytest.raises(MemoryError, match="a function of C"):
        step.attend(attention, cached)


def test_a_row_has_pages_for_all_its_tokens(native: Native, dtype: torch.dtype) -> None:
    step = AttentionStep([(90, 1, (0,))], CPU, dtype)
    sizes = {"num_pages": step.num_pages, "page_size": step.page_size}
    attention = NativeAttention(step.group, native=native, **sizes, **step.types)
    del step.batch.rows[0].pages[1:]
    with pytest.raises(AssertionError, match="pages for all its tokens"):
        attention.prepare(step.batch)


# Compilation

COMPILER = """#!/bin/bash
echo "$@" >> "{directory}/calls"
case "$*" in
  *--version*) echo of tests ;;
  *-shared*) cp "{library}" "${{@: -1}}" ;;
esac
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions for float32, not optimised and so compiled in little time."""
    path = tmp_path_factory.mktemp("library") / "native.so"
    source = Path(native_module.__file__).with_name("native.cpp")
    options = ["-std=c++17", "-fPIC", "-pthread", "-shared", "-DNUMBER_FLOAT32"]
    gxx = shutil.which("g++")
    assert gxx is not None
    subprocess.run([gxx, *options, source, "-o", path], check=True)
    return path


class Machine:
    """A compiler that copies a library, a cache directory, and what came of them."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.compiler, self.kept = directory / "compiler", directory / "cache" / "marsray"
        self._calls = directory / "calls"
        self.write(COMPILER.format(directory=directory, library=library))

    def write(self, script: str) -> None:
        self.compiler.write_text(script)
        self.compiler.chmod(0o755)

    @property
    def files(self) -> list[str]:
        return sorted(each.name for each in self.kept.iterdir())

    @property
    def num_compiled(self) -> int:
        return self._calls.read_text().count("-shared") if self._calls.exists() else 0

    def start(self) -> str | None:
        """Look for the functions as a new process does; return why there are none."""
        native_module._load.cache_clear()
        native = native_for(CPU, torch.float32)
        if native is not None:
            inputs = torch.randn(2, 34)
            check(native.gate(inputs), gated(inputs))
        return why_not_native(CPU, torch.float32)


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path, library)
    monkeypatch.setenv("CXX", f"{machine.compiler} -pipe")
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.kept.parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield machine
    native_module._load.cache_clear()


def test_functions_are_compiled_once_and_kept_for_their_user_alone(machine: Machine) -> None:
    machine.write(machine.compiler.read_text().replace("case", "umask 0; case"))
    assert machine.start() is None
    assert machine.start() is None
    assert machine.num_compiled == 1
    (name,) = machine.files
    assert (machine.kept / name).stat().st_mode & 0o777 == 0o700
    assert machine.kept.stat().st_mode & 0o777 == 0o700


def test_another_processor_compiler_or_option_has_functions_of_its_own(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.start()
    processor = tmp_path / "cpuinfo"
    processor.write_text("processor : 0\nflags : fpu sse2\n")
    monkeypatch.setattr(native_module, "_PROCESSOR", processor)
    machine.start()
    machine.write(machine.compiler.read_text().replace("of tests", "of later tests"))
    machine.start()
    monkeypatch.setenv("CXX", f"{machine.compiler} -g")
    machine.start()
    assert machine.num_compiled == len(machine.files) == 4


def test_nothing_is_kept_for_a_processor_that_is_not_known(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_module, "_PROCESSOR", tmp_path / "missing")
    assert machine.start() is None
    assert machine.start() is None
    assert machine.num_compiled == 2
    assert not machine.kept.exists()


def test_libraries_of_older_sources_are_removed(machine: Machine) -> None:
    machine.kept.mkdir(mode=0o700, parents=True)
    sources = Path(native_module.__file__).parent.glob("*.[ch]*")
    changed_s = max(each.stat().st_mtime for each in sources)
    for name, made_s in (("native-old.so", changed_s - 1), ("native-new.so", changed_s + 1)):
        (machine.kept / name).touch()
        os.utime(machine.kept / name, (made_s, made_s))
    assert machine.start() is None
    assert len(machine.files) == 2
    assert "native-new.so" in machine.files


def test_a_damaged_library_is_compiled_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.start()
    (name,) = machine.files
    machine.kept = machine.kept.with_name("other") / "marsray"  # the first library stays loaded
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.kept.parent))
    machine.kept.mkdir(mode=0o700, parents=True)
    (machine.kept / name).write_bytes(b"\x7fELF")
    assert machine.start() is None
    assert machine.start() is None
    assert (machine.num_compiled, machine.files) == (2, [name])


def share(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o770)


def give_away(directory: Path) -> None:
    if os.geteuid():
        directory.parent.mkdir()
        directory.symlink_to("/usr")
    else:
        directory.mkdir(parents=True)
        os.chown(directory, 1, 1)


def make_a_file(directory: Path) -> None:
    directory.parent.write_text("")


@pytest.mark.parametrize("spoil", [share, give_away, make_a_file])
def test_a_directory_that_is_not_the_users_own_is_not_used(machine: Machine, spoil: object) -> None:
    assert callable(spoil)
    spoil(machine.kept)
    before = sorted(machine.kept.parent.parent.rglob("*"))
    assert machine.start() is None
    assert machine.start() is None
    assert machine.num_compiled == 2
    calls = machine.compiler.with_name("calls")
    assert sorted({*machine.kept.parent.parent.rglob("*")} - {calls}) == before


def test_processes_that_compile_at_once_do_not_harm_each_other(machine: Machine) -> None:
    meet = f'echo >> "{machine.compiler}.met"; while [ $(wc -l < "{machine.compiler}.met") -lt 2 ]'
    machine.write(machine.compiler.read_text().replace("cp ", f"{meet}; do sleep .01; done; cp "))
    machine.kept.mkdir(mode=0o700, parents=True)
    arguments = (str(machine.compiler),), machine.kept
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(native_module._load.__wrapped__, *arguments) for _ in range(2)]
        assert all(isinstance(each.result(), Native) for each in both)
    assert (machine.num_compiled, len(machine.files)) == (2, 1)


def test_a_thread_waits_for_one_that_compiles(machine: Machine) -> None:
    machine.write(machine.compiler.read_text().replace("cp ", "sleep .2; cp "))
    native_module._load.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: native_for(CPU, torch.float32), range(4))
        assert len({*found}) == machine.num_compiled == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "no C++ compiler was found"),
        ("#!/bin/sh\nexit 3\n", "could not be compiled: Command"),
        ("#!/bin/sh\necho no memory >&2; exit 1\n", "could not be compiled: no memory"),
        ("#!/bin/sh\nprintf '\\377' >&2; kill -9 $$\n", "could not be compiled: \ufffd"),
        ("#!/bin/sh\n", "could not be compiled: [Errno 2]"),
        ("no program\n", "could not be compiled: [Errno 8]"),
    ],
)
def test_why_there_are_no_functions_is_told(
    machine: Machine, caplog: pytest.LogCaptureFixture, script: str | None, words: str
) -> None:
    if script is None:
        machine.compiler.unlink()
    else:
        machine.write(script)
    assert words in str(machine.start())
    assert script is None or words in caplog.text
    assert not machine.kept.exists() or machine.files == []


def test_an_engine_answers_without_a_compiler(
    tiny_model: Models, make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset({0, 3}))
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = make_engine(tiny_model("qwen2"), special)
    assert isinstance(engine.attention, GatheredAttention)
    assert isinstance(engine._runner.model.model.layers[0], MergedLayer)
    request = make_request("one", [5, 6, 7], max_tokens=8)
    passes = passes_of(run(engine, [request]))
    assert passes["one"] == oracle(tiny_model("qwen2"), request, special)
