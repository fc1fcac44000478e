"""Models that describe the responses of the Responses API in the OpenAPI document.

Source: OpenAI API reference, "Responses", the object.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from mars_serve.api.protocol import ServiceTier
from mars_serve.api.schema import ChatTokenLogprob, Count, MarsBlock, Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    """A text of the model's message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(Shape):
    """A message from the model."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class OutputThinkingText(Shape):
    """A text of the model's thinking."""

    type: Literal["reasoning_text"]
    text: str


class OutputThinking(Shape):
    """The model's thinking."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[OutputThinkingText]
    encrypted_content: None
    status: ItemStatus


class OutputCall(Shape):
    """A call by the model."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    """Namespace of the function, if the request gave it in one."""
    arguments: str
    """Arguments as JSON text, which is not whole if the status is incomplete."""
    status: ItemStatus


OutputItem = Annotated[OutputMessage | OutputThinking | OutputCall, Field(discriminator="type")]


class InputTokensDetails(Shape):
    """Breakdown of the input tokens."""

    cached_tokens: Count
    """Number of prompt tokens found in the KV cache instead of being computed."""
    cache_write_tokens: Literal[0]
    """Always 0: prefixes are cached by themselves."""


class OutputTokensDetails(Shape):
    """Breakdown of the output tokens."""

    reasoning_tokens: Count


class ResponseUsage(Shape):
    """Token counts."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ResponseFailure(Shape):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Shape):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Shape):
    """A response; what it repeats of the request is described there."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: ServiceTier
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    mars: MarsBlock | None = None
    """How the request was decoded; absent before its end."""


class DeletedResponse(Shape):
    """Answer to the deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Shape):
    """Some of the items that a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
