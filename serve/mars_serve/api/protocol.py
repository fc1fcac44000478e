"""The REST protocol: OpenAI's request bodies with marsray's fields beside them.

Source: OpenAI API reference, "Completions" and "Chat"; vLLM's OpenAI-compatible server for the
fields beyond, which stand at the top level as there. Unknown fields are ignored, known ones that do
nothing here are refused. Ranges that need no model are checked here, all others in `options` and
`prompts`; response bodies are in `schema`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mars_platform.method.mode import Confidence, Mode
from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.messages import Flag, Messages, TemplateKwargs, ToolChoice, Tools

MAX_GRAMMAR_LENGTH = 65_536
"""Characters of a schema, a regular expression or a grammar."""

_MAX_INT32 = 2**31 - 1
_SEEDS = 2**63  # the bounds are exact in JSON, whose numbers many read as floats
_MAX_PROMPTS = 2048


class ServiceTier(StrEnum):
    """What a request is served with; ``auto`` is ``default`` where the key may use that."""

    AUTO = "auto"
    DEFAULT = "default"
    FLEX = "flex"
    """Served last, and with the lowest threshold."""
    PRIORITY = "priority"
    """Served first, and decoded without loss."""


@dataclass(frozen=True)
class Neutral:
    """Marks a field that is known but does nothing: any value but these is refused."""

    values: tuple[Any, ...]

    def has(self, value: Any) -> bool:
        """Whether a value asks for nothing; true and 1 are not the same here."""
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.values
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: Callable[[CoreSchema], JsonSchemaValue]
    ) -> JsonSchemaValue:
        """What the OpenAPI document says of the field."""
        return {"enum": [None, *self.values]}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, strict=True)]
Threshold = Annotated[float, Field(gt=0, le=1, strict=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""A token id as a key of an object."""
Bias = Annotated[float, Field(ge=-100, le=100, strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
_StopList = Annotated[list[StopString], Field(max_length=16)]
StopStrings = Annotated[
    _StopList, BeforeValidator(_as_list, json_schema_input_type=StopString | _StopList)
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Alternative = Annotated[str, Field(min_length=1, max_length=1024)]
Alternatives = Annotated[list[Alternative], Field(min_length=1, max_length=1024)]
JsonSchema = dict[str, Any] | GrammarText
"""A schema, or the text of one."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: Flag | None = None
    """Whether a last event counts the tokens of the whole stream."""
    continuous_usage_stats: Flag | None = None
    """Whether each event counts those so far, too."""


class NamedSchema(BaseModel):
    """OpenAI's wrapping of a schema; its other fields do not change what is allowed."""

    schema_: dict[str, Any] = Field(alias="schema")


class PlainFormat(BaseModel):
    """OpenAI's way to ask for text, or for any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(BaseModel):
    """OpenAI's way to ask for JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """vLLM's way to ask for structure: exactly one of these fields."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), json_schema_extra={"minProperties": 1}
    )

    json_: JsonSchema | None = Field(default=None, alias="json")
    """A JSON schema that the output satisfies."""
    json_object: Flag | None = None
    """Whether the output is any one JSON object."""
    regex: GrammarText | None = None
    """A regular expression that matches all of the output."""
    grammar: GrammarText | None = None
    """A grammar in Lark's notation."""
    choice: Alternatives | None = None
    """The outputs to choose from."""


class GenerationRequest(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    model: str
    stream: Flag | None = None
    """Send an event for each forward pass instead of one response."""
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    """Taken and not used, as are `store`, `metadata` and the like."""

    mode: Mode | None = None
    """How to decode; the model's setting unless given."""
    confidence_threshold: Threshold | None = None
    """Pins τ; without it the request follows the server's, which may change while it runs."""
    min_confidence_threshold: Threshold | None = None
    """τ is never below this."""
    confidence: Confidence | None = None
    """What is compared with the threshold; probability unless given."""
    calibrated: Flag | None = None
    """Whether the confidence is first corrected by the checkpoint's calibration."""

    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    """Outputs of each prompt, 1 unless given; number i is drawn with the seed + i."""
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    """0, greedy, unless given: unlike OpenAI's default of 1, so that answers can be repeated."""
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS, strict=True)] | None = None
    """Of the draw, modulo 2**63; a random one is taken where a temperature above 0 has none."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """Draw from the likeliest tokens that have this probability together."""
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32, strict=True)] | None = None
    """Likeliest tokens to choose from; -1 and 0 are all."""
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """Least probability of a token, as a share of the likeliest one's."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100, strict=True)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[TokenName, Bias],
            Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    """Added to the logits of tokens, by token id."""
    min_tokens: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Output tokens before anything but the limit may end the output."""
    stop: StopStrings | None = None
    """The output ends before the first of these strings."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    """The output ends before the first of these tokens."""
    include_stop_str_in_output: Flag | None = None
    """Whether the text has the string or token that ended it, too."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_grammar: GrammarText | None = None
    guided_choice: Alternatives | None = None

    ignore_eos: Annotated[Any, Neutral((False,))] = None
    use_beam_search: Annotated[Any, Neutral((False,))] = None
    length_penalty: Annotated[Any, Neutral((1,))] = None
    allowed_token_ids: Annotated[Any, Neutral(())] = None
    bad_words: Annotated[Any, Neutral(([],))] = None
    skip_special_tokens: Annotated[Any, Neutral((True,))] = None
    truncate_prompt_tokens: Annotated[Any, Neutral(())] = None
    prompt_logprobs: Annotated[Any, Neutral(())] = None
    guided_whitespace_pattern: Annotated[Any, Neutral(())] = None

    @property
    @abstractmethod
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each output token; None reports no probabilities."""

    def refuse_unsupported(self) -> None:
        """Refuse what would otherwise be silently ignored.

        Raises:
            ApiError: status 400, naming the field and the value it may have.
        """
        for name, neutral in _neutral_fields(type(self)):
            value = getattr(self, name)
            if not neutral.has(value):
                allowed = "".join(f" or set it to {item!r}" for item in neutral.values)
                raise ApiError(
                    400,
                    f"{name}: {value!r:.80} is not supported; leave it out{allowed}",
                    param=name,
                    code="unsupported_value",
                )
        if self.stream_options is not None and not self.stream:
            raise invalid_value("stream_options", "it needs a stream; leave it out or set stream")


def _neutral_fields(body: type[BaseModel]) -> list[tuple[str, Neutral]]:
    """The fields of a body that do nothing here."""
    return [
        (name, each)
        for name, field in body.model_fields.items()
        for each in field.metadata
        if isinstance(each, Neutral)
    ]


def _kind_of_prompt(value: Any) -> str | None:
    """Which of the four kinds a prompt is; its first item tells."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "texts"
    return "many" if isinstance(first, list) else "tokens"


PromptText = Annotated[str, Field(min_length=1)]
PromptTokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Several = Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)
SeveralTexts = Annotated[list[PromptText], _Several]
SeveralTokens = Annotated[list[PromptTokens], _Several]
AnyPrompt = Annotated[
    Annotated[PromptText, Tag("text")]
    | Annotated[PromptTokens, Tag("tokens")]
    | Annotated[SeveralTexts, Tag("texts")]
    | Annotated[SeveralTokens, Tag("many")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a text, a list of token ids, or a list of either",
    ),
]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: AnyPrompt
    max_tokens: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Output tokens at the most, 16 unless given; 0, with echo, scores the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=5, strict=True)] | None = None
    """Report each token's log-probability and those of so many likeliest tokens."""
    echo: Flag | None = None
    """Whether the text and the log-probabilities begin with the prompt's."""
    best_of: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    """Taken where it is n."""
    suffix: Annotated[Any, Neutral(("",))] = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each output token; None reports no probabilities."""
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Refuse what would otherwise be silently ignored.

        Raises:
            ApiError: status 400, naming the field and the value it may have.
        """
        super().refuse_unsupported()
        if self.best_of not in (None, self.n or 1):
            reason = f"{self.best_of} is not n, which is {self.n or 1}; leave it out"
            raise invalid_value("best_of", reason)
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value("max_tokens", "0 is for scoring a prompt; set echo, or ask for 1")


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    """Whether one turn may have several calls, as it may unless told."""
    chat_template_kwargs: TemplateKwargs | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """Output tokens at the most, by default what the model has room for."""
    logprobs: Flag | None = None
    """Report each output token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    """Report those of so many likeliest tokens, too."""
    functions: Annotated[Any, Neutral(([],))] = None
    function_call: Annotated[Any, Neutral(("none", "auto"))] = None
    modalities: Annotated[Any, Neutral((["text"],))] = None
    audio: Annotated[Any, Neutral(())] = None
    web_search_options: Annotated[Any, Neutral(())] = None
    reasoning_effort: Annotated[Any, Neutral(("none",))] = None
    verbosity: Annotated[Any, Neutral(("medium",))] = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output; OpenAI's newer name wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each output token; None reports no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """Refuse what would otherwise be silently ignored.

        Raises:
            ApiError: status 400, naming the field and the value it may have.
        """
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            reason = f"{self.top_logprobs} needs logprobs; set logprobs to true"
            raise invalid_value("top_logprobs", reason)
