"""The demo from beginning to end: data, training, serving, measuring, and a clean end."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console

from mars_platform.cli.progress import progress_display
from mars_platform.cli.report import Column, interval, table_of, write_json
from mars_platform.cli.shading import print_shaded
from mars_platform.cluster.processes import free_port
from mars_platform.cluster.ray_private import worker_start_variables
from mars_platform.demo.measure import DemoResult, DemoSetting, measure, read_items, stream_passes
from mars_platform.demo.server import run_command, running_server
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import paired_difference

_AR_SFT = DemoSetting("ar-sft", Mode.AR, 1.0)
_ONE_TOKEN = DemoSetting("mars", Mode.AR, 1.0)
_EXACT = DemoSetting("mars", Mode.EXACT, 1.0)
_THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
_SHOWN = DemoSetting("mars", Mode.THRESHOLD, 0.95)
"""Setting of the one answer that is printed pass by pass."""
_NUM_EXAMPLES = 40_000


@dataclass
class _Demo:
    """The demo while it runs."""

    console: Console
    work: Path
    """Directory of data, runs and models."""
    environment: dict[str, str]
    """Variables of the commands that the demo starts."""
    num_items: int
    """Number of held-out questions."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 1)


def run_demo(
    console: Console, *, keep: Path | None, json_file: Path | None, num_items: int
) -> None:
    """Run the demo and print its results.

    Args:
        console: console to print on.
        keep: new directory that keeps the data and the checkpoint; None keeps nothing.
        json_file: file that the results are also written to.
        num_items: number of held-out questions.

    Raises:
        UserError: the directory to keep is not empty, or the file cannot be written.
        CommandFailed: one of the commands failed.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UserError(f"--keep: {keep} is not empty; name a new directory")
    with _work_directory(keep) as work, _ray_environment() as environment:
        demo = _Demo(console, work, environment, num_items)
        with demo.timed("total"):
            _make_model(demo)
            results, question, passes = _ask_server(demo)
    console.rule("4  result")
    console.print(f"one answer at τ = {_SHOWN.threshold:g}, by forward pass:", highlight=False)
    console.print(f"  {question}", highlight=False)
    print_shaded(console, passes)
    _print_table(console, results)
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in demo.seconds.items())
    console.print(f"time: {spent}", highlight=False)
    if json_file is not None:
        write_json(json_file, _figures(results, demo.seconds), indent=2)
    if keep is not None:
        console.print(f"kept: {keep}/model, {keep}/data/eval.jsonl", highlight=False)


def _make_model(demo: _Demo) -> None:
    """Write the data and train both models.

    The data are in ``work/data``, the AR model is in ``work/train/stages/ar`` and the MARS model in
    ``work/model``.
    """
    work = demo.work
    demo.console.rule("1  data")
    with demo.timed("data"):
        counts = ["--examples", str(_NUM_EXAMPLES), "--eval-examples", str(demo.num_items)]
        run_command(["data", "demo", "--out", str(work / "data"), *counts], demo.environment)
    demo.console.rule("2  training: AR fine-tuning, then MARS, on Ray Train")
    with (
        demo.timed("train"),
        as_file(files("mars_platform.demo") / "recipe.yaml") as recipe,
    ):
        overrides = [f"data.train=[{work / 'data' / 'train.jsonl'}]", f"output={work / 'train'}"]
        options = [part for override in overrides for part in ("--set", override)]
        run_command(["train", str(recipe), *options], demo.environment)
    shutil.move(work / "train" / "model", work / "model")


def _ask_server(demo: _Demo) -> tuple[list[DemoResult], str, list[str]]:
    """Serve both models and measure them.

    Returns:
        The results, one question, and the text of each forward pass of its answer in `_SHOWN`.
    """
    demo.console.rule("3  serving on Ray Serve, asked over REST with the openai client")
    items = read_items(demo.work / "data" / "eval.jsonl", demo.num_items)
    settings = [_AR_SFT, _ONE_TOKEN, _EXACT]
    settings += [DemoSetting("mars", Mode.THRESHOLD, threshold) for threshold in _THRESHOLDS]
    models = {"ar-sft": demo.work / "train" / "stages" / "ar", "mars": demo.work / "model"}
    started = time.monotonic()
    with running_server(models, free_port(), demo.environment) as base_url:
        demo.seconds["serve_start"] = round(time.monotonic() - started, 1)
        with demo.timed("measure"), progress_display(demo.console) as display:
            results = asyncio.run(measure(base_url, settings, items, display))
        longest = max(items, key=lambda item: len(item.question))
        passes = stream_passes(base_url, _SHOWN, longest)
    return results, longest.question, passes


def _print_table(console: Console, results: Sequence[DemoResult]) -> None:
    base = _result_of(results, _ONE_TOKEN)

    def mode(result: DemoResult) -> str:
        return "AR SFT" if result.setting == _AR_SFT else result.setting.mode

    def threshold(result: DemoResult) -> str:
        setting = result.setting
        return f"{setting.threshold:g}" if setting.mode is Mode.THRESHOLD else ""

    def difference(result: DemoResult) -> str:
        if result is base:
            return ""
        return interval(paired_difference(result.correct, base.correct), "+.1f", scale=100)

    columns = [
        Column("mode", mode),
        Column("τ", threshold),
        Column("accuracy", "accuracy", ".1%", "right", no_wrap=True),
        Column("difference", difference, justify="right", no_wrap=True),
        Column("tok/fwd", "tokens_per_forward", ".2f", "right", no_wrap=True),
        Column("tok/s", "tokens_per_s", ",.0f", "right", no_wrap=True),
        Column(
            "speed",
            lambda result: f"{result.tokens_per_s / base.tokens_per_s:.2f}x",
            justify="right",
            no_wrap=True,
        ),
    ]
    caption = (
        f"{len(base.correct)} held-out questions. Differences are paired with mode ar, with 95% "
        "intervals; tokens/s are medians of 3 rounds."
    )
    console.print(table_of(columns, results, caption=caption))


def _figures(results: Sequence[DemoResult], seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "rows": [
            {
                "mode": result.setting.mode,
                "threshold": result.setting.threshold,
                "accuracy": result.accuracy,
                "tokens_per_forward": result.tokens_per_forward,
                "tokens_per_s": result.tokens_per_s,
                "items": len(result.correct),
            }
            for result in results
            if result.setting != _AR_SFT
        ],
        "ar_sft_accuracy": _result_of(results, _AR_SFT).accuracy,
        "seconds": seconds,
    }


def _result_of(results: Sequence[DemoResult], setting: DemoSetting) -> DemoResult:
    return next(result for result in results if result.setting == setting)


@contextmanager
def _work_directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="marsray-demo-") as directory:
        yield Path(directory)


@contextmanager
def _ray_environment() -> Iterator[dict[str, str]]:
    """Yield variables that keep Ray's files and token out of the user's directories."""
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as directory:
        yield {
            "RAY_TMPDIR": directory,  # short, because paths of Unix sockets are limited
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ADDRESS": "",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **worker_start_variables(16),
        }
