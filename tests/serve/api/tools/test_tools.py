"""Tool calling: detection of call formats, preparation of tools, and grammars."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError
from mars_serve.api.messages import ToolChoice, Tools
from mars_serve.api.tools import RequestTools, prepare_tools
from mars_serve.api.tools.formats import CallTokens, Family
from mars_serve.engine.sampling.grammar import GrammarCompiler
from mars_train.run.scratch import CHAT_TEMPLATE, train_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>\' }}'
    "{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{{- message.content }}{%- for call in message.tool_calls %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}" + PROMPT
)
LLAMA = (
    '{%- if tools %}{{- \'Respond as {"name": name, "parameters": dictionary}.\' }}'
    "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call only') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' }}{{- call.arguments | tojson }}'
    "{{- '}<|eot_id|>' }}{%- else %}{{- '<|start_header_id|>' + message.role + '\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}" + PROMPT
)
MISTRAL_TOOLS = (
    "{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{%- for message in messages %}{%- if message.role == 'system' %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message.tool_calls is defined %}"
)
MISTRAL_REST = (
    "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.tool_call_id }}"
    "{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
MISTRAL_LIST = (
    MISTRAL_TOOLS + "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}" + MISTRAL_REST
)
MISTRAL_NAMED = (
    MISTRAL_TOOLS
    + "{%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name }}"
    "{{- '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}"
    + MISTRAL_REST
)
UNKNOWN = HERMES.replace('"name": "\' + call', '"function": "\' + call')
TEMPLATES = {
    Family.HERMES: HERMES,
    Family.LLAMA: LLAMA,
    Family.MISTRAL_LIST: MISTRAL_LIST,
    Family.MISTRAL_NAMED: MISTRAL_NAMED,
}
FAMILIES = list(TEMPLATES)
TAGS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "<|python_tag|>": True,
    "[TOOL_CALLS]": True,
    "[CALL_ID]": True,
    "[ARGS]": True,
}
"""Whether each tag is a special token, as in the families' own tokenizers."""

WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER},
}
TIME_TOOL = {"type": "function", "function": {"name": "get-time"}}
TOOLS = [WEATHER_TOOL, TIME_TOOL]
STRICT = [{**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], "strict": True}}, TIME_TOOL]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def plan_of(
    checkpoint: Checkpoint,
    tools: list[dict[str, Any]] = TOOLS,
    choice: Any = "auto",
    parallel: bool | None = None,
) -> RequestTools:
    checked = TypeAdapter(Tools).validate_python(tools)
    chosen: ToolChoice = TypeAdapter(ToolChoice).validate_python(choice)
    plan = prepare_tools(checked, chosen, parallel, checkpoint)
    assert plan is not None
    return plan


@pytest.fixture(scope="module")
def checkpoint_of(mars_dir: Path) -> Callable[..., Checkpoint]:
    """Return a factory of checkpoints with a family's template, and its tags as tokens or not."""
    base = read_checkpoint(mars_dir)

    @cache
    def make(family: Family | str, *, has_tags: bool = True) -> Checkpoint:
        texts = ['{"name": "get_weather", "arguments": {"unit": "C"}}\n'] * 20
        tokenizer = train_tokenizer(texts, 270) if has_tags else deepcopy(base.tokenizer)
        if has_tags:
            tokenizer.add_tokens([AddedToken(tag, special=TAGS[tag]) for tag in TAGS])
        tokenizer.chat_template = TEMPLATES.get(family, family)
        return replace(base, tokenizer=tokenizer)

    return make


@pytest.fixture(scope="module")
def plans(checkpoint_of: Callable[..., Checkpoint]) -> dict[Family, RequestTools]:
    return {family: plan_of(checkpoint_of(family)) for family in FAMILIES}


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT_TEMPLATE, "tools: this model's chat template does not know tools"),
        (UNKNOWN, "tools: the format in which this model writes calls is unknown"),
        ("{{ raise_exception('no') if messages | length > 1 else tools }}", "is unknown"),
    ],
)
def test_a_model_without_a_known_call_format_is_refused(checkpoint_of, template, message):
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        plan_of(checkpoint_of(template))
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_kept_special_tokens_are_those_that_decoding_would_drop(plans, checkpoint_of):
    tokenizer = checkpoint_of(Family.MISTRAL_NAMED).tokenizer
    kept = plans[Family.MISTRAL_NAMED].kept_special
    names = {tokenizer.convert_ids_to_tokens(token) for token in kept}
    assert names == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert plans[Family.HERMES].kept_special == frozenset()  # its tags are no special tokens
    plain = checkpoint_of(Family.MISTRAL_NAMED, has_tags=False)
    assert plan_of(plain).kept_special == frozenset()


@pytest.mark.parametrize(
    ("family", "tags"),
    [
        (Family.HERMES, ["<tool_call>", "</tool_call>"]),
        (Family.LLAMA, None),
        (Family.MISTRAL_LIST, ["[TOOL_CALLS]", None]),
        (Family.MISTRAL_NAMED, ["[TOOL_CALLS]", None]),
    ],
)
def test_the_tokens_of_calls_are_those_of_the_formats_tags(plans, checkpoint_of, family, tags):
    found, vocabulary = plans[family].call_tokens, checkpoint_of(family).tokenizer.get_vocab()
    expected = tags and CallTokens(*(vocabulary.get(tag) for tag in tags))
    assert found == expected
    assert plan_of(checkpoint_of(family, has_tags=False)).call_tokens is None


def test_the_template_gets_complete_tool_definitions(plans):
    function = {"name": "get-time", "parameters": {"type": "object", "properties": {}}}
    expected = [WEATHER_TOOL, {"type": "function", "function": function}]
    assert plans[Family.HERMES].template_tools == expected


def test_the_tool_choice_selects_tools_and_forces_calls(checkpoint_of):
    checkpoint = checkpoint_of(Family.HERMES)

    def names(choice: Any) -> list[str]:
        plan = plan_of(checkpoint, choice=choice)
        return [tool["function"]["name"] for tool in plan.template_tools]

    assert names("auto") == names("required") == ["get_weather", "get-time"]
    assert names(NAMED) == ["get_weather"]
    some = {"mode": "auto", "tools": [NAMED]}
    allowed = {"type": "allowed_tools", "allowed_tools": some}
    assert names(allowed) == ["get_weather"]
    assert plan_of(checkpoint, choice=allowed).grammar is None
    some["mode"] = "required"
    assert plan_of(checkpoint, choice=allowed).grammar is not None
    tools = TypeAdapter(Tools).validate_python(TOOLS)
    assert prepare_tools(tools, "none", None, checkpoint) is None
    assert prepare_tools([], None, None, checkpoint) is None
    assert prepare_tools(None, "auto", True, checkpoint) is None
    assert prepare_tools(tools, None, None, checkpoint) == plan_of(checkpoint)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "tool_choice: 'required' needs tools"),
        ([], NAMED, "tool_choice: 'get_weather' is not one of the tools (none given)"),
        ([TIME_TOOL], NAMED, "tool_choice: 'get_weather' is not one of the tools (get-time)"),
        ([TIME_TOOL, TIME_TOOL], "auto", "tools: two tools are named 'get-time'"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "required",
            "tools: the parameters of 'f' are of type 'string'",
        ),
        (
            [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"const": float("inf")}},
                }
            ],
            "required",
            "tools: a schema has a number that is not finite",
        ),
    ],
)
def test_unusable_tools_and_choices_are_refused(checkpoint_of, tools, choice, message):
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        plan_of(checkpoint_of(Family.HERMES), tools, choice)
    assert caught.value.status == 400
    assert message.startswith(f"{caught.value.param}:")


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "custom", "custom": {"name": "f"}}, "Input should be 'function'"),
        ({"type": "function", "function": {"name": "a b"}}, "String should match pattern"),
        ({"type": "function", "function": {"name": "a" * 65}}, "String should match pattern"),
        ({"type": "function"}, "Field required"),
    ],
)
def test_an_invalid_tool_definition_is_refused(tool, named):
    with pytest.raises(ValidationError, match=named):
        TypeAdapter(Tools).validate_python([tool])


# --- grammars -------------------------------------------------------------------------------------

VALID = {
    Family.HERMES: '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "C", "days": 3}}\n'
    "</tool_call>",
    Family.LLAMA: '{"name": "get_weather", "parameters": {"unit": "C", "days": 3}}',
    Family.MISTRAL_LIST: '[TOOL_CALLS] [{"name": "get_weather", "arguments": '
    '{"unit": "C", "days": 3}}]',
    Family.MISTRAL_NAMED: '[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{"unit": "C", "days": 3}',
}


@cache
def compiler_of(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 320, {tokenizer.eos_token_id})


def accepts(checkpoint: Checkpoint, plan: RequestTools, text: str) -> bool:
    """Return whether the grammar accepts a whole output and lets it end."""
    assert plan.grammar is not None
    tokenizer = checkpoint.tokenizer
    matcher = compiler_of(tokenizer).compile(plan.grammar).matcher()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for token in tokens:
        if not bool(matcher.allowed()[token]) or matcher.advance([token]) == 0:
            return False
    return bool(matcher.allowed()[tokenizer.eos_token_id])


@pytest.mark.parametrize("has_tags", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_accepts_what_the_template_would_write(checkpoint_of, family, has_tags):
    checkpoint, text = checkpoint_of(family, has_tags=has_tags), VALID[family]
    broken = text.replace('"C"', '"K"')
    separator = {Family.HERMES: "\n", Family.MISTRAL_NAMED: ""}.get(family)
    twice = None if separator is None else text + separator + text
    forced = plan_of(checkpoint, TOOLS, "required")
    assert accepts(checkpoint, forced, text)
    assert not accepts(checkpoint, forced, broken)
    assert not accepts(checkpoint, forced, "Hello " + text)
    assert not accepts(
        checkpoint, plan_of(checkpoint, choice=NAMED), text.replace("_weather", "-time")
    )
    free = plan_of(checkpoint, STRICT)
    assert accepts(checkpoint, free, "Hello there")
    assert accepts(checkpoint, free, text)
    assert not accepts(checkpoint, free, broken)
    if family is not Family.LLAMA:
        assert accepts(checkpoint, free, "Hello " + text)
        assert not accepts(checkpoint, free, "Hello " + broken)
    if twice is not None:
        assert accepts(checkpoint, forced, twice)
        assert accepts(checkpoint, free, twice)
        assert not accepts(
            checkpoint, plan_of(checkpoint, choice="required", parallel=False), twice
        )


def test_optional_calls_are_constrained_only_for_strict_functions(checkpoint_of):
    checkpoint = checkpoint_of(Family.HERMES)
    assert plan_of(checkpoint).grammar is None
    call = '<tool_call>\n{"name": "get-time", "arguments": {"any": [1]}}\n</tool_call>'
    assert accepts(checkpoint, plan_of(checkpoint, STRICT), call)
    assert not accepts(checkpoint, plan_of(checkpoint, choice="required"), call)


@pytest.mark.parametrize(
    ("parameters", "is_open"),
    [
        (None, False),
        ({"type": "object"}, True),
        ({"properties": {"unit": {"type": "string"}}}, False),
        ({"properties": {"unit": {"type": "string"}}, "additionalProperties": True}, True),
        ({"properties": {}, "allOf": [{"properties": {"any": {"type": "array"}}}]}, True),
    ],
)
def test_undefined_parameters_are_allowed_only_by_open_schemas(checkpoint_of, parameters, is_open):
    checkpoint = checkpoint_of(Family.LLAMA)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    plan = plan_of(checkpoint, [tool], "required")
    assert accepts(checkpoint, plan, '{"name": "f", "parameters": {}}')
    assert accepts(checkpoint, plan, '{"name": "f", "parameters": {"any": [1]}}') == is_open


def test_schemas_that_cannot_be_compiled_are_refused(checkpoint_of):
    checkpoint = checkpoint_of(Family.HERMES)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "x:y"}}}}
    plan = plan_of(checkpoint, [{"type": "function", "function": function}], "required")
    with pytest.raises(UserError, match="grammar: "):
        accepts(checkpoint, plan, "")
