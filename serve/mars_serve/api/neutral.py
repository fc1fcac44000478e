"""Fields of request bodies that this server does not implement, and those that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mars_serve.api.errors import shown, unsupported_value

_MAX_UNKNOWN = 64
"""Most unknown names that a body keeps."""


@dataclass(frozen=True)
class Neutral:
    """Marks a field that is not implemented: only null and ``values`` are accepted."""

    values: tuple[Any, ...]
    reason: str
    """Why other values are refused and what to do instead, as the end of a sentence."""

    def has(self, value: Any) -> bool:
        """Return whether a value changes nothing; true and 1 are different values here."""
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.values
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: Callable[[CoreSchema], JsonSchemaValue]
    ) -> JsonSchemaValue:
        """Describe the accepted values in the OpenAPI document."""
        return {"enum": [None, *self.values]}


class Body(BaseModel):
    """A request body that notes the names of its unknown fields, which are otherwise ignored."""

    _unknown: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _note_unknown(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(data)
        if isinstance(data, dict):
            unknown = (name for name in data if name not in cls.model_fields)
            body._unknown = tuple(islice(unknown, _MAX_UNKNOWN))
        return body

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of the fields that the body has and this server does not know, some at most."""
        return self._unknown

    def refuse_unsupported(self) -> None:
        """Refuse fields that would otherwise be silently ignored.

        Raises:
            ApiError: status 400: the message names the field and the values it may have.
        """
        for name, neutral in neutral_fields(type(self)).items():
            value = getattr(self, name)
            if not neutral.has(value):
                allowed = "".join(f" or set it to {item!r}" for item in neutral.values)
                reason = f"{shown(value)} is not supported, since {neutral.reason}"
                raise unsupported_value(name, f"{reason}; leave it out{allowed}")


def neutral_fields(body: type[BaseModel]) -> dict[str, Neutral]:
    """Return the fields of a body that are not implemented, by name."""
    return {
        name: each
        for name, field in body.model_fields.items()
        for each in field.metadata
        if isinstance(each, Neutral)
    }
