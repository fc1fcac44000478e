"""The references of configuration files, from the settings models and their docstrings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mars_autoscale.simulation.config import SimulationConfig
from mars_platform.config import Settings
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
        "`--set key.sub=value` overrides any of them. An unknown key is an error. "
        "The file that `keys.file` names holds entries as in `keys.entries[]`, under `keys`; `marsray key NAME` prints one.",
        ServeSettings,
    ),
    "recipe": Reference(
        "Recipe",
        "All keys of the file that `marsray train RECIPE.yaml` and `marsray submit` read.",
        Recipe,
    ),
    "simulation": Reference(
        "Simulation",
        "All keys of the file that `marsray simulate CONFIG.yaml` reads.",
        SimulationConfig,
    ),
}


_FEW = 2
"""Most keys of another section that are told again."""
Row = tuple[str, str, str, str]
"""Name of a key, its values, its default and its meaning."""


def page(name: str) -> str:
    """Return a reference as Markdown.

    Keys that an earlier section or the server's settings tell are named with a link.
    """
    reference = REFERENCES[name]
    told: dict[Row, str] = {}
    if name != "server":
        for path, _, rows in _tables(REFERENCES["server"]):
            told |= {row: f"[{code(path or 'server')}](server.md#{_anchor(path)})" for row in rows}
    parts = [f"# {reference.title}\n\nGenerated from the settings' models. {reference.intro}\n\n"]
    for path, model, rows in _tables(reference):
        kind = _variant(model)
        here = f"[{code(path)}{kind}](#{_anchor(path + kind)})"
        if path:
            parts.append(
                f"## {code(path)}{kind} {{ #{_anchor(path + kind)} }}\n\n{meaning(model)}\n\n"
            )
        places: dict[str, list[Row]] = {}
        for row in rows:
            places.setdefault(
                here if row[3].startswith("[keys]") else told.setdefault(row, here), []
            ).append(row)
        others = {
            place: keys for place, keys in places.items() if place != here and len(keys) > _FEW
        }
        new = [row for row in rows if not any(row in keys for keys in others.values())]
        if new:
            shown = [(code(_join(path, key)), *cells) for key, *cells in new]
            parts.append(table(["key", "values", "default", "meaning"], shown) + "\n")
        for place, keys in others.items():
            parts.append(f"As in {place}: {', '.join(code(key) for key, *_ in keys)}.\n\n")
    return "".join(parts)


def _tables(reference: Reference) -> Iterator[tuple[str, Schema, list[Row]]]:
    """Yield the sections of a reference: the path of their keys, the model and its keys."""
    schema = reference.model.model_json_schema()
    models = schema.get("$defs", {})
    for path, model in _sections(schema, models, ""):
        yield path, model, [_row(model, models, path, name) for name in model["properties"]]


def _anchor(path: str) -> str:
    return re.sub(r"\W+", "-", path).strip("-") or "top"


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


def _row(model: Schema, models: Schema, path: str, name: str) -> Row:
    schema = model["properties"][name]
    inner = list(_inner(schema, models, is_listed=False))

    def values_of(named: str) -> str:
        return "mapping" if "properties" in models[named] else type_of(models[named], values_of)

    default = "required"
    if name not in model.get("required", ()):
        # the schema lacks defaults that a factory makes: other models, and empty collections
        value = schema.get("default", [] if schema.get("type") == "array" else {})
        is_model = inner and isinstance(value, dict)
        default = "" if is_model else code(json.dumps(value, ensure_ascii=False))
    if not inner:
        return name, type_of(schema, values_of), default, meaning(schema)
    # what a mapping means is told at its section
    found, is_listed = inner[0]
    below = _join(path, name) + ("[]" if is_listed else "") + _variant(found)
    return name, type_of(schema, values_of), default, f"[keys](#{_anchor(below)})"


def _variant(model: Schema) -> str:
    """Return what tells a model apart from others at the same place, if anything does."""
    for name in model.get("required", ()):
        if "const" in model["properties"][name]:
            return f" ({name}: {model['properties'][name]['const']})"
    return ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
