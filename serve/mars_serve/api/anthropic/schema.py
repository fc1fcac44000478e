"""Models that describe the Messages API's responses in the OpenAPI document.

Source: Anthropic API reference, "Messages" and "Errors".
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from mars_serve.api.schema import Count, MarsBlock, Shape, errors_described, stream_described


class MessagesErrorDetail(Shape):
    """Description of an error."""

    type: str
    message: str
    details: dict[str, Any] | None = None
    """Facts with which a client goes on without the refused field."""


class MessagesError(Shape):
    """Body of every error response of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class TextContentBlock(Shape):
    """A piece of the answer's text."""

    type: Literal["text"]
    text: str


class ThinkingContentBlock(Shape):
    """The model's thinking."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Stands for Anthropic's signature, which clients send back; it is not looked at."""


class ToolUseContentBlock(Shape):
    """A call of one of the client's tools."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """Arguments, as far as they were written; ``INVALID_JSON`` holds those that are no object."""


class OutputTokensDetails(Shape):
    """Breakdown of the output tokens."""

    thinking_tokens: Count


class MessageUsage(Shape):
    """Token counts; the prompt's are those that were computed and those found in the cache."""

    input_tokens: Count
    cache_creation_input_tokens: Literal[0]
    """Always 0: every prefix is cached, and none is charged for that."""
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard", "flex", "priority"] | None = None
    """Tier that served the request, if the request named one."""


class Message(Shape):
    """Response of ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[
        Annotated[
            TextContentBlock | ThinkingContentBlock | ToolUseContentBlock,
            Field(discriminator="type"),
        ]
    ]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    mars: MarsBlock


class MessageTokens(Shape):
    """Response of ``POST /v1/messages/count_tokens``."""

    input_tokens: Count
    """Tokens of the prompt, those of tools and of the beginning of the answer included."""


MESSAGE_DESCRIBED = {**stream_described(Message), **errors_described(shape=MessagesError)}
"""All responses of ``POST /v1/messages``, for FastAPI."""
TOKENS_DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {"model": MessageTokens},
    **errors_described(shape=MessagesError),
}
"""All responses of ``POST /v1/messages/count_tokens``, for FastAPI."""
