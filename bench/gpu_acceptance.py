"""Checks and measures everything that needs a GPU, in three parts of at most 7 minutes.

    python bench/gpu_acceptance.py --part 1          # are the numbers right?
    python bench/gpu_acceptance.py --part 2          # how near to the hardware's bounds, how fast?
    python bench/gpu_acceptance.py --part 3          # training, several engines on one GPU
    python bench/gpu_acceptance.py --part all --device cpu --tiny     # does this program work?

Results come into ``--out`` as they are found: a file of JSON for each part, and the page
``acceptance.md`` with goals met, missed or not measured. A part that is started again goes on where
it was, as long as sources, packages and GPU are the same; what failed or was left out for lack of
time is tried again. On a GPU, the steps run in processes of their own, so that one that crashes or
hangs costs itself only. The exit status is 1 if a step failed.

The package need not be installed, and Ray and HTTP libraries are not needed. For a machine
without internet see ``bench/gpu_wheels.sh``.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(_ROOT),
    *(str(_ROOT / name) for name in ("platform", "train", "serve", "autoscale")),
]

from bench.gpu.machine import identity, missing_packages  # noqa: E402 -- needs the path above
from bench.gpu.page import page  # noqa: E402
from bench.gpu.steps import (  # noqa: E402
    FAILED,
    Results,
    Setup,
    read_results,
    run_steps,
    watch,
    write_whole,
)

_PAGE = "acceptance.md"


@dataclass(frozen=True)
class Group:
    """Steps that share a process, and what is slow to make."""

    part: int
    module: str
    arguments: tuple[str, ...] = ()
    share: float = 1.0
    """Share of the part's time left that the group may take."""


GROUPS = {
    "checks": Group(1, "checks"),
    "decoding 7b": Group(2, "decoding", ("7b",), share=0.65),
    "decoding 0.5b": Group(2, "decoding", ("0.5b",)),
    "training": Group(3, "training", share=0.6),
    "processes": Group(3, "processes"),
}


@dataclass(frozen=True)
class Run:
    """One run of some parts."""

    out: Path
    device: str
    is_tiny: bool
    facts: dict[str, str]
    since_s: float

    def results(self, part: int) -> Results:
        """Read the results of a part."""
        return Results(self.out / f"part{part}.json", self.facts)

    def run_group(self, name: str, deadline_s: float, *, ends_late_steps: bool) -> int:
        """Run the steps of a group here; return an exit status."""
        group = GROUPS[name]
        if self.is_tiny:
            import_module("torch").set_num_threads(1)
        setup = Setup(self.device, self.is_tiny)
        steps = import_module(f"bench.gpu.{group.module}").steps(setup, *group.arguments)
        return run_steps(
            steps,
            setup,
            self.results(group.part),
            since_s=self.since_s,
            deadline_s=deadline_s,
            ends_late_steps=ends_late_steps,
        )

    def start_group(self, name: str, deadline_s: float) -> subprocess.Popen[bytes]:
        """Start a process that runs the steps of a group."""
        command = [sys.executable, __file__, "--out", str(self.out), "--device", self.device]
        command += ["--tiny"] if self.is_tiny else []
        command += ["--group", name, "--since", str(self.since_s), "--until", str(deadline_s)]
        return subprocess.Popen(command, start_new_session=True)  # noqa: S603 - own command

    def run_part(self, part: int, budget_s: float, *, isolated: bool) -> None:
        """Run the groups of a part within a number of seconds."""
        until_s = time.time() + budget_s
        for name, group in GROUPS.items():
            if group.part != part:
                continue
            deadline_s = time.time() + group.share * (until_s - time.time())
            if isolated:
                start = partial(self.start_group, name, deadline_s)
                watch(start, partial(self.results, part), name, deadline_s)
            else:
                self.run_group(name, deadline_s, ends_late_steps=False)
            self.write_page()

    def write_page(self) -> None:
        """Write the page of all parts that have results."""
        files = sorted(self.out.glob("part*.json"))
        contents = [content for content in map(read_results, files) if content]
        write_whole(self.out / _PAGE, page(contents))


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["1", "2", "3", "all"], default="all")
    default = os.environ.get("OUT", "gpu_acceptance")
    parser.add_argument("--out", type=Path, default=Path(default), help="folder for results")
    parser.add_argument("--earlier", type=Path, help="folder with results to go on from")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try the program")
    parser.add_argument("--budget-s", type=_seconds, default=390.0, help="seconds of each part")
    parser.add_argument(
        "--isolate", action="store_true", help="run groups in processes of their own on a CPU, too"
    )
    for name, kind in (("group", str), ("since", float), ("until", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.earlier is not None and not chosen.earlier.is_dir():
        parser.error(f"--earlier: there is no folder {chosen.earlier}; name one with results")
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {chosen.out} cannot be made ({error.strerror}); name another folder")
    return chosen


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a positive number of seconds, not {text}")
    return value


def _missing(device: str) -> str | None:
    """Return what the machine lacks and the remedy, or None if it lacks nothing."""
    message = missing_packages()
    if message is None and device == "cuda" and not import_module("torch").cuda.is_available():
        return (
            "--device cuda: torch finds no GPU here; use a machine with one, or --device cpu --tiny"
        )
    return message


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that the arguments name, and return the exit status."""
    chosen = _arguments(arguments)
    message = _missing(chosen.device)
    if message is not None:
        print(message, file=sys.stderr)
        return 2
    facts = {**identity(), "device": chosen.device, "sizes": "tiny" if chosen.tiny else "full"}
    run = Run(chosen.out, chosen.device, chosen.tiny, facts, chosen.since or time.time())
    if chosen.group is not None:
        return run.run_group(chosen.group, chosen.until, ends_late_steps=True)
    for file in sorted(chosen.earlier.glob("part*.json")) if chosen.earlier else []:
        if not (run.out / file.name).exists():
            shutil.copyfile(file, run.out / file.name)
    parts = [1, 2, 3] if chosen.part == "all" else [int(chosen.part)]
    for part in parts:
        run.run_part(part, chosen.budget_s, isolated=chosen.isolate or chosen.device == "cuda")
    print(run.out / _PAGE)
    steps = [step for part in parts for step in run.results(part).steps.values()]
    return int(any(step["state"] == FAILED for step in steps))


if __name__ == "__main__":
    raise SystemExit(main())
