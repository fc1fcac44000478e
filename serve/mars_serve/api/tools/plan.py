"""What a request's tools mean for its prompt, its output's grammar and its output's text.

Special tokens: some tags, such as Llama's and Mistral's, are special tokens, which decoding leaves
out. The text for `ToolParser` has to keep those in `ToolPlan.kept_special`, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.messages import (
    NO_PARAMETERS,
    AllowedTools,
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolChoice,
)
from mars_serve.api.tools.formats import CallFormat, Family, find_format, kept_special, tag_ids
from mars_serve.api.tools.grammar import CallGrammar
from mars_serve.api.tools.parser import HermesParser, LlamaParser, MistralParser, ToolParser
from mars_serve.engine.request import GrammarKind, GrammarSpec

_PARSERS: dict[Family, Callable[..., ToolParser]] = {
    Family.HERMES: HermesParser,
    Family.LLAMA: LlamaParser,
    Family.MISTRAL_LIST: MistralParser,
    Family.MISTRAL_NAMED: MistralParser,
}


@dataclass(frozen=True)
class ToolPlan:
    """What to do for a request with tools."""

    template_tools: list[dict[str, Any]]
    """For the chat template."""
    grammar: GrammarSpec | None
    """What the output has to match; None leaves it free."""
    kept_special: frozenset[int]
    """Special tokens whose text the parser needs."""
    is_parallel: bool
    """Whether more than the first call counts."""
    form: CallFormat

    def parser(self) -> ToolParser:
        """A parser for one output."""
        names = [tool["function"]["name"] for tool in self.template_tools]
        return _PARSERS[self.form.family](names, is_parallel=self.is_parallel)


def plan_tools(
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice | None,
    parallel: bool | None,
    checkpoint: Checkpoint,
) -> ToolPlan | None:
    """What to do for a request's tools; None if it has none, or may not use them.

    Args:
        tools: what the model may call.
        tool_choice: whether it has to, and what; by default it may.
        parallel: whether a turn may have several calls; by default it may.
        checkpoint: the model, whose chat template shows how it writes calls.

    Raises:
        ApiError: status 400: the choice names no tool, a definition cannot be used, or it is not
            known how the model writes calls.
    """
    offered = _offered(tools or (), tool_choice)
    if not offered:
        return None
    tokenizer = checkpoint.tokenizer
    try:
        form = find_format(tokenizer)
    except UserError as error:
        raise ApiError(400, str(error), param="tools", code="unsupported_value") from error
    if form is None:
        raise ApiError(
            400,
            "tools: it is not known how this model writes calls; leave them out, or use a model "
            "whose chat template has the form of Hermes, Llama 3.1 or Mistral",
            param="tools",
            code="unsupported_value",
        )
    is_parallel = parallel is not False and not isinstance(tool_choice, NamedTool)
    functions = [tool.function for tool in offered]
    is_forced = _is_forced(tool_choice)
    grammar = None
    if is_forced or any(function.strict for function in functions):
        writer = CallGrammar(form, tag_ids(tokenizer, form.family), is_parallel, is_forced)
        grammar = GrammarSpec(GrammarKind.LARK, writer.text(functions))
    template_tools = [_for_template(function) for function in functions]
    return ToolPlan(
        template_tools, grammar, kept_special(tokenizer, form.family), is_parallel, form
    )


def _offered(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """The tools that the model is to know of."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        name = tool.function.name
        if name in by_name:
            raise invalid_value("tools", f"{name!r} is there twice; give each tool its own name")
        by_name[name] = tool
    if choice == "none":
        return []
    if choice == "required" and not tools:
        raise invalid_value("tool_choice", "'required' needs tools; give some")
    chosen = _chosen(choice)
    return list(tools) if chosen is None else [_find(by_name, name) for name in chosen]


def _chosen(choice: ToolChoice | None) -> list[str] | None:
    """Names of the tools that a choice leaves; None for all."""
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
