"""Shows the result of ``marsray eval``: a table with its notes, or JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table

from mars_platform.cli.report import (
    Column,
    figure_column,
    interval,
    jsonable,
    print_json,
    print_notes,
    table_of,
)
from mars_platform.method.mode import Mode
from mars_serve.measure.evaluation.evaluate import Evaluation, setting_names


def print_evaluation(evaluation: Evaluation, console: Console, *, as_json: bool) -> None:
    """Print the result as a table with its notes, or as JSON."""
    if as_json:
        print_json(console, _figures(evaluation))
        return
    console.print(_table(evaluation))
    print_notes(console, _notes(evaluation))


def _table(evaluation: Evaluation) -> Table:
    names = [
        Column("mode", lambda row: setting_names(row.setting)[0], no_wrap=True),
        Column("τ", lambda row: setting_names(row.setting)[1], no_wrap=True),
    ]
    quality = [
        figure_column(
            "accuracy", lambda row: interval(row.score.accuracy, ".1f", scale=100, unit="%")
        ),
        figure_column("difference", lambda row: interval(row.score.difference, "+.1f", scale=100)),
    ]
    figures = [
        figure_column("tok/fwd", lambda row: interval(row.score.tokens_per_forward, ".2f")),
        figure_column("pos/fwd", "score.positions_per_forward.value", ".2f"),
        figure_column("identical", "score.identical", ".1%"),
        figure_column("cut off", "score.cut_off", ".1%"),
        figure_column("tok/s", "tokens_per_s", ",.0f"),
    ]
    shown = quality + figures if evaluation.rows[0].score.num_checkable else figures
    return table_of(names + shown, evaluation.rows)


def _notes(evaluation: Evaluation) -> list[str]:
    first, options = evaluation.rows[0].score, evaluation.options
    notes = [
        f"{first.num_items} conversations, at most {options.max_tokens} output tokens, "
        f"{first.mean_tokens:.1f} on average in mode ar; batch {options.batch}, "
        f"{evaluation.dtype} on {evaluation.device}. Brackets are 95% intervals.",
        *_decoding_notes(evaluation),
    ]
    if first.num_checkable == 0:
        notes.append("No row has an answer, so that accuracy cannot be measured.")
        return notes
    notes.append(
        f"Accuracy is over the {first.num_checkable} conversations with an answer; differences are "
        "in points, paired with mode ar."
    )
    if evaluation.num_unstated:
        notes.append(
            f"{evaluation.num_unstated} of these do not state their answer at the end of their own "
            "final turn, behind 'Answer:' or '####'; outputs that do the same count as wrong."
        )
    return notes


def _decoding_notes(evaluation: Evaluation) -> list[str]:
    notes, options, sampling = list[str](), evaluation.options, evaluation.options.sampling
    if any(row.setting.mode is Mode.EXACT for row in evaluation.rows):
        notes.append(
            "Mode exact feeds masks for all outcomes of a check, or for the last one, where all "
            "drafts are right."
        )
    if options.calibrated:
        notes.append("Mode threshold compares τ with calibrated confidence.")
    if sampling.temperature > 0:
        notes.append(
            f"Sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, seed "
            f"{sampling.seed} plus the conversation's number, counted from 0."
        )
    return notes


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    options = evaluation.options
    return {
        "model": options.model,
        "data": options.data,
        "max_tokens": options.max_tokens,
        "batch": options.batch,
        "device": evaluation.device,
        "dtype": evaluation.dtype,
        "calibrated": options.calibrated,
        "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p,
        "seed": options.sampling.seed,
        "num_unstated": evaluation.num_unstated,
        "rows": [
            {
                "mode": row.setting.mode,
                "threshold": row.setting.threshold,
                "outcomes": row.setting.outcomes,
                **jsonable(row.score),
                "tokens_per_s": row.tokens_per_s,
            }
            for row in evaluation.rows
        ],
    }
