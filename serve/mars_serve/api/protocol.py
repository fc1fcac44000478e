"""Request bodies of the endpoints that read text: OpenAI's fields with marsray's beside them.

Fields that nobody knows are ignored, and named in a header of the response. Known fields that this
server does not implement are refused unless their value has no effect. Ranges that do not depend on
the model are checked here, all others in `mars_serve.api.incoming`.

Source: OpenAI API reference, "Completions" and "Chat"; vLLM's OpenAI-compatible server for the
additional fields, which stand at the top level as they do there.
"""

from abc import abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from mars_platform.method.mode import Confidence, Mode
from mars_serve.api.bodies import Body, Neutral, at_most
from mars_serve.api.errors import invalid_value
from mars_serve.api.messages import Flag, Messages, TemplateKwargs, ToolChoice, Tools
from mars_serve.api.output_forms import (
    Alternatives,
    GrammarText,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
)
from mars_serve.engine.decoding_options import Span

_MAX_INT32 = 2**31 - 1
_SEEDS = 2**63  # a power of two, exact even in clients that read JSON numbers as floats
_MAX_PROMPTS = 2048
_MAX_BIASES = 1024
_MAX_BAD_WORDS = 128
_MAX_ALLOWED = 2**17
_MAX_IDS = 2**20  # token ids to turn into text
_ID = "^[A-Za-z0-9._:/+=@-]{1,128}$"


class ServiceTier(StrEnum):
    """The quality and priority of a request; ``auto`` is ``default`` if the key may use that."""

    AUTO = "auto"
    DEFAULT = "default"
    FLEX = "flex"
    """Served last, and with the lowest threshold."""
    PRIORITY = "priority"
    """Served first, and decoded without loss."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError(
            "keeps_nothing", "0 would keep nothing; give a number of tokens, or -1 for all that fit"
        )
    return value


Count = Annotated[int, Field(ge=1, le=_MAX_INT32, strict=True)]
Threshold = Annotated[float, Field(gt=0, le=1, strict=True)]
AnyThreshold = Annotated[  # the tags have hyphens: errors do not take them for names of fields
    Annotated[Threshold, Tag("of-all")]
    | Annotated[dict[Span, Threshold], Field(min_length=1), at_most(len(Span)), Tag("by-span")],
    Discriminator(lambda value: "by-span" if isinstance(value, dict) else "of-all"),
]
"""One τ, or τ by span."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)]
TokenIds = Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)]
AllowedIds = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_ALLOWED, fail_fast=True)]
NumKept = Annotated[
    int,
    Field(ge=-1, le=_MAX_INT32, strict=True, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""Token id as the key of a JSON object."""
Bias = Annotated[float, Field(ge=-100, le=100, strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
_StopList = Annotated[list[StopString], Field(max_length=16, fail_fast=True)]
StopStrings = Annotated[
    _StopList, BeforeValidator(_as_list, json_schema_input_type=StopString | _StopList)
]
BadWord = Annotated[str, Field(max_length=256, pattern=r"\S")]


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: Flag | None = None
    """Send a last event with the token counts of the whole stream."""
    continuous_usage_stats: Flag | None = None
    """Put the token counts so far into each event, too."""


class DecodingRequest(Body):
    """Fields that all generating endpoints share: the decoding of the output, in words of vLLM."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    model: str
    """Name of the model."""
    stream: Flag | None = None
    """Send an event for each forward pass instead of one response."""
    service_tier: ServiceTier | None = None
    """Quality and priority of the request."""
    session_id: str | None = None
    """Name of the conversation, whose requests prefer one replica; it overrides ``user``."""
    request_id: Annotated[str, Field(pattern=_ID)] | None = None
    """End of the response's ``id``, which is otherwise random."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Salt of the prefix cache: only requests of a tenant with the same salt share prefixes."""
    deadline_ms: Annotated[float, Field(gt=0, le=86_400_000, strict=True)] | None = None
    """Milliseconds until the output should begin. A key's earliest deadline is served first; a
    request that is certain to miss its own is refused with 503."""

    mode: Mode | None = None
    """Decoding mode: ``exact``, ``ar`` or ``threshold``. The default is ``threshold`` for a request
    with a ``confidence_threshold``, and otherwise the model's own, ``exact`` unless configured."""
    confidence_threshold: AnyThreshold | None = None
    """Fixed τ of mode ``threshold``, or one for each span: ``thinking``, ``answer`` and
    ``tool_arguments``. Without it, the server's live τ applies and may change meanwhile."""
    min_confidence_threshold: Threshold | None = None
    """Lowest τ that may be used, as a threshold of probability."""
    confidence: Confidence | None = None
    """Measure that is compared with τ: ``probability`` (default), ``margin`` or ``entropy``."""
    calibrated: Flag | None = None
    """Correct the confidence by ``calibration.json`` before it is compared with τ."""

    window: Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)] | None = None
    """Masks per forward pass, up to the block size. By default it adapts to load, so outputs of
    mode ``threshold`` can vary; with ``seed`` and a temperature it is the block size."""

    audit: Flag | None = None
    """Allow quality audits of the output; true by default."""

    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    """Sampling temperature; 0 (greedy) by default, where OpenAI has 1."""
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS, strict=True)] | None = None
    """Seed for sampling, below 2**63; random by default."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """Sample from the likeliest tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32, strict=True)] | None = None
    """Sample from this many likeliest tokens; -1 and 0 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """Least probability of a sampled token, relative to the likeliest token's."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, strict=True)] | None = None
    """Penalty on tokens of prompt and output: divides positive logits, multiplies negative ones."""
    presence_penalty: Penalty | None = None
    """Amount subtracted from the logits of tokens that the output contains."""
    frequency_penalty: Penalty | None = None
    """Amount subtracted from a token's logit for each occurrence in the output."""
    logit_bias: (
        Annotated[
            dict[TokenName, Bias],
            Field(max_length=_MAX_BIASES, json_schema_extra={"additionalProperties": False}),
            at_most(_MAX_BIASES),
        ]
        | None
    ) = None
    """Values added to logits, by token id."""
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)] | None = None
    """Least number of output tokens before an end token or stop string applies; a complete grammar
    ends sooner."""
    thinking_token_budget: Annotated[int, Field(ge=-1, le=_MAX_INT32, strict=True)] | None = None
    """Largest number of thinking tokens; -1 (default) for no limit."""
    ignore_eos: Flag | None = None
    """Treat end tokens like any other. Stop strings and ``stop_token_ids`` still apply; refused
    with a grammar."""
    allowed_token_ids: AllowedIds | None = None
    """Ids of the only tokens that the output may contain."""
    bad_words: Annotated[list[BadWord], Field(max_length=_MAX_BAD_WORDS, fail_fast=True)] | None = (
        None
    )
    """Token sequences that must not appear in the output, given as text."""
    stop: StopStrings | None = None
    """Strings that end the output; in chats, thinking is not searched."""
    stop_token_ids: TokenIds | None = None
    """Ids of tokens that end the output."""
    include_stop_str_in_output: Flag | None = None
    """Keep the stop string or token in the text."""
    skip_special_tokens: Flag | None = None
    """Omit special tokens from the text; true by default, and required with tools."""

    add_special_tokens: Flag | None = None
    """Let the tokenizer add its special tokens; by default only in completions."""
    truncate_prompt_tokens: NumKept | None = None
    """Truncate a longer prompt to this many tokens; -1 keeps as many as fit beside the output."""
    truncation_side: Literal["left", "right"] | None = None
    """Side that is cut: ``left`` (default) keeps the last tokens."""
    return_passes: Flag | None = None
    """Report each forward pass in ``mars.pass``: accepted and rejected tokens with confidence;
    streams only."""

    structured_outputs: Annotated[StructuredOutputs, at_most(16)] | None = None
    """JSON schema, regular expression, Lark grammar or choice that the output must match."""
    neutral: ClassVar[Mapping[str, Neutral]] = {
        "guided_whitespace_pattern": Neutral(
            (), "white space is the grammar's own; use guided_regex for another"
        ),
        "spaces_between_special_tokens": Neutral(
            (True, False), "the tokenizers of causal models write no such spaces"
        ),
        "use_beam_search": Neutral((False,), "no beams are searched; use n with a temperature"),
        "length_penalty": Neutral((1,), "it weighs beams, and none are searched; use min_tokens"),
        "logprob_token_ids": Neutral(
            ([],), "only likely tokens are reported; ask for more of these with logprobs"
        ),
        "logits_processors": Neutral(
            ([],), "clients' code is never run; use logit_bias or a grammar"
        ),
        "repetition_detection": Neutral(
            (), "repetitions end no output; use frequency_penalty or max_tokens"
        ),
        "watermarking": Neutral((False,), "outputs get no watermark"),
        "priority": Neutral((0,), "keys have tiers; use service_tier"),
        "stream_interval": Neutral((1,), "a stream has an event for each forward pass"),
        "return_token_offsets": Neutral(
            (False,), "generation reports none; use echo with logprobs"
        ),
        "routed_experts_prompt_start": Neutral((0,), "the routing to experts is not reported"),
        "mm_payload": Neutral(("tensors", "none"), "prompts are text, without media"),
        "return_mm_kwargs": Neutral((True, False), "prompts are text, without media"),
        "kv_transfer_params": Neutral(({},), "engines do not exchange their caches"),
        "ec_transfer_params": Neutral(({},), "engines do not exchange their caches"),
        "vllm_xargs": Neutral(({},), "there are no extensions to read it"),
    }

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The given fields that all generating endpoints share, by name."""
        given = self.model_fields_set & DecodingRequest.model_fields.keys()
        return {name: getattr(self, name) for name in given}

    def refuse_unsupported(self) -> None:
        """Refuse by an `ApiError` what `Body` refuses, and fields that contradict each other."""
        super().refuse_unsupported()
        if self.return_passes and not self.stream:
            raise invalid_value("return_passes", "only streams report them; set stream to true")


class GenerationRequest(DecodingRequest):
    """Fields that OpenAI's two completing endpoints share."""

    stream_options: StreamOptions | None = None
    """Token counts in streams: ``include_usage``, ``continuous_usage_stats``."""
    user: str | None = None
    """Name of the end user, whose requests prefer one replica."""
    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    """Number of outputs per prompt; output i uses the seed plus i."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    """Log-probability and rank of each prompt token, and this many alternatives; not in streams."""
    return_tokens_as_token_ids: Flag | None = None
    """Write tokens of log-probabilities as ``token_id:5``."""
    return_token_ids: Flag | None = None
    """Return the token ids of prompt and output."""
    response_format: ResponseFormat | None = None
    """Text, any JSON object, or JSON by a schema."""
    guided_json: JsonSchema | None = None
    """Older form of ``structured_outputs.json``."""
    guided_regex: GrammarText | None = None
    """Older form of ``structured_outputs.regex``."""
    guided_grammar: GrammarText | None = None
    """Older form of ``structured_outputs.grammar``."""
    guided_choice: Alternatives | None = None
    """Older form of ``structured_outputs.choice``."""

    @property
    @abstractmethod
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output tokens."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Likely tokens to report beside each output token; None for no log-probabilities."""

    def refuse_unsupported(self) -> None:
        """Refuse by an `ApiError` what `Body` refuses, and fields that contradict each other."""
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise invalid_value(
                "stream_options", "only streams have options; leave it out or set stream"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_value(
                "prompt_logprobs", "streams do not report them; leave it out, or leave out stream"
            )


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
    """Text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)] | None = None
    """Largest number of output tokens, 16 by default; 0 scores the prompt, with ``echo`` or
    ``prompt_logprobs``."""
    logprobs: Annotated[int, Field(ge=0, le=5, strict=True)] | None = None
    """Log-probabilities of each token and this many alternatives."""
    echo: Flag | None = None
    """Return the prompt before the output."""
    best_of: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    """Accepted only if equal to n."""
    neutral: ClassVar[Mapping[str, Neutral]] = {
        **GenerationRequest.neutral,
        "suffix": Neutral(("",), "models continue a text and fill no gaps; put it into the prompt"),
        "prompt_embeds": Neutral(([],), "prompts are text or token ids; give one as prompt"),
    }
    parse_special_tokens: Flag | None = None
    """Read control tokens such as ``<|im_start|>`` in the prompt, which are text by default; needs
    a key with ``control_tokens: true``."""

    @property
    def num_prompts(self) -> int | None:
        """Number of prompts in the list of them; None if there is no such list."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return None if is_one else len(self.prompt)

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output tokens."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likely tokens to report beside each output token; None for no log-probabilities."""
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Refuse by an `ApiError` what `Body` refuses, and fields that contradict each other."""
        super().refuse_unsupported()
        if self.best_of not in (None, self.n or 1):
            reason = f"{self.best_of} differs from n, which is {self.n or 1}; leave it out"
            raise invalid_value("best_of", reason)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            reason = "0 only scores a prompt; set echo or prompt_logprobs, or raise it"
            raise invalid_value("max_tokens", reason)


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    """The conversation."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls functions, and which."""
    parallel_tool_calls: Flag | None = None
    """Allow several tool calls in one message; true by default."""
    include_reasoning: Flag | None = None
    """Return the model's thinking; true by default."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Variables of the chat template, such as ``enable_thinking``."""
    reasoning_effort: Effort | None = None
    """How much the model thinks, by the template's variables ``enable_thinking``, ``thinking`` and
    ``reasoning_effort``; without them it counts as unknown."""
    max_tokens: Count | None = None
    """Older name of ``max_completion_tokens``; if both are given they must be equal."""
    max_completion_tokens: Count | None = None
    """Largest number of output tokens; by default what the context leaves."""
    logprobs: Flag | None = None
    """Return the log-probability of each output token."""
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    """Number of alternatives in ``logprobs``."""
    echo: Flag | None = None
    """Begin the answer with the last message, if it is the assistant's."""
    add_generation_prompt: Flag | None = None
    """End the prompt with the start of the assistant's message; true by default, but not with
    ``continue_final_message``."""
    continue_final_message: Flag | None = None
    """Continue the last message."""
    neutral: ClassVar[Mapping[str, Neutral]] = {
        **GenerationRequest.neutral,
        "functions": Neutral(([],), "tools have replaced them; use tools"),
        "function_call": Neutral(("none", "auto"), "tools have replaced it; use tool_choice"),
        "modalities": Neutral((["text"],), "answers are text"),
        "audio": Neutral((), "answers are text"),
        "web_search_options": Neutral(
            (), "the server searches nothing; put what was found into a message"
        ),
        "verbosity": Neutral(("medium",), "the model decides; ask in a message"),
        "documents": Neutral(([],), "prompts have none; put them into a message"),
        "chat_template": Neutral(
            (), "the template is part of the model; use /v1/completions for another"
        ),
        "media_io_kwargs": Neutral(({},), "messages are text, without media"),
        "mm_processor_kwargs": Neutral(({},), "messages are text, without media"),
        "return_prompt_text": Neutral(
            (False,), "only token ids are reported; use return_token_ids and /detokenize"
        ),
    }

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output tokens; OpenAI's newer name wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likely tokens to report beside each output token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """Refuse by an `ApiError` what `Body` refuses, and fields that contradict each other."""
        super().refuse_unsupported()
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            reason = f"{limits[0]} differs from max_completion_tokens, {limits[1]}; leave it out"
            raise invalid_value("max_tokens", reason)
        if self.top_logprobs and not self.logprobs:
            reason = f"{self.top_logprobs} needs logprobs; set logprobs to true"
            raise invalid_value("top_logprobs", reason)
        for name in ("return_token_ids", "return_passes"):
            if getattr(self, name) and self.include_reasoning is False:
                reason = "the tokens of the thinking would be in it; leave out include_reasoning"
                raise invalid_value(name, reason)


_ABSENT: JsonDict = {"type": "null"}
_NONE: JsonDict = {"type": ["array", "null"], "maxItems": 0}
_ONE_OF: JsonDict = {  # a constraint across fields, which no single field can express
    "oneOf": [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, "messages": _ABSENT, "tools": _NONE},
        },
        {
            "required": ["messages"],
            "properties": {"messages": {"type": "array"}, "prompt": _ABSENT},
        },
    ]
}


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(
        extra="ignore", use_attribute_docstrings=True, json_schema_extra=_ONE_OF
    )

    model: str | None = None
    """Name of the model; optional if the server has only one."""
    prompt: Annotated[str, StringConstraints(max_length=2**24)] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    """Tools that the conversation offers."""
    add_generation_prompt: Flag | None = None
    """End a conversation's text with the beginning of the assistant's message, as by default unless
    ``continue_final_message`` is set."""
    continue_final_message: Flag | None = None
    """Leave the end of the last message open."""
    add_special_tokens: Flag | None = None
    """Let the tokenizer add its special tokens; by default only to a prompt, since a conversation's
    template contains them."""
    parse_special_tokens: Flag | None = None
    """Let control tokens in a prompt's text act, as in ``/v1/completions``."""
    return_token_strs: Flag | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    chat_template: None = None
    """Only the model's own template is supported."""


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str | None = None
    """Name of the model; optional if the server has only one."""
    tokens: Annotated[list[TokenId], Field(max_length=_MAX_IDS, fail_fast=True)]
