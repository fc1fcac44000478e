"""Tells which run a stored checkpoint belongs to. Imports no Ray or torch."""

import json
from typing import Any

from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_train.recipe import Recipe
from mars_train.storage.directories import Storage

STATE_FILE = "state.json"
CHECKPOINT_PREFIX = "step-"


def refuse_other_run(
    recipe: Recipe, content: dict[str, Any], location: str, *, fingerprint: str | None = None
) -> None:
    """Refuse a checkpoint of a run that trains another model.

    ``content`` is that of its `STATE_FILE`. Without a ``fingerprint``, data is not compared.

    Raises:
        UserError: the checkpoint's recipe or data is another; the message says in what.
    """
    other = build_settings(content["recipe"], Recipe, location, remedy="name another storage")
    changed = recipe.differences(other)
    if fingerprint not in (None, content["data_fingerprint"]):
        changed.append("its data")
    if changed:
        raise UserError(
            f"checkpoints.storage: {location} belongs to another run, which differs in "
            f"{', '.join(changed)}; name another storage"
        )


def refuse_other_runs(storage: Storage, recipe: Recipe) -> None:
    """Refuse a storage whose newest checkpoint of a stage belongs to a run of another recipe.

    A checkpoint that cannot be read is left to the workers, which set damaged ones aside.
    """
    for stage in recipe.stages:
        stored = Storage(storage.path(stage.name))
        names = [name for name in stored.names() if name.startswith(CHECKPOINT_PREFIX)]
        content = _state(stored, names[-1]) if names else None
        if content is not None:
            refuse_other_run(recipe, content, stored.path(names[-1]))


def _state(stored: Storage, name: str) -> dict[str, Any] | None:
    try:
        content = json.loads(stored.file_system.cat_file(stored.file_path(name, STATE_FILE)))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "recipe" in content else None
