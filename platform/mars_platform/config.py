"""Reads configuration: one YAML file, dotted overrides, and a pydantic model that validates both.

Imports no Ray, torch or HTTP library.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from mars_platform.errors import UserError, one_line


class Settings(BaseModel):
    """Base of every configuration model, which is immutable and refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(path: Path, model: type[SettingsT], overrides: Sequence[str] = ()) -> SettingsT:
    """Read a YAML file into a settings model, with ``key.sub=value`` overrides.

    Raises:
        UserError: the file is missing or malformed, or a value is invalid.
    """
    content = read_yaml(path)
    apply_overrides(content, overrides)
    return build_settings(content, model, source=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        UserError: the file is missing or malformed, or its top level is not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: the top level must be a mapping of settings")
    return content


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; every error ends in ``remedy``.

    Raises:
        UserError: the file is missing or malformed, or its top level is not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: the top level must be an object; {remedy}")
    return content


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides, ``key.sub=value``, to a mapping in place.

    A value is YAML, and a number as a key indexes a list.
    """
    for override in overrides:
        _apply_override(content, override)


def build_settings(
    content: dict[str, Any], model: type[SettingsT], source: str, *, remedy: str = ""
) -> SettingsT:
    """Validate a mapping by a settings model.

    The error names ``source``, the mapping's origin, and ends in ``remedy``: what the user can do
    beyond mending the fields.

    Raises:
        UserError: the mapping is invalid; one line names each offending field and the remedy.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = describe_validation_error(error, model)
        raise UserError(f"{source}: {problems}{remedy and f'; {remedy}'}") from error


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Return all problems of a validation error on one line, each with its field's dotted path."""
    return "; ".join(_describe_problem(item, model) for item in error.errors())


def _describe_problem(problem: ErrorDetails, model: type[BaseModel]) -> str:
    path, _ = _walk(model, problem["loc"])
    field = ".".join(path)
    if problem["type"] == "extra_forbidden":
        parent, models = _walk(model, problem["loc"][:-1])
        known = list(dict.fromkeys(key for found in models for key in found.model_fields))
        return f"{'.'.join([*parent, str(problem['loc'][-1])])}: unknown key; known keys: " + (
            ", ".join(known)
        )
    if problem["type"] == "missing":
        return f"{field}: required, but not given"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    whole = problem["type"] == "value_error" and isinstance(value, dict | list)
    given = "" if whole else f" (got {str(value)[:60]!r})"
    return f"{field}: {message}{given}" if field else f"{message}{given}"


def _walk(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow the location of an error.

    Pydantic puts the tag of a discriminated union into the location. The user wrote no such key: a
    tag selects a model and is left out of the path.

    Returns:
        The path in the user's terms, and the models that it can lead to.
    """
    path: list[str] = []
    models = [model]
    for part in location:
        fields = [found.model_fields[part] for found in models if part in found.model_fields]
        tagged = [found for found in models if _has_tag(found, part)]
        if isinstance(part, str) and tagged and not fields:
            models = tagged
            continue
        path.append(str(part))
        if isinstance(part, str):
            models = [inner for field in fields for inner in _models_within(field.annotation)]
    return path, models


def _has_tag(model: type[BaseModel], tag: int | str) -> bool:
    return any(
        get_origin(field.annotation) is Literal and tag in get_args(field.annotation)
        for field in model.model_fields.values()
    )


def _models_within(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for arg in get_args(annotation) for found in _models_within(arg)]


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r}: write it as key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {key}: not a valid YAML value ({one_line(error)})") from error
    *parents, last = key.split(".")
    target: Any = content
    try:
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        if isinstance(target, list):
            target[int(last)] = value
        else:
            target[last] = value
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"--set {key}: there is no such place in the config") from error
