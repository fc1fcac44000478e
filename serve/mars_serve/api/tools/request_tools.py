"""Applies a request's tools to its prompt, its grammar and the parsing of its output.

Some tags that mark calls, such as Llama's and Mistral's, are special tokens, which decoding drops.
`ToolParser` needs the text of those in `RequestTools.kept_special`, and of no other special tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError, invalid_value, unsupported_value
from mars_serve.api.messages import (
    NO_PARAMETERS,
    AllowedTools,
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolChoice,
)
from mars_serve.api.tools.families import PARSERS
from mars_serve.api.tools.formats import (
    CallFormat,
    CallTokens,
    call_tokens,
    find_format,
    kept_special,
    tag_ids,
)
from mars_serve.api.tools.grammar import CallGrammar
from mars_serve.api.tools.parser import ToolParser
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec


@dataclass(frozen=True)
class RequestTools:
    """The tools that a request's model may call, prepared for the model's call format."""

    template_tools: list[dict[str, Any]]
    """The tools as the chat template reads them."""
    grammar: GrammarSpec | None
    """Grammar that the output must match; None leaves it free."""
    kept_special: frozenset[int]
    """Ids of the special tokens whose text the parser needs."""
    is_parallel: bool
    """Whether one turn may have several calls; otherwise only the first one counts."""
    is_forced: bool
    """Whether the output must consist of calls."""
    form: CallFormat
    call_tokens: CallTokens | None
    """Tokens that begin and end a call; None if the format has none."""

    def parser(self) -> ToolParser:
        """Return a new parser for one output."""
        names = [tool["function"]["name"] for tool in self.template_tools]
        parser = PARSERS[self.form.family]
        return parser(names, is_parallel=self.is_parallel, is_forced=self.is_forced)


def prepare_tools(
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice | None,
    parallel: bool | None,
    checkpoint: Checkpoint,
) -> RequestTools | None:
    """Prepare a request's tools for its model; None if the model may call none.

    By default, the model may call any tool, and several in a turn. The chat template of
    ``checkpoint`` shows how calls are written.

    Raises:
        ApiError: status 400: the choice names an unknown tool, a definition is unusable, or the
            model's call format is unknown.
    """
    offered = _offered(tools or (), tool_choice)
    if not offered:
        return None
    form = _format_of(checkpoint)
    tokenizer = checkpoint.tokenizer
    is_parallel = parallel is not False and not isinstance(tool_choice, NamedTool)
    functions = [tool.function for tool in offered]
    is_forced, tags = _is_forced(tool_choice), tag_ids(tokenizer, form.family)
    grammar = None
    if is_forced or any(function.strict for function in functions):
        writer = CallGrammar(form, tags, is_parallel, is_forced)
        text = writer.text(functions)
        grammar = GrammarSpec(GrammarKind.LARK, text, frozenset(tags.values()))
    return RequestTools(
        template_tools=[_for_template(function) for function in functions],
        grammar=grammar,
        kept_special=kept_special(tokenizer, form.family),
        is_parallel=is_parallel,
        is_forced=is_forced,
        form=form,
        call_tokens=call_tokens(form, tags),
    )


def _format_of(checkpoint: Checkpoint) -> CallFormat:
    try:
        form = find_format(checkpoint.tokenizer)
    except UserError as error:
        raise ApiError(400, str(error), param="tools", code="unsupported_value") from error
    if form is None:
        raise unsupported_value(
            "tools",
            "the format in which this model writes calls is unknown; leave them out, or use a "
            "model whose chat template has the format of Hermes, Llama 3.1 or Mistral",
        )
    return form


def _offered(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    by_name: dict[str, Tool] = {}
    for tool in tools:
        name = tool.function.name
        if name in by_name:
            raise invalid_value("tools", f"two tools are named {name!r}; rename one")
        by_name[name] = tool
    if choice == "none":
        return []
    if choice == "required" and not tools:
        raise invalid_value("tool_choice", "'required' needs tools; give some")
    names = _allowed_names(choice)
    return list(tools) if names is None else [_find(by_name, name) for name in names]


def _allowed_names(choice: ToolChoice | None) -> list[str] | None:
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedTools):
        return list(dict.fromkeys(tool.function.name for tool in choice.allowed_tools.tools))
    return None


def _find(by_name: dict[str, Tool], name: str) -> Tool:
    if name not in by_name:
        given = ", ".join(by_name) or "none given"
        raise invalid_value("tool_choice", f"{name!r} is not one of the tools ({given}); name one")
    return by_name[name]


def _is_forced(choice: ToolChoice | None) -> bool:
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _for_template(function: FunctionDefinition) -> dict[str, Any]:
    description = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or NO_PARAMETERS
    return {
        "type": "function",
        "function": {"name": function.name, **description, "parameters": parameters},
    }
