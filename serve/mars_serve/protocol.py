"""The REST protocol: OpenAI's request and response shapes with marsray's fields beside them.

Source: OpenAI API reference, "Completions" and "Chat"; vLLM's OpenAI-compatible server for the
fields beyond, which stand at the top level as there. Unknown fields are ignored, known ones that do
nothing here are refused. Ranges that need no model are checked here, all others in `options`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from mars_platform.mode import Confidence, Mode
from mars_serve.errors import ApiError, invalid_value
from mars_serve.messages import ChatMessage

MAX_GRAMMAR_LENGTH = 65_536
"""Characters of a schema, a regular expression or a grammar."""

_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, strict=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Alternative = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Alternatives = Annotated[list[Alternative], Field(min_length=1, max_length=1024)]
JsonSchema = dict[str, Any] | GrammarText
"""A schema, or the text of one."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: bool = False


class NamedSchema(BaseModel):
    """OpenAI's wrapping of a schema; its other fields do not change what is allowed."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's way to ask for structure: exactly one of these fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    json_: JsonSchema | None = Field(default=None, alias="json")
    """A JSON schema that the output satisfies."""
    json_object: bool | None = None
    """Whether the output is any one JSON object."""
    regex: GrammarText | None = None
    """A regular expression that matches all of the output."""
    grammar: GrammarText | None = None
    """A grammar in Lark's notation."""
    choice: Alternatives | None = None
    """The outputs to choose from."""


class GenerationRequest(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    max_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    mode: Mode | None = None
    confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    min_confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    confidence: Confidence | None = None
    """What is compared with the threshold; probability unless given."""
    calibrated: bool | None = None
    """Whether the confidence is first corrected by the checkpoint's calibration."""

    n: Annotated[int, Field(ge=1, le=16, strict=True)] | None = None
    """Outputs, 1 unless given; number i is drawn with the seed + i."""
    best_of: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    """0, greedy, unless given: unlike OpenAI's default of 1, so that answers can be repeated."""
    seed: Annotated[int, Field(ge=-_MAX_INT64 - 1, le=_MAX_INT64, strict=True)] | None = None
    """Of the draw, modulo 2**63; a random one is taken where a temperature above 0 has none."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32, strict=True)] | None = None
    """Likeliest tokens to choose from; -1 and 0 are all."""
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, strict=True)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[int, Field(ge=0, le=_MAX_INT32)],
                Annotated[float, Field(ge=-100, le=100, strict=True)],
            ],
            Field(max_length=1024),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Output tokens before anything but ``max_tokens`` may end the output."""
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=16)] | None = None
    """The output ends before the first of these strings."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    """The output ends before the first of these tokens."""
    include_stop_str_in_output: bool | None = None
    """Whether the text has the string or token that ended it, too."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_grammar: GrammarText | None = None
    guided_choice: Alternatives | None = None

    # These fields are known, and anything but their neutral value is refused.
    service_tier: str | None = None
    ignore_eos: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    skip_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    guided_whitespace_pattern: Any = None

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the output."""
        return "max_tokens"

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each output token; None reports no probabilities."""

    def refuse_unsupported(self) -> None:
        """Refuse what would otherwise be silently ignored.

        Raises:
            ApiError: status 400, naming the field and the value it may have.
        """
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                allowed = "".join(f" or set it to {item!r}" for item in neutral)
                raise ApiError(
                    400,
                    f"{name}: {value!r:.80} is not supported; leave it out{allowed}",
                    param=name,
                    code="unsupported_value",
                )
        if self.best_of not in (None, self.n or 1):
            reason = f"{self.best_of} is not n, which is {self.n or 1}; leave it out"
            raise invalid_value("best_of", reason)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "guided_whitespace_pattern": (),
}


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5, strict=True)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each output token; None reports no probabilities."""
        return self.logprobs


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Annotated[bool, Field(strict=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the output; OpenAI's newer name wins."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

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


class MarsBlock(BaseModel):
    """What was done to serve a request."""

    mode: Mode
    confidence_threshold: float
    forward_passes: int
    tokens_per_forward: float


class Usage(BaseModel):
    """Token counts; an end token counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
