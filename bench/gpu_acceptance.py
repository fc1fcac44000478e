"""Checks and measures everything that needs a GPU, within some minutes.

    python bench/gpu_acceptance.py --out results
    python bench/gpu_acceptance.py --device cpu --tiny      # does this program work?

The parts are files of tests in ``bench/gpu``, and the suite's tests that are skipped without a
GPU. Each runs by pytest in a process of its own, so that one that crashes or hangs loses its own
running test only. ``acceptance.json`` in ``--out`` has every figure and every failure as they come;
the exit status is 1 if a test failed. ``--budget-s`` bounds the whole run: each part gets a share
of the time that is left, and what is not begun by then is left out.

The working tree is enough: the package need not be installed, and Ray and HTTP libraries are not
needed. For a machine without internet see ``bench/gpu_wheels.sh``.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "build/gpu-packages"
"""Where ``bench/gpu_wheels.sh`` puts the packages that the machine lacks."""
_SOURCES = [ROOT / name for name in ("platform", "train", "serve", "autoscale")]
_NEEDED = ("torch", "transformers", "accelerate", "pyarrow", "rich", "typer", "pytest")
_CARRIED = ("pydantic", "llguidance", "prometheus_client", "platformdirs", "peft")
"""Modules that ``bench/gpu_wheels.sh`` fetches for machines that lack them."""
_TOLD = ("torch", "triton", "transformers", "numpy", "pydantic", "llguidance")
_GRACE_S = 20.0
"""Seconds for which a part's running test may go on when its time is over."""


@dataclass(frozen=True)
class Part:
    """Tests that share a process."""

    folder: str
    """Folder whose tests they are; only its own conftests are loaded."""
    files: tuple[str, ...]
    share: float
    """Share of the time left that the part may take."""
    chosen: str = ""
    """Expression that chooses tests by name."""
    gpu_tests_only: bool = False
    """Whether only tests that are skipped without a GPU are run."""

    def command(self, results: Path, until_s: float, device: str, *, tiny: bool) -> list[str]:
        """Return the command line; the suite's own configuration needs plugins and is left out."""
        folder = ROOT / self.folder
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
        command += ["--confcutdir", str(folder), "--import-mode=importlib"]
        command += ["-p", "no:cacheprovider", "-p", "bench.gpu.plugin"]
        command += ["--results", str(results), "--until", str(until_s), "--device", device]
        command += ["-k", self.chosen] if self.chosen else []
        command += ["--tiny"] * tiny + ["--gpu-tests-only"] * self.gpu_tests_only
        return [*command, *(str(folder / file) for file in self.files)]


def _gpu_tests(folder: str, share: float) -> Part:
    """Return the suite's tests of a folder that are skipped without a GPU."""
    needs = "not torch.cuda.is_available()"
    files = [
        path for path in (ROOT / folder).rglob("test_*.py") if needs in path.read_text("utf-8")
    ]
    names = tuple(sorted(str(path.relative_to(ROOT / folder)) for path in files))
    assert names, f"no test of {folder} needs a GPU"
    return Part(folder, names, share, gpu_tests_only=True)


def parts() -> dict[str, Part]:
    """Return the parts by name, in the order in which they run."""
    own = "bench/gpu"
    return {
        "checks": Part(own, ("checks.py",), 0.3),
        "decoding 7b": Part(own, ("decoding.py",), 0.5, "7b"),
        "decoding 0.5b": Part(own, ("decoding.py",), 0.3, "0.5b"),
        "training": Part(own, ("training.py",), 0.4),
        "processes": Part(own, ("processes.py",), 0.4),
        "tests of serving": _gpu_tests("tests/serve", 0.8),
        "tests of training": _gpu_tests("tests/train", 1.0),
    }


def run_part(name: str, part: Part, until_s: float, results: Path, device: str, tiny: bool) -> None:
    """Run a part in a process of its own, and enter what became of tests that did not end."""
    from bench.gpu.plugin import FAILED, LEFT_OUT, PLANNED, RUNNING, Results

    if time.time() > until_s:
        Results(results).enter(name, state=LEFT_OUT, reason="the run's time was over")
        return
    part_until_s = time.time() + part.share * (until_s - time.time())
    roots = [*_SOURCES, ROOT, ROOT / "tests/support", ROOT / "tests/train"]
    roots += [PACKAGES] if str(PACKAGES) in sys.path else []
    roots += [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    process = subprocess.Popen(  # noqa: S603 - own command
        part.command(results, part_until_s, device, tiny=tiny),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        end = f"the process ended with status {process.wait(part_until_s + _GRACE_S - time.time())}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end = "the part's time was over"
    found = Results(results)
    for test, facts in found.tests.items():
        if facts["state"] == RUNNING:
            found.enter(test, state=FAILED, error=end)
        elif facts["state"] == PLANNED:
            found.enter(test, state=LEFT_OUT, reason=end)
    if process.returncode not in (0, 1, -signal.SIGKILL):  # 0 and 1: the tests have their results
        found.enter(name, state=FAILED, error=end)


def problem(device: str) -> str | None:
    """Return what the machine lacks and the remedy, or None if it lacks nothing."""
    missing = [name for name in (*_NEEDED, *_CARRIED) if find_spec(name) is None]
    if missing:
        return (
            f"missing packages: {', '.join(missing)}. Install them; without internet, get "
            f"{', '.join(_CARRIED)} by `sh bench/gpu_wheels.sh` elsewhere and copy {PACKAGES} here"
        )
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return (
            "--device cuda: torch finds no GPU here; take another machine, or --device cpu --tiny"
        )
    return None


def main() -> int:
    """Run the parts that the arguments name, and return the exit status."""
    sys.path[:0] = [str(ROOT), *map(str, _SOURCES)]
    if any(find_spec(name) is None for name in _CARRIED):
        sys.path.append(str(PACKAGES))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default = os.environ.get("OUT", "gpu_acceptance")
    parser.add_argument("--out", type=Path, default=Path(default), help="folder of the results")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds of the whole run")
    parser.add_argument("--part", action="append", choices=[*parts()], help="part; by default all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try the program")
    chosen = parser.parse_args()
    message = problem(chosen.device)
    if message is not None:
        print(message, file=sys.stderr)
        return 2
    until_s, results = time.time() + chosen.budget_s, chosen.out.resolve() / "acceptance.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    about = {each.name: each.version for each in distributions() if each.name in _TOLD}
    about |= {"python": platform.python_version(), "device": chosen.device}
    about["sizes"] = "tiny" if chosen.tiny else "full"
    results.write_text(json.dumps({"identity": about, "tests": {}}), encoding="utf-8")
    for name, part in parts().items():
        if chosen.part is None or name in chosen.part:
            run_part(name, part, until_s, results, chosen.device, chosen.tiny)
    tests: dict[str, Any] = json.loads(results.read_text("utf-8"))["tests"]
    for name, facts in tests.items():
        print(f"{facts['state']:9} {name}")
    print(results)
    bad = ("failed", "skipped") if chosen.device == "cuda" else ("failed",)
    return int(any(facts["state"] in bad for facts in tests.values()))


if __name__ == "__main__":
    raise SystemExit(main())
