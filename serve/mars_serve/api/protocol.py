"""Request bodies of the generating endpoints: OpenAI's fields with marsray's beside them.

Unknown fields are ignored. Known fields that this server does not implement are refused unless
their value has no effect. Ranges that do not depend on the model are checked here, all others in
`mars_serve.api.incoming`.

Source: OpenAI API reference, "Completions" and "Chat"; vLLM's OpenAI-compatible server for the
additional fields, which stand at the top level as they do there.
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
from mars_serve.api.bounds import at_most
from mars_serve.api.errors import invalid_value, shown, unsupported_value
from mars_serve.api.messages import Flag, Messages, TemplateKwargs, ToolChoice, Tools
from mars_serve.engine.decoding_options import Span

MAX_GRAMMAR_LENGTH = 65_536
"""Longest JSON schema, regular expression or grammar, in characters."""

_MAX_INT32 = 2**31 - 1
_SEEDS = 2**63  # a power of two, exact even in clients that read JSON numbers as floats
_MAX_PROMPTS = 2048
_MAX_BIASES = 1024


class ServiceTier(StrEnum):
    """The quality and priority of a request; ``auto`` is ``default`` if the key may use that."""

    AUTO = "auto"
    DEFAULT = "default"
    FLEX = "flex"
    """Served last, and with the lowest threshold."""
    PRIORITY = "priority"
    """Served first, and decoded without loss."""


@dataclass(frozen=True)
class Neutral:
    """Marks a field that is not implemented: only null and ``values`` are accepted."""

    values: tuple[Any, ...]

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


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, le=_MAX_INT32, strict=True)]
Threshold = Annotated[float, Field(gt=0, le=1, strict=True)]
AnyThreshold = Annotated[  # the tags have hyphens: errors do not take them for names of fields
    Annotated[Threshold, Tag("of-all")]
    | Annotated[dict[Span, Threshold], Field(min_length=1), at_most(len(Span)), Tag("by-span")],
    Discriminator(lambda value: "by-span" if isinstance(value, dict) else "of-all"),
]
"""One τ, or τ by span."""
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""Token id as the key of a JSON object."""
Bias = Annotated[float, Field(ge=-100, le=100, strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
_StopList = Annotated[list[StopString], Field(max_length=16, fail_fast=True)]
StopStrings = Annotated[
    _StopList, BeforeValidator(_as_list, json_schema_input_type=StopString | _StopList)
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Alternative = Annotated[str, Field(min_length=1, max_length=1024)]
Alternatives = Annotated[list[Alternative], Field(min_length=1, max_length=1024, fail_fast=True)]
JsonSchema = dict[str, Any] | GrammarText
"""JSON schema as an object or as text."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: Flag | None = None
    """Send a last event with the token counts of the whole stream."""
    continuous_usage_stats: Flag | None = None
    """Put the token counts so far into each event, too."""


class NamedSchema(BaseModel):
    """OpenAI's wrapper around a schema; its other fields are ignored."""

    schema_: dict[str, Any] = Field(alias="schema")


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


class GenerationRequest(BaseModel):
    """Fields that both generating endpoints share."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    model: str
    stream: Flag | None = None
    """Send an event for each forward pass instead of one response."""
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    """Name of the end user or conversation, whose requests prefer the replica of the last one."""
    deadline_ms: Annotated[float, Field(gt=0, le=86_400_000, strict=True)] | None = None
    """Milliseconds from arrival within which the output should begin. Among the requests of a key
    those with the earliest deadline are served first; one that surely comes too late is refused."""

    mode: Mode | None = None
    """Decoding mode; by default the model's setting."""
    confidence_threshold: AnyThreshold | None = None
    """Fixed τ for this request, or an object of one for each span of the output: ``thinking``,
    ``answer`` and ``tool_arguments``. What has none follows the server's live τ, which may change
    while the request runs."""
    min_confidence_threshold: Threshold | None = None
    """Lowest τ that this request is decoded with."""
    confidence: Confidence | None = None
    """Confidence measure that is compared with the threshold; probability by default."""
    calibrated: Flag | None = None
    """Correct the confidence with the checkpoint's calibration before it is compared."""

    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    """Number of outputs per prompt, 1 by default; output i is drawn with the seed plus i."""
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    """Sampling temperature. The default is 0 (greedy), unlike OpenAI's 1, so that answers can be
    reproduced."""
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS, strict=True)] | None = None
    """Seed for sampling, modulo 2**63; by default a random one."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """Sample from the likeliest tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32, strict=True)] | None = None
    """Number of likeliest tokens to sample from; -1 and 0 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """Lowest probability of a sampled token, as a fraction of the likeliest token's."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, strict=True)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[TokenName, Bias],
            Field(max_length=_MAX_BIASES, json_schema_extra={"additionalProperties": False}),
            at_most(_MAX_BIASES),
        ]
        | None
    ) = None
    """Values added to the logits of tokens, by token id."""
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)] | None = None
    """Number of output tokens before an end token or stop string may end the output."""
    stop: StopStrings | None = None
    """Strings; the output ends before the first one that occurs."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    """Token ids; the output ends before the first one that occurs."""
    include_stop_str_in_output: Flag | None = None
    """Keep the stop string or token that ended the output in its text."""

    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs, at_most(16)] | None = None
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
        """Name and value of the field that limits the output tokens."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of likely tokens to report beside each output token; None for no
        log-probabilities.
        """

    def refuse_unsupported(self) -> None:
        """Refuse fields that would otherwise be silently ignored.

        Raises:
            ApiError: status 400: the message names the field and the values it may have.
        """
        for name, neutral in _neutral_fields(type(self)):
            value = getattr(self, name)
            if not neutral.has(value):
                allowed = "".join(f" or set it to {item!r}" for item in neutral.values)
                reason = f"{shown(value)} is not supported; leave it out{allowed}"
                raise unsupported_value(name, reason)
        if self.stream_options is not None and not self.stream:
            raise invalid_value(
                "stream_options", "only streams have options; leave it out or set stream"
            )


def _neutral_fields(body: type[BaseModel]) -> list[tuple[str, Neutral]]:
    """Return the names and neutral values of a body's fields that are not implemented."""
    return [
        (name, each)
        for name, field in body.model_fields.items()
        for each in field.metadata
        if isinstance(each, Neutral)
    ]


def _kind_of_prompt(value: Any) -> str | None:
    """Return the tag of a prompt's type, which its first item decides."""
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
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)] | None = None
    """Largest number of output tokens, 16 by default; 0 with echo only scores the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=5, strict=True)] | None = None
    """Report the log-probabilities of each token and of this many likely alternatives."""
    echo: Flag | None = None
    """Begin the text and the log-probabilities with the prompt's."""
    best_of: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    """Accepted only if equal to n."""
    suffix: Annotated[Any, Neutral(("",))] = None
    parse_special_tokens: Flag | None = None
    """Let control tokens in a prompt's text act, such as ``<|im_start|>``; by default, they are
    text. The key needs ``control_tokens: true``."""

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output tokens."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of likely tokens to report beside each output token; None for no
        log-probabilities.
        """
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Refuse fields that would otherwise be silently ignored, and contradictory ones.

        Raises:
            ApiError: status 400: the message names the field and the values it may have.
        """
        super().refuse_unsupported()
        if self.best_of not in (None, self.n or 1):
            reason = f"{self.best_of} differs from n, which is {self.n or 1}; leave it out"
            raise invalid_value("best_of", reason)
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value("max_tokens", "0 only scores a prompt; set echo or raise it")


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    """Allow several tool calls in one message; true by default."""
    include_reasoning: Flag | None = None
    """Return the model's thinking, too; true by default."""
    chat_template_kwargs: TemplateKwargs | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """Largest number of output tokens; by default what fits into the model's context."""
    logprobs: Flag | None = None
    """Report the log-probability of each output token."""
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    """Report the log-probabilities of this many likely alternatives, too."""
    functions: Annotated[Any, Neutral(([],))] = None
    function_call: Annotated[Any, Neutral(("none", "auto"))] = None
    modalities: Annotated[Any, Neutral((["text"],))] = None
    audio: Annotated[Any, Neutral(())] = None
    web_search_options: Annotated[Any, Neutral(())] = None
    reasoning_effort: Annotated[Any, Neutral(("none",))] = None
    verbosity: Annotated[Any, Neutral(("medium",))] = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output tokens; OpenAI's newer name wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of likely tokens to report beside each output token; None for no
        log-probabilities.
        """
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """Refuse fields that would otherwise be silently ignored, and contradictory ones.

        Raises:
            ApiError: status 400: the message names the field and the values it may have.
        """
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            reason = f"{self.top_logprobs} needs logprobs; set logprobs to true"
            raise invalid_value("top_logprobs", reason)
