"""Reading configuration: one YAML file, validated by a pydantic model, with dotted overrides.

Knows no setting of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from mars_platform.errors import UserError


class Settings(BaseModel):
    """Base of every configuration model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(path: Path, model: type[SettingsT], overrides: Sequence[str] = ()) -> SettingsT:
    """Read a YAML file into a settings model.

    Args:
        path: the file; its top level must be a mapping.
        model: the model that validates it.
        overrides: see `apply_overrides`.

    Raises:
        UserError: the file is missing or malformed, or a value is invalid.

    """
    content = read_yaml(path)
    apply_overrides(content, overrides)
    return build_settings(content, model, source=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        UserError: the file is missing, malformed or something else than a mapping.

    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({_one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: the top level must be a mapping of settings")
    return content


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply ``key.sub=value`` strings to a mapping; values are YAML, numbers index lists.

    Raises:
        UserError: an override is malformed or points nowhere.

    """
    for override in overrides:
        _apply_override(content, override)


def build_settings(content: dict[str, Any], model: type[SettingsT], source: str) -> SettingsT:
    """Validate a mapping, turning pydantic's report into one clear line.

    Raises:
        UserError: naming ``source``, each offending field, and what it may be.

    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {describe_validation_error(error, model)}") from error


def describe_validation_error(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems of a validation error on one line, each with its field's dotted path."""
    problems = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1]) if model else []
            hint = f"; known keys: {', '.join(known)}" if known else ""
            problems.append(f"{field}: unknown key{hint}")
        elif item["type"] == "missing":
            problems.append(f"{field}: required, but not given")
        else:
            message = item["msg"].removeprefix("Value error, ")
            problems.append(f"{field}: {message} (got {str(item['input'])[:60]!r})")
    return "; ".join(problems)


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Field names of the model found by walking ``location``; empty where it cannot be told."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        models = _models_within(field.annotation) if field else []
        if len(models) != 1:
            return []
        current = models[0]
    return list(current.model_fields)


def _models_within(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for arg in getattr(annotation, "__args__", ()) for found in _models_within(arg)]


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r}: write it as key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {key}: not a valid YAML value ({_one_line(error)})") from error
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
