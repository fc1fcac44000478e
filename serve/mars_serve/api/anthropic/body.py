"""Bodies of the Messages API, and their translation to a chat.

Source: Anthropic API reference, "Messages"; what Claude Code sends.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mars_serve.api.anthropic.blocks import TextContent, Turns, chat_of
from mars_serve.api.bodies import Neutral
from mars_serve.api.errors import invalid_value
from mars_serve.api.messages import (
    MAX_TOOLS,
    Flag,
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    NamedTool,
    Text,
    Tool,
)
from mars_serve.api.output_forms import NamedSchema, SchemaFormat
from mars_serve.api.protocol import (
    ChatCompletionRequest,
    Count,
    DecodingRequest,
    Effort,
    ServiceTier,
    StopStrings,
)

_NAMES = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "include_reasoning": "thinking.display",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
}
"""Names here of a chat's fields."""
_SWITCHES = "enable_thinking", "thinking"
"""Variables by which chat templates turn thinking on and off."""


def _only_custom(value: str | None) -> str | None:
    if value not in (None, "custom"):
        raise PydanticCustomError(
            "server_tool",
            "Input should be 'custom', since this server runs no tools and knows none by name; "
            "leave the tool out, or define it with name and input_schema",
        )
    return value


class CustomTool(BaseModel):
    """A tool of the client's that the model may call."""

    type: Annotated[str | None, AfterValidator(_only_custom)] = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input."""
    strict: Flag | None = None
    """Guarantee that every call satisfies the schema, even if ``tool_choice`` is auto."""
    cache_control: Any = None
    eager_input_streaming: Any = None
    """Has no effect: input is always streamed as it is written."""
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AnyTool(BaseModel):
    """Let the model choose, or make it call any tool, or none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: Flag | None = None


class OneTool(BaseModel):
    """Make the model call one tool."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: Flag | None = None


class ThinkingSettings(BaseModel):
    """Whether the model thinks, by the variables that its chat template has for that."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    """Number of tokens behind which the thinking is ended; has no effect where none is."""
    display: Literal["summarized", "omitted"] | None = None
    """Whether the thinking is returned, as by default; it is never summarized."""


class JsonFormat(BaseModel):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputSettings(BaseModel):
    """How much the model thinks, and the form of its answer."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class Metadata(BaseModel):
    """Facts about the request."""

    user_id: Annotated[str, Field(max_length=4096)] | None = None
    """Name of the user or conversation, whose requests prefer the replica of the last one."""


class ContextEdit(BaseModel):
    """A change of the conversation before the model reads it; only one without effect is known."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(BaseModel):
    """Changes of the conversation."""

    edits: Annotated[list[ContextEdit], Field(max_length=16, fail_fast=True)] = []


def _our_tier(value: Any) -> Any:
    return ServiceTier.DEFAULT.value if value == "standard_only" else value


class ConversationRequest(DecodingRequest):
    """Body of ``POST /v1/messages/count_tokens``, which has the fields of ``/v1/messages``."""

    messages: Turns
    """The conversation."""
    system: TextContent | None = None
    """Instructions for the model."""
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Tools that the model may call."""
    tool_choice: Annotated[AnyTool | OneTool, Field(discriminator="type")] | None = None
    """Whether the model calls tools, and which."""
    thinking: ThinkingSettings | None = None
    """Whether the model thinks before it answers; by default what its chat template says."""
    output_config: OutputSettings | None = None
    """How much the model thinks, and the form of its answer."""
    stop_sequences: StopStrings | None = None
    """Strings; the output ends before the first one that occurs outside the thinking."""
    metadata: Metadata | None = None
    """Facts about the request."""
    service_tier: Annotated[
        ServiceTier | None,
        BeforeValidator(
            _our_tier, json_schema_input_type=ServiceTier | Literal["standard_only"] | None
        ),
    ] = None
    """Quality and priority of the request; ``standard_only`` means ``default``."""
    cache_control: Any = None
    """Has no effect: every prefix is cached."""
    context_management: ContextManagement | None = None
    """Changes of the conversation; ``clear_thinking_20251015`` has no effect, since the chat
    template decides which thinking it repeats, and others are refused."""
    neutral: ClassVar[Mapping[str, Neutral]] = {
        **DecodingRequest.neutral,
        "compaction": Neutral((), "the server summarises nothing; ask for a summary in messages"),
        "container": Neutral((), "the server runs no code"),
        "mcp_servers": Neutral(([],), "the server calls none; give their tools as tools"),
        "inference_geo": Neutral((), "the server does not know where it runs"),
        "speed": Neutral(("standard",), "tiers decide; use service_tier"),
        "diagnostics": Neutral((), "no request is compared with an earlier one"),
        "thread": Neutral((), "the server keeps no conversations; send all messages"),
        "output_format": Neutral((), "output_config has replaced it; use output_config.format"),
    }

    @property
    def names(self) -> Mapping[str, str]:
        """Names here of a chat's fields, except for those that the body gives by that name."""
        given = self.model_fields_set
        return {inner: own for inner, own in _NAMES.items() if inner not in given}

    def refuse_unsupported(self) -> None:
        """Refuse by an `ApiError` what `Body` refuses, and fields that contradict each other."""
        super().refuse_unsupported()
        if self.stop is not None and self.stop_sequences is not None:
            raise invalid_value("stop", "stop_sequences already gives strings; leave it out")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not self.tools:
            raise invalid_value("tool_choice", f"{choice.type!r} needs tools; give some")

    def to_chat(self) -> ChatCompletionRequest:
        """Return the chat of which this is another form.

        Its fields were checked as those of this body.
        """
        messages = chat_of(self.system, self.messages)
        goes_on = bool(messages) and messages[-1].role == "assistant"
        fields = {
            **self.shared_fields,
            "messages": messages,
            "continue_final_message": goes_on or None,
            "stop": self.stop if self.stop_sequences is None else self.stop_sequences,
            "user": self.metadata and self.metadata.user_id,
            **self._choice_of_tools(),
            **self._thinking(),
            **self._form(),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatCompletionRequest.model_construct(**given)

    def _choice_of_tools(self) -> dict[str, Any]:
        if self.tools is None:
            return {}
        fields: dict[str, Any] = {"tools": [_function_of(tool) for tool in self.tools]}
        choice = self.tool_choice
        if isinstance(choice, OneTool):
            function = NamedFunction.model_construct(name=choice.name)
            fields["tool_choice"] = NamedTool.model_construct(type="function", function=function)
        elif choice is not None:
            fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
        if choice is not None and choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        return fields

    def _thinking(self) -> dict[str, Any]:
        asked = self.thinking
        if asked is None:
            return {}
        thinks = asked.type != "disabled"
        budget = asked.budget_tokens if thinks else None
        return {
            "chat_template_kwargs": dict.fromkeys(_SWITCHES, thinks),
            "include_reasoning": False if asked.display == "omitted" else None,
            "thinking_token_budget": self.thinking_token_budget if budget is None else budget,
        }

    def _form(self) -> dict[str, Any]:
        wanted = self.output_config
        if wanted is None:
            return {}
        form = wanted.format and SchemaFormat.model_construct(
            type="json_schema",
            json_schema=NamedSchema.model_construct(schema_=wanted.format.schema_),
        )
        return {"reasoning_effort": wanted.effort, "response_format": form}


class MessagesRequest(ConversationRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: Count
    """Largest number of output tokens, those of the thinking among them; fewer where the model's
    context or the server's limit has room for fewer."""


def _function_of(tool: CustomTool) -> Tool:
    function = FunctionDefinition.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)
