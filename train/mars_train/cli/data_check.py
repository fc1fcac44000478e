"""Checks data for ``marsray data check``, and tells in words what it found."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.config import Settings, apply_overrides, build_settings, read_yaml
from mars_platform.errors import UserError
from mars_train.data.check import DataCheck
from mars_train.recipe import DataSettings, Recipe

_WHAT = {"dropped": "dropped", "truncated": "cut", "noted": "used, with a note"}


class _DataAlone(Settings):
    """The part of a recipe that is needed where there is none."""

    data: DataSettings


def read_plan(
    files: list[str], model: str | None, recipe: Path | None, overrides: Sequence[str]
) -> tuple[DataSettings, Checkpoint | None, Recipe | None]:
    """Return the settings of the data to check, the model and the recipe, if there are any.

    Raises:
        UserError: no data is named, or the recipe or the model cannot be used.
    """
    if not files and recipe is None:
        raise UserError("FILES: name the data to check, or give --recipe")
    content = {} if recipe is None else read_yaml(recipe)
    if files:
        content["data"] = {**(content.get("data") or {}), "train": files}
    apply_overrides(content, overrides)
    whole = None if recipe is None else build_settings(content, Recipe, source=str(recipe))
    data = (whole or build_settings(content, _DataAlone, source="--set")).data
    model = model or (whole.model.base if whole is not None else None)
    checkpoint = None if model is None else read_checkpoint(model)
    if whole is None and checkpoint is not None and "max_length" not in data.model_fields_set:
        data = data.model_copy(update={"max_length": checkpoint.max_length})
    return data, checkpoint, whole


def describe(found: DataCheck) -> Iterator[str]:
    """Yield a check as lines of text."""
    counts, figures = found.counts, found.figures()
    yield f"data: {counts.recognised}"
    yield (
        f"{counts.num_examples:,} conversations to train on, {counts.num_truncated:,} of them cut; "
        f"{counts.num_bad:,} rows dropped"
    )
    if found.lengths:
        yield (
            f"{counts.num_tokens:,} tokens, {counts.num_supervised:,} "
            f"({counts.num_supervised / counts.num_tokens:.0%}) of them supervised; "
            f"before cuts, conversations have {figures['median_length']:,.0f} (median), "
            f"95% at most {figures['p95_length']:,.0f}, the longest {figures['longest']:,}"
        )
    else:
        yield "tokens are not counted: name a model with --model"
    for group in found.reasons.values():
        yield f"{group.num_rows:,} {_WHAT[group.what]}, the first: {group.first}"
    for number, text in enumerate(found.shown, start=1):
        yield f"--- conversation {number}\n{text}"
    for refusal in found.refusals:
        yield f"a run would be refused: {refusal}"
