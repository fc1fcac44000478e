"""The trainer's commands: ``marsray data`` and ``marsray train``."""

from __future__ import annotations

import json
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mars_platform.cli.main import show_help_without_command
from mars_platform.cli.options import AsJson, Overrides
from mars_platform.errors import UserError

_DIFFICULTY = 2
"""Totals in each sentence of a ledger by default."""

data = typer.Typer()


class DemoTask(StrEnum):
    """Family of the demo data's tasks."""

    LEDGER = "ledger"
    SHORT = "short"


@data.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    """Make data sets, and check them before training."""
    show_help_without_command(context)


@data.command("demo")
def data_demo(
    out: Annotated[Path, typer.Option(help="Directory to write train.jsonl and eval.jsonl to.")],
    task: Annotated[
        DemoTask,
        typer.Option(
            help="Ledgers (answers of 84 tokens, free wording) or short tasks (22, fixed wording)."
        ),
    ] = DemoTask.LEDGER,
    difficulty: Annotated[
        int | None,
        typer.Option(
            min=1, max=4, help="Totals in each sentence of a ledger.", show_default=str(_DIFFICULTY)
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Training conversations.")] = 60_000,
    eval_examples: Annotated[int, typer.Option(min=1, help="Held-out conversations.")] = 1_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generator.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write the demo's chat data as JSONL.

    The train and eval splits share no question.
    """
    from mars_platform.cli.progress import progress_display
    from mars_platform.cli.report import say
    from mars_train.data.demo import write_demo_data
    from mars_train.data.demo_tasks import TaskMaker, draw_ledger, draw_short

    if task is not DemoTask.LEDGER and difficulty is not None:
        raise UserError(
            f"--difficulty: {task} tasks have none; leave it out, or give --task ledger"
        )
    makers: dict[DemoTask, TaskMaker] = {
        DemoTask.LEDGER: partial(draw_ledger, difficulty=difficulty or _DIFFICULTY),
        DemoTask.SHORT: draw_short,
    }
    with progress_display() as display:
        write_demo_data(
            out,
            makers[task],
            num_train=examples,
            num_eval=eval_examples,
            seed=seed,
            on_progress=partial(display.update, "data"),
        )
    if as_json:
        found = {"directory": str(out), "examples": examples, "eval_examples": eval_examples}
        typer.echo(json.dumps(found))
        return
    text = f"{out}: {examples:,} training and {eval_examples:,} held-out conversations"
    say(Console(), text)


@data.command("check")
def data_check(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Training data as in data.train; by default that of --recipe."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model whose tokenizer counts; by default that of --recipe."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe, a YAML file.")] = None,
    set_: Overrides = None,
    show: Annotated[
        int, typer.Option(min=0, help="Conversations to print, what is supervised in ⟦⟧.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Say what a training run would make of its data.

    Without a recipe, conversations may be as long as the model's context: --set data.max_length=512
    sets a limit. The exit status is 1 if a run would be refused.
    """
    from mars_platform.cli.progress import working
    from mars_platform.cli.report import jsonable, say
    from mars_train.cli.data_check import describe, read_plan
    from mars_train.data.check import check_data

    with working("reading the data"):
        found = check_data(*read_plan(files or [], model, recipe, set_ or []), num_shown=show)
    if as_json:
        typer.echo(json.dumps(jsonable(found.figures())))
    else:
        for line in describe(found):
            say(Console(), line)
    if found.refusals:
        raise typer.Exit(1)


def train(
    files: Annotated[
        list[str], typer.Argument(help="Recipe, a YAML file; with --init, files of training data.")
    ],
    init: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Write a recipe that fits a model to the data, and do not train."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the recipe of --init; by default it is printed.")
    ] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the stages of a training recipe on Ray Train.

    Progress and messages go to standard error. With --init a recipe is written instead, for the
    hardware of this machine, with an estimate of tokens, memory and hours. Files whose names hold
    held-out, eval, valid, dev or test become its held-out data.
    """
    from mars_platform.cli.report import say
    from mars_platform.config import load_settings
    from mars_train.recipe import Recipe
    from mars_train.run.recipe_run import run_recipe

    if init is not None:
        if set_ or as_json:
            raise UserError("--set and --json go with a recipe: write it, then train or change it")
        _write_proposal(init, files, output)
        return
    if len(files) > 1 or output is not None:
        raise UserError("train: one recipe is trained; several FILES and --output go with --init")
    config = Path(files[0])
    model = run_recipe(load_settings(config, Recipe, set_ or []), Console(stderr=True))
    if as_json:
        typer.echo(json.dumps({"model": str(model)}))
    else:
        say(Console(), f"trained model: {model}")


def _write_proposal(model: str, files: list[str], output: Path | None) -> None:
    from mars_platform.cli.progress import working
    from mars_platform.cli.report import say
    from mars_train.run.proposal import Hardware, propose

    if output is not None and output.exists():
        raise UserError(f"--output: {output} is there already; name a new file")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output: there is no directory {output.parent}; make it first")
    console = Console(stderr=True)
    with working("reading the data and trying the hardware", console):
        proposal = propose(model, files, Hardware.here())
    for line in proposal.estimate:
        say(console, line)
    if output is None:
        typer.echo(proposal.text, nl=False)
        return
    output.write_text(proposal.text, encoding="utf-8")
    say(console, f"{output}: train with marsray train {output}")
