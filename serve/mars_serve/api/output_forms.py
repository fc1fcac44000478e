"""Types of the request fields that give the output a form: a JSON schema, a grammar or a choice."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mars_serve.api.messages import Flag

MAX_GRAMMAR_LENGTH = 65_536
"""Longest JSON schema, regular expression or grammar, in characters."""

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Alternative = Annotated[str, Field(min_length=1, max_length=1024)]
Alternatives = Annotated[list[Alternative], Field(min_length=1, max_length=1024, fail_fast=True)]
JsonSchema = dict[str, Any] | Flag | GrammarText
"""JSON schema as an object, as a boolean or as text."""


class NamedSchema(BaseModel):
    """OpenAI's wrapper around a schema; its other fields change nothing."""

    name: Any = None
    description: Any = None
    strict: Any = None
    schema_: dict[str, Any] | Flag = Field(alias="schema")


class PlainFormat(BaseModel):
    """OpenAI's response format for free text or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(BaseModel):
    """OpenAI's response format for JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """vLLM's structured outputs; exactly one field must be given."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), json_schema_extra={"minProperties": 1}
    )

    json_: JsonSchema | None = Field(default=None, alias="json")
    """JSON schema that the output satisfies."""
    json_object: Flag | None = None
    """Make the output one JSON object of any shape."""
    regex: GrammarText | None = None
    """Regular expression that the whole output matches."""
    grammar: GrammarText | None = None
    """Grammar of the output, in Lark's notation."""
    choice: Alternatives | None = None
    """Texts of which the output is one."""
