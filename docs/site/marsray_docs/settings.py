"""The references of configuration files, from the settings models and their docstrings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from mars_autoscale.simulation.config import SimulationConfig
from mars_platform.config import Settings
from mars_serve.config.key_file import KeyEntry
from mars_serve.config.settings import ServeSettings
from mars_train.recipe import Recipe
from marsray_docs.schemas import Schema, meaning, type_of
from marsray_docs.tables import code, table


@dataclass(frozen=True)
class Reference:
    """A kind of configuration file."""

    title: str
    intro: str
    model: type[Settings]


REFERENCES = {
    "server": Reference(
        "Server settings",
        "All keys of the file that `marsray serve CONFIG.yaml` reads, and of `args` in a Serve config. "
        "`--set key.sub=value` overrides any of them. An unknown key is an error.",
        ServeSettings,
    ),
    "keys": Reference(
        "Key file",
        "The file that `keys.file` names holds a list of such entries under `keys`. `marsray key NAME` "
        "prints one.",
        KeyEntry,
    ),
    "recipe": Reference(
        "Recipe",
        "All keys of the file that `marsray train RECIPE.yaml` and `marsray submit` read. "
        "`--set key.sub=value` overrides any of them. An unknown key is an error.",
        Recipe,
    ),
    "simulation": Reference(
        "Simulation",
        "All keys of the file that `marsray simulate CONFIG.yaml` reads. `--set key.sub=value` "
        "overrides any of them.",
        SimulationConfig,
    ),
}


def page(reference: Reference) -> str:
    """Return a reference as Markdown."""
    schema = reference.model.model_json_schema()
    models = schema.get("$defs", {})
    parts = [f"# {reference.title}\n\nGenerated from the settings' models. {reference.intro}\n\n"]
    for path, model in _sections(schema, models, ""):
        if path:
            parts.append(f"## `{path}`{_variant(model)}\n\n")
        parts.append(meaning(model) + "\n\n")
        rows = [_row(model, models, path, name) for name in model["properties"]]
        parts.append(table(["key", "values", "default", "meaning"], rows) + "\n")
    return "".join(parts)


def _sections(model: Schema, models: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield a model and all within it, each with the path of its keys, ``[]`` behind lists."""
    yield path, model
    for name, each in model["properties"].items():
        for inner, is_listed in _inner(each, models, is_listed=False):
            yield from _sections(inner, models, _join(path, name) + ("[]" if is_listed else ""))


def _inner(schema: Schema, models: Schema, *, is_listed: bool) -> Iterator[tuple[Schema, bool]]:
    """Yield the models that a value holds, each with whether it stands in a list."""
    named = models.get(schema.get("$ref", "").rpartition("/")[2], {})
    if "properties" in named:
        yield named, is_listed
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key, ()):
            yield from _inner(each, models, is_listed=is_listed)
    if "items" in schema:
        yield from _inner(schema["items"], models, is_listed=True)


def _row(model: Schema, models: Schema, path: str, name: str) -> tuple[str, str, str, str]:
    schema = model["properties"][name]
    inner = [found for found, _ in _inner(schema, models, is_listed=False)]

    def values_of(named: str) -> str:
        return "mapping" if "properties" in models[named] else type_of(models[named], values_of)

    default = "required"
    if name not in model.get("required", ()):
        # the schema lacks defaults that a factory makes: other models, and empty collections
        value = schema.get("default", [] if schema.get("type") == "array" else {})
        is_model = inner and isinstance(value, dict)
        default = "" if is_model else code(json.dumps(value, ensure_ascii=False))
    told = meaning(schema) or (meaning(inner[0]) if inner else "")
    return code(_join(path, name)), type_of(schema, values_of), default, told


def _variant(model: Schema) -> str:
    """Return what tells a model apart from others at the same place, if anything does."""
    for name in model.get("required", ()):
        if "const" in model["properties"][name]:
            return f" ({name}: {model['properties'][name]['const']})"
    return ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
