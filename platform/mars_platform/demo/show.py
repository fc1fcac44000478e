"""The demo from beginning to end: data, training, serving, measuring, and a clean end."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mars_platform.cli.progress import progress_display
from mars_platform.cli.shading import print_shaded
from mars_platform.cluster.processes import free_port
from mars_platform.demo.measure import Row, Setting, measure, read_items, stream_passes
from mars_platform.demo.server import run_command, running_server
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import paired_difference

_AR_SFT = Setting("ar-sft", Mode.AR, 1.0)
_ONE_TOKEN = Setting("mars", Mode.AR, 1.0)
_EXACT = Setting("mars", Mode.EXACT, 1.0)
_THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
_SHOWN_THRESHOLD = 0.95
_NUM_EXAMPLES = 40_000


def run_demo(
    console: Console, *, keep: Path | None, json_file: Path | None, num_items: int
) -> None:
    """Run the demo.

    Raises:
        UserError: the directory to keep things in is not empty.
        CommandFailed: one of the commands failed.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UserError(f"--keep: {keep} is not empty; name a new directory")
    seconds: dict[str, float] = {}
    with _work_directory(keep) as work, _ray_environment() as environment, _timed(seconds, "total"):
        _make_model(console, work, num_items, environment, seconds)
        rows, passes = _ask_server(console, work, num_items, environment, seconds)
    _print_results(console, rows, passes, seconds)
    if json_file is not None:
        json_file.write_text(json.dumps(_figures(rows, seconds), indent=2) + "\n", encoding="utf-8")
    if keep is not None:
        console.print(f"kept: {keep}/model, {keep}/data/eval.jsonl", highlight=False)


def _make_model(
    console: Console,
    work: Path,
    num_items: int,
    environment: dict[str, str],
    seconds: dict[str, float],
) -> None:
    """Data in ``work/data``, the AR model in ``work/train/stages/ar``, MARS in ``work/model``."""
    console.rule("1  data")
    with _timed(seconds, "data"):
        counts = ["--examples", str(_NUM_EXAMPLES), "--eval-examples", str(num_items)]
        run_command(["data", "demo", "--out", str(work / "data"), *counts], environment)
    console.rule("2  training: AR fine-tuning, then MARS, on Ray Train")
    with (
        _timed(seconds, "train"),
        as_file(files("mars_platform.demo") / "recipe.yaml") as recipe,
    ):
        overrides = [f"data.train=[{work / 'data' / 'train.jsonl'}]", f"output={work / 'train'}"]
        options = [part for override in overrides for part in ("--set", override)]
        run_command(["train", str(recipe), *options], environment)
    shutil.move(work / "train" / "model", work / "model")


def _ask_server(
    console: Console,
    work: Path,
    num_items: int,
    environment: dict[str, str],
    seconds: dict[str, float],
) -> tuple[list[Row], list[str]]:
    """Serve both models and measure; also the passes of one answer at the shown threshold."""
    console.rule("3  serving on Ray Serve, asked over REST with the openai client")
    items = read_items(work / "data" / "eval.jsonl", num_items)
    settings = [_AR_SFT, _ONE_TOKEN, _EXACT]
    settings += [Setting("mars", Mode.THRESHOLD, threshold) for threshold in _THRESHOLDS]
    models = {"ar-sft": work / "train" / "stages" / "ar", "mars": work / "model"}
    started = time.monotonic()
    with running_server(models, free_port(), environment) as base_url:
        seconds["serve_start"] = round(time.monotonic() - started, 1)
        with _timed(seconds, "measure"), progress_display(console) as display:
            rows = measure(base_url, settings, items, display)
        shown = max(items, key=lambda item: len(item.question))
        passes = stream_passes(base_url, Setting("mars", Mode.THRESHOLD, _SHOWN_THRESHOLD), shown)
    return rows, [shown.question, *passes]


def _print_results(
    console: Console, rows: list[Row], passes: list[str], seconds: dict[str, float]
) -> None:
    console.rule("4  result")
    question, *answer = passes
    console.print(f"one answer at τ = {_SHOWN_THRESHOLD:g}, by forward pass:", highlight=False)
    console.print(f"  {question}", highlight=False)
    print_shaded(console, answer)
    console.print(_table(rows))
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    console.print(f"time: {spent}", highlight=False)


def _table(rows: list[Row]) -> Table:
    one_token = next(row for row in rows if row.setting == _ONE_TOKEN)
    table = Table(
        caption=f"{len(one_token.correct)} held-out questions. Differences are paired with mode "
        "ar, with 95% intervals; tokens/s are medians of 3 rounds."
    )
    for title in ("mode", "τ"):
        table.add_column(title)
    for title in ("accuracy", "difference", "tok/fwd", "tok/s", "speed"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        setting = row.setting
        table.add_row(
            "AR SFT" if setting == _AR_SFT else setting.mode,
            f"{setting.threshold:g}" if setting.mode is Mode.THRESHOLD else "",
            f"{100 * row.accuracy:.1f}%",
            "" if row is one_token else _difference(row, one_token),
            f"{row.tokens_per_forward:.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_s / one_token.tokens_per_s:.2f}x",
        )
    return table


def _difference(row: Row, base: Row) -> str:
    value, low, high = (100 * part for part in paired_difference(row.correct, base.correct))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _figures(rows: list[Row], seconds: dict[str, float]) -> dict[str, object]:
    return {
        "rows": [
            {
                "mode": row.setting.mode,
                "threshold": row.setting.threshold,
                "accuracy": row.accuracy,
                "tokens_per_forward": row.tokens_per_forward,
                "tokens_per_s": row.tokens_per_s,
                "items": len(row.correct),
            }
            for row in rows
            if row.setting != _AR_SFT
        ],
        "ar_sft_accuracy": next(row.accuracy for row in rows if row.setting == _AR_SFT),
        "seconds": seconds,
    }


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
    """Settings that keep Ray's files and token out of the user's directories."""
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as directory:
        yield {
            "RAY_TMPDIR": directory,  # short: Unix sockets lie in it
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ADDRESS": "",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "RAY_worker_maximum_startup_concurrency": "16",
        }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 1)
