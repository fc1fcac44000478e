"""The demo from beginning to end: data, training, serving, measuring, and a clean end."""

import asyncio
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from io import StringIO
from pathlib import Path

from rich.console import Console

from mars_platform.checkpoint.examples import write_examples
from mars_platform.cli.progress import progress_display
from mars_platform.cli.report import check_output_files, say, write_json, writing
from mars_platform.cli.shading import print_shaded
from mars_platform.cluster.processes import ended_by_sigterm, free_port
from mars_platform.cluster.ray_private import worker_start_variables
from mars_platform.demo.command import DemoOptions
from mars_platform.demo.measure import DemoResult, Item, measure, read_items, stream_passes
from mars_platform.demo.server import DemoServer, run_command, serving
from mars_platform.demo.table import (
    AR_MODEL,
    MARS_MODEL,
    SETTINGS,
    SHOWN,
    advice,
    figures,
    results_table,
)
from mars_platform.errors import UserError

_NUM_EXAMPLES = 19_500
_LONGEST_TEMPORARY = 25
"""Longest path under which Ray's Unix sockets keep to the 107 bytes that their paths may have."""
_SVG_WIDTH = 80
"""Characters in a line of the picture."""


@dataclass
class _Demo:
    options: DemoOptions
    console: Console
    work: Path
    """Directory of data, runs and models."""
    environment: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 1)


def run_demo(console: Console, options: DemoOptions) -> None:
    """Run the demo and print its results.

    Raises:
        UserError: the directory to keep is not empty, or the file cannot be written.
        CommandFailed: one of the commands failed.
        Stopped: the process received SIGTERM; what it had started has ended.
    """
    keep = options.keep
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UserError(f"--keep: {keep} is not empty; name a new directory")
    check_output_files({"--json": options.json_file, "--svg": options.svg})
    with ended_by_sigterm(), _work_directory(keep) as work, _ray_environment() as environment:
        demo = _Demo(options, console, work, environment)
        _make_model(demo)
        _serve(demo)


def _make_model(demo: _Demo) -> None:
    """Write the data and train both models.

    The data are in ``work/data``, the AR model is in ``work/train/stages/ar`` and the MARS model in
    ``work/model``.
    """
    work = demo.work
    demo.console.rule("1 of 4  data")
    with demo.timed("data"):
        counts = ["--examples", str(_NUM_EXAMPLES)]
        counts += ["--eval-examples", str(demo.options.items)]
        run_command(["data", "demo", "--out", str(work / "data"), *counts], demo.environment)
    demo.console.rule("2 of 4  training on Ray Train: AR model, its answers, masks")
    with (
        demo.timed("train"),
        as_file(files("mars_platform.demo") / "recipe.yaml") as recipe,
    ):
        overrides = [f"data.train=[{work / 'data' / 'train.jsonl'}]", f"output={work / 'train'}"]
        options = [part for override in overrides for part in ("--set", override)]
        run_command(["train", str(recipe), *options], demo.environment)
    shutil.move(work / "train" / "model", work / "model")


def _serve(demo: _Demo) -> None:
    demo.console.rule("3 of 4  serving on Ray Serve, asked over REST with the openai client")
    # the pages show the first one first
    models = {MARS_MODEL: demo.work / "model", AR_MODEL: demo.work / "train" / "stages" / "ar"}
    items = read_items(demo.work / "data" / "eval.jsonl", demo.options.items)
    for path in models.values():  # for the playground
        write_examples(path, ([{"role": "user", "content": item.question}] for item in items))
    if demo.options.serve:
        _calibrate(demo)
    started = time.monotonic()
    with serving(models, free_port(), demo.environment) as server:
        demo.seconds["serve_start"] = round(time.monotonic() - started, 1)
        _show(demo, server, items)
        if demo.options.serve:
            with suppress(KeyboardInterrupt):
                server.wait()


def _calibrate(demo: _Demo) -> None:
    """Measure what each τ costs, which the playground and the dashboard then show."""
    model, data = demo.work / "model", demo.work / "data" / "eval.jsonl"
    demo.console.rule("calibration, for the pages")
    with demo.timed("calibrate"):
        run_command(["calibrate", str(model), "--data", str(data), "--quick"], demo.environment)


def _show(demo: _Demo, server: DemoServer, items: list[Item]) -> None:
    console = demo.console
    with demo.timed("measure"), progress_display() as display:
        results = asyncio.run(measure(server.base_url, SETTINGS, items, display))
    console.rule("4 of 4  result")
    passes = stream_passes(server.base_url, SHOWN, items[0])
    _print_results(console, items[0].question, passes, results)
    if demo.options.svg is not None:
        _draw_results(demo.options.svg, items[0].question, passes, results)
    _print_next(demo, server, items[0])
    seconds = {**demo.seconds, "total": round(time.monotonic() - demo.started, 1)}
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    say(console, f"time: {spent}")
    if demo.options.json_file is not None:
        write_json(demo.options.json_file, figures(results, seconds), indent=2)


def _print_results(
    console: Console, question: str, passes: Sequence[str], results: Sequence[DemoResult]
) -> None:
    console.print(f"One answer at τ = {SHOWN.threshold:g}, by forward pass:", highlight=False)
    console.print(question, style="dim", highlight=False)
    print_shaded(console, passes, wrap=True)
    console.print()
    console.print(results_table(results))
    console.print()
    console.print(advice(results), highlight=False)


def _draw_results(
    path: Path, question: str, passes: Sequence[str], results: Sequence[DemoResult]
) -> None:
    terminal = Console(
        record=True,
        file=StringIO(),
        width=_SVG_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    _print_results(terminal, question, passes, results)
    with writing(path):
        terminal.save_svg(str(path), title="marsray demo", unique_id="demo")


def _print_next(demo: _Demo, server: DemoServer, item: Item) -> None:
    keep = demo.options.keep
    if keep is not None:
        say(demo.console, f"kept: {keep}/model, {keep}/data/eval.jsonl")
    if demo.options.serve:
        body = {"model": MARS_MODEL, "messages": [{"role": "user", "content": item.question}]}
        text = (
            "Next, ask the server, which runs until Ctrl-C, in a browser at\n"
            f"  {server.page_url} (playground) and {server.page_url}dashboard (dashboard)\n"
            "or on the command line, where a request without a τ is decoded in mode exact:\n"
            f"  curl {server.base_url}/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{json.dumps(body | {'confidence_threshold': SHOWN.threshold})}'"
        )
    elif keep is not None:
        text = f"Next, type: marsray serve --model mine={keep}/model"
    else:
        text = "Next, type: marsray demo --serve (it keeps the server up, for questions of yours)"
    say(demo.console, text)


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
    """Yield variables that keep Ray's and torch's files, and a token, out of the user's places."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= _LONGEST_TEMPORARY else "/tmp"  # noqa: S108 - a new directory
    with tempfile.TemporaryDirectory(
        prefix="mr-", dir=parent, ignore_cleanup_errors=True
    ) as directory:
        yield {
            "RAY_TMPDIR": directory,
            "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ADDRESS": "",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **worker_start_variables(16),
        }
