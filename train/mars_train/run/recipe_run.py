"""Runs a recipe: checks it, prepares its model and data, and trains its stages."""

from pathlib import Path

from rich.console import Console

from mars_platform.cli.report import say
from mars_train.recipe import Recipe
from mars_train.run.checks import check_before_start
from mars_train.run.run_directory import RunDirectory


def run_recipe(recipe: Recipe, console: Console) -> Path:
    """Run all stages that are not trained yet, and return the last one's model, ``output/model``.

    A run that is finished already stays as it is. The recipe is kept in ``output/recipe.yaml``,
    earlier stages' checkpoints in ``output/stages/NAME``, the tokenised data and its report in
    ``output/data`` and ``output/report.jsonl``, the losses and scores in ``output/curves.png``.

    Raises:
        UserError: something the recipe names is missing, unusable or in the way.
        Stopped: the process was told to terminate; the run can be resumed.
    """
    directory = RunDirectory(recipe, recipe.output.resolve())
    if directory.is_resumed() and directory.is_finished:  # a job whose end was not seen is repeated
        say(console, f"the run in {directory.path} is finished; its model is {directory.model}")
    else:
        _run(directory, console)
    return directory.model


def _run(directory: RunDirectory, console: Console) -> None:
    base = check_before_start(directory)
    with directory.claimed():
        if directory.is_resumed():
            if directory.is_finished:  # by another process, which has held the lock until now
                return
            say(console, f"resuming the run in {directory.path}")
        # Both take seconds to import, and a refusal should not: most have come by now, and those
        # that take transformers come before Ray starts.
        from mars_train.run.preparation import prepare_start

        start = prepare_start(directory, base, console)
        from mars_train.run.stages import train_stages
        from mars_train.run.tracking import tracked

        with tracked(directory, console) as send:
            train_stages(directory, start, console, send)
