"""Shapes of the responses, as the OpenAPI document describes them.

Responses are made as plain dictionaries, in `responses`; these models only describe them, and tests
hold the two together. Source: OpenAI API reference, "Completions" and "Chat".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mars_platform.method.mode import Mode

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    """What a response has, and nothing else."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(Shape):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """Field of the request that it is about."""
    code: str | None


class ErrorResponse(Shape):
    """Every error has this shape."""

    error: ErrorDetail


class PromptTokensDetails(Shape):
    """Of the prompt tokens."""

    cached_tokens: Count
    """Found stored instead of being computed."""


class Usage(Shape):
    """Token counts; an end token counts as a completion token."""

    prompt_tokens: Count
    """Each prompt counts once, however many outputs share it."""
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class MarsBlock(Shape):
    """What was done to serve a request."""

    mode: Mode
    confidence_threshold: Annotated[float, Field(gt=0, le=1)]
    """Mean τ of the forward passes."""
    min_confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lowest τ of them; only where it moved."""
    forward_passes: Count
    tokens_per_forward: Annotated[float, Field(ge=0)]


class Body(Shape):
    """What all responses share."""

    id: str
    created: int
    """Unix time, in seconds."""
    model: str
    system_fingerprint: str
    """Of the model and the server's version."""
    service_tier: Literal["default", "flex", "priority"] | None = None
    """The tier used, where the request gave one."""
    usage: Usage
    mars: MarsBlock


class CompletionLogprobs(Shape):
    """Lists side by side, one item a token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    """None of the first token of an echoed prompt."""
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]
    from_mask: list[bool]
    """Whether a mask gave the token; else the value is the exact AR one."""


class CompletionChoice(Shape):
    """One output of a completion."""

    index: Count
    """Place of the prompt times n, and the output's place among those of the prompt."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionResponse(Body):
    """Response of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprobShape(Shape):
    """Log-probability of one token."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatTokenLogprob(TokenLogprobShape):
    """Log-probability of an output token and of the likeliest ones in its place."""

    top_logprobs: list[TokenLogprobShape]
    from_mask: bool


class ChatLogprobs(Shape):
    """Log-probabilities of an output."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(Shape):
    """What the model calls."""

    name: str
    arguments: str
    """JSON text."""


class ToolCall(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Shape):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Shape):
    """One output of a chat."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletionResponse(Body):
    """Response of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


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


def errors_described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Some errors, as FastAPI's ``responses`` takes them; without arguments, all of them."""
    return {
        status: {"model": ErrorResponse, "description": _ERRORS[status]}
        for status in statuses or _ERRORS
    }


def generation_described(model: type[Body]) -> dict[int | str, dict[str, Any]]:
    """Everything that an endpoint that generates may answer."""
    # no type: some readers take the schema for that of the body, others for that of an event
    stream = {"schema": {"description": "Server-sent events, one a pass."}}
    success = {
        "model": model,
        "description": "The whole response, or a stream of it",
        "content": {"text/event-stream": stream},
    }
    return {200: success, **errors_described()}
