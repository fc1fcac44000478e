"""Options that many commands have, and those of one command made from a settings model."""

import os
from collections.abc import Callable
from copy import copy
from glob import escape as glob_escaped
from glob import glob
from inspect import Parameter, Signature, signature
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from mars_platform.config import Settings, build_settings

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON; other messages go to standard error."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: key.sub=value. May be repeated."),
]


def with_options(run: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command with an option for each field of the settings that a function takes.

    A parameter whose annotation is a `Settings` model gets an instance of it; the others are
    options of typer's own form. A field's docstring is the option's help, and bounds that include
    their ends are its bounds; a tuple of any length may be repeated. A `typer.Option` or
    `typer.Argument` in the field's annotation adds the rest: names, completion, that it is an
    argument, or the help of an option that several models have. An option that is not given leaves
    the field's default.
    """
    parameters = signature(run, eval_str=True).parameters
    models = {
        name: each.annotation
        for name, each in parameters.items()
        if isinstance(each.annotation, type) and issubclass(each.annotation, Settings)
    }

    def command(**given: Any) -> None:
        for name, model in models.items():
            fields = {field: given.pop(field) for field in model.model_fields}
            content = {field: value for field, value in fields.items() if value is not None}
            given[name] = build_settings(content, model, source="options")
        run(**given)

    options = [
        option
        for name, each in parameters.items()
        for option in (_options(models[name]) if name in models else [each])
    ]
    by_name = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in options]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__dict__["__signature__"] = Signature(by_name)  # typer reads the options from it
    return command


def complete_directories(incomplete: str) -> list[str]:
    """Return the directories that a word in the shell may become."""
    found = glob(f"{glob_escaped(os.path.expanduser(incomplete))}*/")  # noqa: PTH111, PTH207
    return sorted(each.rstrip("/") for each in found)


def _options(model: type[Settings]) -> list[Parameter]:
    return [_option(name, field) for name, field in model.model_fields.items()]


def _option(name: str, field: FieldInfo) -> Parameter:
    infos = [each for each in field.metadata if isinstance(each, ArgumentInfo | OptionInfo)]
    info = copy(infos[0]) if infos else typer.Option()
    if field.description:
        info.help = " ".join(field.description.replace("``", "").split())
    for bound in field.metadata:
        info.min = getattr(bound, "ge", info.min)
        info.max = getattr(bound, "le", info.max)
    kind: Any = field.annotation
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:
        kind = GenericAlias(list, get_args(kind)[:1])
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if field.is_required() else field.get_default(),
        annotation=Annotated[kind, info],
    )
