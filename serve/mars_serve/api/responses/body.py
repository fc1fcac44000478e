"""The body of ``POST /v1/responses``, and its translation to a chat.

Source: OpenAI API reference, "Responses", create; what Codex sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError, to_json

from mars_serve.api.bodies import Neutral, at_most
from mars_serve.api.errors import invalid_value, unsupported_value
from mars_serve.api.messages import MAX_TOOLS, Flag, FunctionDefinition, FunctionName, Text
from mars_serve.api.output_forms import NamedSchema, PlainFormat
from mars_serve.api.protocol import ChatCompletionRequest, Count, DecodingRequest, Effort
from mars_serve.api.responses.items import (
    OTHER,
    Item,
    Items,
    MessageItem,
    Refused,
    by_type,
    messages_of,
    name_within,
    refused,
)

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Names here of a chat's fields."""
_LOGPROBS = "message.output_text.logprobs"
_ID = "^[A-Za-z0-9._:/+=@-]{1,160}$"
_FUNCTIONS_ONLY = "Only functions can be called; name one of the tools of type function"
_HINT = Annotated[str, Field(max_length=1024)]


def _writable(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuse a schema that could not be repeated in the response."""
    try:
        to_json(value)
    except ValueError as error:
        raise PydanticCustomError(
            "not_writable", "Schema holds a text that is no Unicode; leave it out"
        ) from error
    return value


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_writable)] = None
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None


class OtherTool(BaseModel):
    """A tool that the model is not told about: it needs OpenAI's servers, or is no function."""

    type: str


class ToolNamespace(BaseModel):
    """Functions that share the beginning of their names, such as those of one MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("function-tool")] | Annotated[OtherTool, Tag(OTHER)],
                by_type({"function": "function-tool"}),
            ]
        ],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function-tool")]
    | Annotated[ToolNamespace, Tag("tool-namespace")]
    | Annotated[OtherTool, Tag(OTHER)],
    by_type({"function": "function-tool", "namespace": "tool-namespace"}),
]


class NamedFunction(BaseModel):
    """The one function that the model must call."""

    type: Literal["function"]
    name: FunctionName
    namespace: FunctionName | None = None


class OtherChoice(Refused):
    """The choice of a tool that the model is not told about."""

    type: Annotated[str, refused(_FUNCTIONS_ONLY)]


AnyChoice = Annotated[
    Annotated[NamedFunction, Tag("named-function")] | Annotated[OtherChoice, Tag(OTHER)],
    by_type({"function": "named-function"}),
]


class AllowedFunctions(BaseModel):
    """Restricts the model to some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode-of-choice")]
    | Annotated[NamedFunction, Tag("named-function")]
    | Annotated[AllowedFunctions, Tag("allowed-functions")]
    | Annotated[OtherChoice, Tag(OTHER)],
    by_type(
        {"function": "named-function", "allowed_tools": "allowed-functions"},
        default="mode-of-choice",
    ),
]
"""Whether the model calls functions, and which."""


class Reasoning(BaseModel):
    """How the model thinks before it answers."""

    effort: Effort | None = None
    """How much it thinks; see ``reasoning_effort`` of a chat."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Changes nothing: the thinking itself is returned."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of ``summary``."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Changes nothing: the chat template decides which thinking it repeats."""


class SchemaOfText(NamedSchema):
    """Makes the text JSON that satisfies a schema."""

    type: Literal["json_schema"]


class TextOptions(BaseModel):
    """Form of the text."""

    format: Annotated[PlainFormat | SchemaOfText, Field(discriminator="type")] | None = None
    """Free text, any JSON object, or JSON that satisfies a schema."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """The model decides: values other than medium are refused."""


class StreamHints(BaseModel):
    """Options of a stream."""

    include_obfuscation: Flag | None = None
    """Changes nothing: events are as long as their content."""


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
    at_most(16),
]


def _shape_of(value: Any) -> str:
    return "several-items" if isinstance(value, list) else "one-text"


class ResponsesRequest(DecodingRequest):
    """Body of ``POST /v1/responses``."""

    input: Annotated[
        Annotated[Text, Tag("one-text")] | Annotated[Items, Tag("several-items")],
        Discriminator(_shape_of),
    ]
    """The user's text, or the items of the conversation."""
    instructions: Text | None = None
    """The system's message, which stands before all items; it is not kept for later requests."""
    previous_response_id: Annotated[str, Field(pattern=_ID)] | None = None
    """Stored response whose conversation goes on."""
    store: Flag | None = None
    """Keep the response; true by default where the server has a place for it."""
    background: Flag | None = None
    """Answer at once, and generate the response afterwards; it must be stored."""
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call, alone or in namespaces. Tools of other types are not told
    to the model, and the header ``X-Marsray-Unknown-Fields`` names them."""
    tool_choice: FunctionChoice | None = None
    """Whether the model calls functions, and which."""
    parallel_tool_calls: Flag | None = None
    """Allow several calls in one turn; true by default."""
    max_tool_calls: Count | None = None
    """Changes nothing: it counts calls of tools that OpenAI's servers run."""
    reasoning: Reasoning | None = None
    """How the model thinks."""
    text: TextOptions | None = None
    """Form of the text."""
    max_output_tokens: Count | None = None
    """Largest number of output tokens; by default what fits into the model's context."""
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    """Further things to return: log-probabilities. Thinking is returned as text."""
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    """Report the log-probabilities of this many likely alternatives; it includes them by itself."""
    metadata: Metadata | None = None
    """Names and values that are stored with the response."""
    truncation: Literal["auto", "disabled"] | None = None
    """With auto, a prompt that is too long loses its first tokens; by default it is refused."""
    prompt_cache_key: _HINT | None = None
    """Name of the conversation, whose requests prefer the replica of the last one."""
    safety_identifier: _HINT | None = None
    """Name of the end user, which takes the place of ``prompt_cache_key`` where there is none."""
    user: _HINT | None = None
    """Older name of ``safety_identifier``."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """Changes nothing: prefixes stay cached as long as there is room."""
    stream_options: StreamHints | None = None
    """Options of a stream."""
    neutral: ClassVar[Mapping[str, Neutral]] = {
        **DecodingRequest.neutral,
        "conversation": Neutral((), "conversations are not stored; use previous_response_id"),
        "prompt": Neutral((), "prompts are not stored; write it into instructions and input"),
        "context_management": Neutral(([],), "nothing is compacted; give fewer items"),
        "moderation": Neutral((), "nothing is moderated"),
        "background_options": Neutral(({},), "there is one kind of background; use background"),
        "n": Neutral((1,), "a response has one output; send several requests"),
    }

    @property
    def items(self) -> list[Item]:
        """The items of the input, also where it is a text."""
        given = self.input
        return [MessageItem(role="user", content=given)] if isinstance(given, str) else given

    @property
    def functions(self) -> list[tuple[str, ToolNamespace | None, FunctionTool]]:
        """The functions, each behind the name that the model reads and its namespace."""
        tools = self.tools or ()
        spaces = [tool if isinstance(tool, ToolNamespace) else None for tool in tools]
        return [
            (name_within(of.name if of else None, each.name), of, each)
            for tool, of in zip(tools, spaces, strict=True)
            for each in (of.tools if of else [tool])
            if isinstance(each, FunctionTool)
        ]

    @property
    def reports_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of the fields that this server does not know, and of tools that it leaves out."""
        tools = enumerate(self.tools or ())
        others = {f"tools.{index}.": each for index, each in tools if isinstance(each, OtherTool)}
        fields = [each for each in super().unknown_fields if not each.startswith(tuple(others))]
        return (*fields, *(place + each.type for place, each in others.items()))

    def refuse_unsupported(self) -> None:
        """Refuse by an `ApiError` what `Body` refuses, and fields that contradict each other."""
        super().refuse_unsupported()
        verbosity = self.text.verbosity if self.text else None
        if verbosity not in (None, "medium"):
            reason = f"{verbosity!r} is not supported, since the model decides; ask in a message"
            raise unsupported_value("text.verbosity", reason)
        if self.stream_options is not None and not self.stream:
            reason = "only streams have options; leave it out or set stream"
            raise invalid_value("stream_options", reason)
        if self.background and self.stream:
            reason = (
                "a response in the background is not streamed; leave out stream, and ask for it"
            )
            raise unsupported_value("background", f"{reason} with GET /v1/responses/ID")
        if self.background and self.store is False:
            raise invalid_value("background", "the response must be stored; leave out store")

    def to_chat(self, history: Sequence[Item] = ()) -> ChatCompletionRequest:
        """Return the chat that this body asks for, behind the items of earlier responses.

        Raises:
            ApiError: status 400: the items make no conversation, or the input is too large.
        """
        messages = messages_of([*history, *self.items], self.instructions, len(history))
        chat = {
            **self.shared_fields,
            "messages": messages,
            "tools": [_chat_tool(name, each) for name, _, each in self.functions] or None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": _chat_format(self.text),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.reports_logprobs or None,
            "top_logprobs": self.top_logprobs,
            "user": self.prompt_cache_key or self.safety_identifier or self.user,
        }
        if self.truncation == "auto":
            chat.setdefault("truncate_prompt_tokens", -1)
        try:
            return ChatCompletionRequest.model_validate(chat)
        except ValidationError as error:
            first = error.errors()[0]
            field = NAMES.get(str(first["loc"][0]), str(first["loc"][0]))
            raise invalid_value(field, first["msg"]) from error


def _chat_tool(name: str, tool: FunctionTool) -> dict[str, Any]:
    fields = tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": {"name": name, **fields}}


def _chat_choice(choice: FunctionChoice | None) -> Any:
    if isinstance(choice, NamedFunction):
        return _chat_name(choice)
    if isinstance(choice, AllowedFunctions):
        names = [_chat_name(each) for each in choice.tools if isinstance(each, NamedFunction)]
        return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": names}}
    return choice


def _chat_name(choice: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name_within(choice.namespace, choice.name)}}


def _chat_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = text.format if text else None
    if isinstance(form, SchemaOfText):
        return {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    return form.model_dump() if form else None
