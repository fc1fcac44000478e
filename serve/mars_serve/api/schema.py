"""Models that describe response bodies in the OpenAPI document.

Responses are built as plain dictionaries in `mars_serve.api.outgoing.completions`; tests check them
against these models.

Source: OpenAI API reference, "Completions" and "Chat".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Span

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]
FinishReason = Literal["stop", "length", "tool_calls"]
# Without a type, as readers disagree on whether it describes the stream or an event.
EVENT_STREAM = {"schema": {"description": "Server-sent events."}}
"""Content of an answer that is a stream, for FastAPI's ``responses``."""


class Shape(BaseModel):
    """Base of all response models; it allows no further fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(Shape):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    """Field of the request that caused the error."""
    code: str | None


class ErrorResponse(Shape):
    """Body of every error response."""

    error: ErrorDetail


class PromptTokensDetails(Shape):
    """Breakdown of the prompt tokens."""

    cached_tokens: Count
    """Number of prompt tokens found in the KV cache instead of being computed."""


class CompletionTokensDetails(Shape):
    """Breakdown of the completion tokens."""

    reasoning_tokens: Count
    """Number of tokens of the model's thinking, whether or not it is returned."""


class Usage(Shape):
    """Token counts; an end token counts as a completion token."""

    prompt_tokens: Count
    """Number of prompt tokens; each prompt counts once, however many outputs share it."""
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpanBlock(Shape):
    """How a span of an output was decoded."""

    requested_confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """τ that the request gave; absent if the span followed the live τ."""
    confidence_threshold: Annotated[float, Field(gt=0, le=1)]
    """Mean τ of the forward passes that began in the span."""
    min_confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lowest τ of these forward passes; present only if τ moved."""
    tokens: Count
    forward_passes: Count
    """Number of forward passes that began in the span."""


class MarsBlock(Shape):
    """How a request was decoded."""

    mode: Mode
    confidence_threshold: Annotated[float, Field(gt=0, le=1)]
    """Mean τ of the forward passes."""
    min_confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lowest τ of the forward passes; present only if τ moved."""
    forward_passes: Count
    tokens_per_forward: Annotated[float, Field(ge=0)]
    spans: dict[Span, SpanBlock] | None = None
    """How each span of the output was decoded, if the request gave thresholds by span."""


class GenerationResponse(Shape):
    """Fields of all responses with generated text."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    """Fingerprint of the model and the server's version."""
    service_tier: Literal["default", "flex", "priority"] | None = None
    """Tier that served the request, if the request named one."""
    usage: Usage
    mars: MarsBlock


class CompletionLogprobs(Shape):
    """Log-probabilities as parallel lists with an item per token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    """Log-probabilities; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]
    from_mask: list[bool]
    """Whether a mask's logits gave the token; otherwise the value is the exact AR one."""


class PromptLogprob(Shape):
    """Log-probability of one token at a place in a prompt."""

    logprob: Logprob
    rank: Annotated[int, Field(ge=1)]
    """Place among all tokens, 1 for the likeliest."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, log-probabilities by token id: its own and those of the likeliest ones;
null for the first, which nothing predicts."""


class CompletionChoice(Shape):
    """One output of a completion."""

    index: Count
    """Index of the prompt times n, plus the index among that prompt's outputs."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | Count | None
    """Stop string, or id of the stop token, of the request that ended the output."""
    token_ids: list[Count] | None = None
    """Token ids of the output, if the request sets ``return_token_ids``."""
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(GenerationResponse):
    """Response of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprobShape(Shape):
    """Log-probability of one token."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatTokenLogprob(TokenLogprobShape):
    """Log-probabilities of an output token and of its likely alternatives."""

    top_logprobs: list[TokenLogprobShape]
    from_mask: bool


class ChatLogprobs(Shape):
    """Log-probabilities of an output's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(Shape):
    """The called function and its arguments."""

    name: str
    arguments: str
    """Arguments as JSON text."""


class ToolCall(Shape):
    """A tool call by the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Shape):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    """Thinking that the model wrote before its answer; absent if it writes none."""
    reasoning: str | None = None
    """The same by another name, where the model's setting ``reasoning_fields`` has it."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Shape):
    """One output of a chat."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | Count | None
    """Stop string, or id of the stop token, of the request that ended the output."""
    token_ids: list[Count] | None = None
    """Token ids of the output, if the request sets ``return_token_ids``."""


class ChatCompletionResponse(GenerationResponse):
    """Response of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[Count] | None = None
    """Token ids of the prompt, if the request sets ``return_token_ids``."""
    prompt_logprobs: PromptLogprobs | None = None


_ERRORS = {
    400: "A value that cannot be served",
    401: "No key, or a wrong one",
    403: "The key does not allow it",
    404: "No such model",
    413: "The body is too large",
    415: "The body is encoded in a way that is not taken",
    422: "The body is no JSON object",
    429: "The key's limit is reached; the header Retry-After says for how many seconds",
    500: "The model failed on this request",
    503: "No replica can take the request now; try again after Retry-After seconds",
}


def errors_described(
    *statuses: int, shape: type[Shape] = ErrorResponse
) -> dict[int | str, dict[str, Any]]:
    """Describe some error statuses for FastAPI's ``responses``; all of them by default."""
    return {
        status: {"model": shape, "description": _ERRORS[status]} for status in statuses or _ERRORS
    }


def generation_described(model: type[Shape]) -> dict[int | str, dict[str, Any]]:
    """Describe all responses of an endpoint that generates text in OpenAI's shapes."""
    return {**stream_described(model), **errors_described()}


def stream_described(model: type[Shape]) -> dict[int | str, dict[str, Any]]:
    """Describe an answer that is a whole response or a stream of events."""
    success = {
        "model": model,
        "description": "The whole response, or a stream of it",
        "content": {"text/event-stream": EVENT_STREAM},
    }
    return {200: success}
