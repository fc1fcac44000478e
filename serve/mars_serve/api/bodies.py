"""Declares what all request bodies share: bounds on objects, and fields that are refused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from mars_serve.api.errors import shown, unsupported_value

_MAX_UNKNOWN = 64
"""Most unknown names that a body keeps."""


def at_most(num_members: int) -> BeforeValidator:
    """Return a validator that refuses larger objects before it looks at their members.

    Pydantic reports a mistake in every member before it counts them.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_members:
            raise PydanticCustomError(
                "too_many_members",
                "Object should have at most {most} members, not {given}",
                {"most": num_members, "given": len(value)},
            )
        return value

    return BeforeValidator(check)


@dataclass(frozen=True)
class Neutral:
    """A field that is not implemented: only null and ``values`` are accepted."""

    values: tuple[Any, ...]
    reason: str
    """Why other values are refused and what to do instead, as the end of a sentence."""

    def has(self, value: Any) -> bool:
        """Return whether a value changes nothing; true and 1 are different values here."""
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.values
        )


class Body(BaseModel):
    """A request body that notes the fields which it has and this server does not implement."""

    neutral: ClassVar[Mapping[str, Neutral]] = {}
    """Fields that are not implemented, by name."""

    _unsupported: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    """Values that neutral fields have and may not have."""
    _unknown: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _note_others(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(data)
        if isinstance(data, dict):
            unknown = (name for name in _unknown_in(body, data) if name not in cls.neutral)
            body._unknown = tuple(islice(unknown, _MAX_UNKNOWN))
            given = {name: data[name] for name in cls.neutral if name in data}
            body._unsupported = {
                name: value for name, value in given.items() if not cls.neutral[name].has(value)
            }
        return body

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the accepted values of neutral fields in the OpenAPI document."""
        reference = handler(core_schema)
        described = handler.resolve_ref_schema(reference)
        for name, neutral in cls.neutral.items():
            title = name.replace("_", " ").title()
            described["properties"][name] = {"enum": [None, *neutral.values], "title": title}
        return reference

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of the fields that the body has and this server does not know, some at most."""
        return self._unknown

    def refuse_unsupported(self) -> None:
        """Refuse fields that would otherwise be silently ignored.

        Raises:
            ApiError: status 400: the message names the field and the values it may have.
        """
        for name, value in self._unsupported.items():
            neutral = self.neutral[name]
            allowed = "".join(f" or set it to {item!r}" for item in neutral.values)
            reason = f"{shown(value)} is not supported, since {neutral.reason}"
            raise unsupported_value(name, f"{reason}; leave it out{allowed}")


@cache
def _fields_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the names of a model's attributes by those of its fields in a body."""
    return {field.alias or name: name for name, field in model.model_fields.items()}


def _unknown_in(value: Any, data: Any, path: str = "") -> Iterator[str]:
    """Yield the names in the data of a model, and of those in it, that no field has."""
    if isinstance(value, BaseModel) and isinstance(data, dict):
        fields = _fields_of(type(value))
        for name, item in data.items():
            if name not in fields:
                yield path + name
            elif isinstance(item, dict | list):
                yield from _unknown_in(getattr(value, fields[name]), item, f"{path}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, (item, part) in enumerate(zip(value, data, strict=False)):
            yield from _unknown_in(item, part, f"{path}{index}.")
