"""The references of configuration files, from the settings models and their docstrings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mars_autoscale.simulation.config import SimulationConfig
from mars_platform.config import Settings
from mars_serve.config.key_file import KeyEntry
from mars_serve.config.settings import ServeSettings
from mars_train.recipe import Recipe
from marsray_docs.tables import code, table, text

_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


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


@dataclass(frozen=True)
class Section:
    """A settings model at a place of a file."""

    path: str
    """Dotted path of the model's keys, with ``[]`` behind lists; empty at the top."""
    model: type[BaseModel]


def sections(model: type[BaseModel], path: str = "") -> Iterator[Section]:
    """Yield a model and all models within it, at each place where they occur."""
    yield Section(path, model)
    for name, field in model.model_fields.items():
        for inner, is_listed in _models(field.annotation):
            yield from sections(inner, _join(path, name) + ("[]" if is_listed else ""))


def keys(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of a file by its dotted path."""
    for section in sections(model):
        for name, field in section.model.model_fields.items():
            yield _join(section.path, name), field


def page(reference: Reference) -> str:
    """Return a reference as Markdown."""
    parts = [f"# {reference.title}\n\nGenerated from the settings' models. {reference.intro}\n\n"]
    for section in sections(reference.model):
        if section.path:
            variant = _variant(section.model)
            parts.append(f"## `{section.path}`{variant and f' ({variant})'}\n\n")
        parts.append(_told(section.model) + "\n\n")
        rows = [_row(section, *item) for item in section.model.model_fields.items()]
        parts.append(table(["key", "values", "default", "meaning"], rows) + "\n")
    return "".join(parts)


def _row(section: Section, name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    inner = _models(field.annotation)
    told = field.description or (_told(inner[0][0]) if inner else "")
    path = code(_join(section.path, name))
    return path, _values(field.annotation, field.metadata), _default(field), text(told)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return code(json.dumps(value, ensure_ascii=False, default=_plain))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else str(value)


def _values(annotation: Any, metadata: list[Any]) -> str:
    """Return which values a type takes, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, UnionType):
        inner = [_values(each, metadata) for each in arguments if each is not NoneType]
        return " or ".join(dict.fromkeys(inner)) + (" or `null`" if NoneType in arguments else "")
    if origin is Literal:
        return ", ".join(code(value) for value in arguments)
    if origin in (list, tuple):
        return f"list of {_values(arguments[0], [])}{_bounds(metadata)}"
    if origin is dict or annotation is dict:
        return "mapping"
    return _value(annotation) + _bounds(metadata)


def _value(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(code(each.value) for each in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping"
    return _NAMES.get(kind, "value")


def _bounds(metadata: list[Any]) -> str:
    bounds = [
        f"{sign} {getattr(item, name):,}"
        for item in metadata
        for name, sign in _BOUNDS.items()
        if isinstance(getattr(item, name, None), int | float)
    ]
    return f" {', '.join(bounds)}" if bounds else ""


def _models(annotation: Any, is_listed: bool = False) -> list[tuple[type[BaseModel], bool]]:
    """Return the models that a type holds, each with whether it stands in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, is_listed)]
    listed = is_listed or get_origin(annotation) in (list, tuple)
    return [found for each in get_args(annotation) for found in _models(each, listed)]


def _told(model: type[BaseModel]) -> str:
    return text(inspect.getdoc(model)).replace("`OuterSettings` has most of the fields", "")


def _variant(model: type[BaseModel]) -> str:
    """Return what tells a model apart from others at the same place, if anything does."""
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is Literal and field.is_required():
            return f"{name}: {get_args(field.annotation)[0]}"
    return ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
