"""Part 1: is what runs on this GPU right, and how fast can the GPU be at all?"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import torch
from bench.gpu.kernels import TOLERANCES, differences
from bench.gpu.machine import ROOT, SOURCES
from bench.gpu.models import bench_model, memory_facts, seconds_of, weight_bytes
from bench.gpu.steps import Result, Setup, Step
from torch import Tensor

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.models import BenchModel
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.decoder.decoder import is_merged
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

_TESTS = ("tests/serve", "tests/train")
"""Folders with a conftest of their own, whose tests that need a GPU are run."""
_NEEDS_GPU = "not torch.cuda.is_available()"
"""Words of the files that hold such tests."""
_GAPS = {torch.bfloat16: 0.2, torch.float32: 2e-3}
"""How far below the best a chosen token's logit may be by the other implementation, in standard
deviations of the logits."""


def steps(setup: Setup) -> list[Step]:
    """Return the steps, the most telling first."""
    dtypes = (torch.float32,) if setup.is_tiny else (torch.bfloat16, torch.float32)
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in dtypes}
    folders = [name for name in _TESTS if name == "tests/serve" or not setup.is_tiny]
    return [
        Step("versions", versions, 30),
        Step("attention chosen", attention_chosen, 60),
        *[Step(f"kernels {names[t]}", partial(check_kernels, dtype=t), 120) for t in dtypes],
        *[Step(f"greedy {names[t]}", partial(check_greedy, dtype=t), 90) for t in dtypes],
        Step("ceilings", ceilings, 30),
        *[Step(f"GPU tests of {name}", partial(gpu_tests, folder=name), 180) for name in folders],
    ]


def versions(setup: Setup) -> Result:
    """Return the versions that results depend on, and the device."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if setup.device == "cuda":
        import triton

        device = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
            "gpu": device.name,
            "capability": f"{device.major}.{device.minor}",
            "multiprocessors": str(device.multi_processor_count),
        }
    return {**found, **memory_facts(setup)}


def attention_chosen(setup: Setup) -> Result:
    """Assert that an engine reads pages in place, with merged layers, wherever there is a GPU."""
    model = bench_model("0.5b", setup)
    engine = _engine(model)
    wanted = PagedAttention if setup.device == "cuda" else GatheredAttention
    found = type(engine.attention)
    assert found is wanted, f"{found.__name__} was chosen instead of {wanted.__name__}"
    merged = is_merged(engine._runner.model)
    assert merged == (setup.device == "cuda"), f"layers are {'' if merged else 'not '}merged"
    return {"attention": found.__name__, "merged": merged, "page_size": engine.page_size}


def check_kernels(setup: Setup, dtype: torch.dtype) -> Result:
    """Assert that each operator equals its oracle."""
    found = differences(setup.device, dtype, is_tiny=setup.is_tiny)
    limit = TOLERANCES[dtype]
    wrong = {name: value for name, value in found.items() if not value <= limit}
    assert not wrong, f"differ by more than {limit}: {wrong}"
    return {"limit": limit, "differences": found}


def check_greedy(setup: Setup, dtype: torch.dtype) -> Result:
    """Assert that the engine chooses tokens that transformers finds as good, and rates alike.

    Weights are random, and logits nearly tie: so transformers gets the engine's tokens and rates
    them, and each must be within a tolerance of the best.
    """
    model = bench_model("0.5b", setup, dtype)
    plain, engine = model.create(), _engine(model)
    engine.warm_up()
    lengths = (5, 20, 40) if setup.is_tiny else (5, 37, 256, 700)
    most = 8 if setup.is_tiny else 48
    source = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(4, model.checkpoint.config.vocab_size - 8, (length,), generator=source)
        for length in lengths
    ]
    found: Result = {"limit_gap": _GAPS[dtype]}
    for mode in (Mode.AR, Mode.EXACT):
        rows = [
            Request(f"{mode}{i}", prompt.tolist(), DecodingOptions(most, mode, num_logprobs=1))
            for i, prompt in enumerate(prompts)
        ]
        reported = _decode(engine, rows)
        outcomes = [_rate(plain, row, reported[row.id]) for row in rows]
        found[str(mode)] = {
            "tokens": sum(len(row.tokens) - row.num_prompt for row in rows),
            "equal_share": sum(each[0] for each in outcomes) / len(outcomes),
            "largest_gap": max(each[1] for each in outcomes),
            "largest_logprob_difference": max(each[2] for each in outcomes),
        }
        gap = found[str(mode)]["largest_gap"]
        assert gap <= _GAPS[dtype], f"mode {mode}: a token is {gap:.4f} below the best; {found}"
    return found


def _engine(model: BenchModel) -> Engine:
    settings = EngineSettings(
        max_num_seqs=8, num_pages=96, page_size=None, enable_prefix_caching=False
    )
    return Engine(model.checkpoint, settings, model=model.create(), device=model.device)


def _decode(engine: Engine, rows: list[Request]) -> dict[str, list[float]]:
    """Decode requests and return the log-probabilities of their tokens, by request."""
    reported: dict[str, list[float]] = {row.id: [] for row in rows}
    for row in rows:
        engine.add(row)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            reported[output.request_id] += [entry.logprob for entry in output.logprobs]
    return reported


@torch.inference_mode()
def _rate(
    plain: torch.nn.Module, row: Request, logprobs: list[float]
) -> tuple[float, float, float]:
    """Return the share of best tokens, the largest gap and the largest difference of a request."""
    device = next(plain.parameters()).device
    ids = torch.tensor([row.tokens], device=device)
    logits: Tensor = plain(input_ids=ids, use_cache=False).logits[0, row.num_prompt - 1 : -1]
    logits = logits.float()
    tokens = ids[0, row.num_prompt :, None]
    chosen = logits.gather(1, tokens)[:, 0]
    gaps = (logits.max(1).values - chosen) / logits.std(1)
    theirs = logits.log_softmax(-1).gather(1, tokens)[:, 0].cpu()
    difference = (theirs - torch.tensor(logprobs)).abs().max()
    return float((gaps == 0).float().mean()), float(gaps.max()), float(difference)


def ceilings(setup: Setup) -> Result:
    """Return the speeds that no step can exceed: copying, reading, and products of matrices."""
    num_bytes, side = (2**24, 256) if setup.is_tiny else (2**31, 8192)
    kind = torch.bfloat16 if setup.device == "cuda" else torch.float32
    large = torch.ones(num_bytes // 4, dtype=torch.float32, device=setup.device)
    target = torch.empty_like(large)
    one, other = torch.randn(2, side, side, device=setup.device).to(kind)
    repeats = 2 if setup.is_tiny else 8
    copy_s = seconds_of(lambda: target.copy_(large), setup, repeats)
    read_s = seconds_of(large.sum, setup, repeats)
    product_s = seconds_of(lambda: one @ other, setup, repeats)
    weights = weight_bytes(bench_model("7b", setup))
    return {
        "copy_gb_per_s": 2 * num_bytes / copy_s / 1e9,
        "read_gb_per_s": num_bytes / read_s / 1e9,
        "product_tflops": 2 * side**3 / product_s / 1e12,
        "weights_of_7b_ms": 1e3 * weights / (num_bytes / read_s),
    }


def gpu_tests(setup: Setup, folder: str) -> Result:
    """Run the tests that are skipped without a GPU, in a process of their own.

    The tests' own configuration is left out, since it needs plugins of pytest that may be missing.
    """
    base = ROOT / folder
    files = [path for path in base.rglob("test_*.py") if _NEEDS_GPU in path.read_text("utf-8")]
    if setup.is_tiny:
        files = sorted(files, key=lambda path: path.stat().st_size)[:1]
    paths = sorted(map(str, files))
    roots = [*SOURCES, ROOT, ROOT / "tests/support", ROOT / "tests/train"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-x" if setup.is_tiny else "-q"]
        command += ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(base)]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider"]
        command += ["-p", "bench.gpu.gpu_tests_only", f"--junitxml={report}", *paths]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
        run = subprocess.run(  # noqa: S603 - own command
            command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert report.exists(), f"pytest failed: {run.stdout[-2000:]}{run.stderr[-2000:]}"
        suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - own report
    assert suite is not None
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    assert counts["tests"], f"no test needs a GPU: {run.stdout[-2000:]}"
    assert not counts["failures"] + counts["errors"], f"{counts}: {run.stdout[-6000:]}"
    assert setup.device != "cuda" or not counts["skipped"], f"{counts}: {run.stdout[-2000:]}"
    return counts
