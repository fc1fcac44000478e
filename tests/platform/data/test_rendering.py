import json

import pytest

from mars_platform.data.conversations import Conversation
from mars_platform.data.rendering import render_prompt, render_turns
from mars_platform.errors import UserError
from mars_train.run.scratch import CHAT_TEMPLATE, TURN_END, train_tokenizer

USER = {"role": "user", "content": "Count"}
ANSWER = {"role": "assistant", "content": "one"}


@pytest.fixture
def tokenizer():
    return train_tokenizer(["some text"], 264)


def conversation(*messages):
    return Conversation.model_validate({"messages": list(messages)})


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


LONG = conversation(
    {"role": "system", "content": "Be brief."},
    USER,
    ANSWER,
    {"role": "user", "content": "one"},  # the same text as the answer before it
    {"role": "assistant", "content": "two\n\nlines"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": " three "},
)


def supervised(tokenizer, loss_on):
    [rendered] = render_turns(tokenizer, LONG, loss_on, [TURN_END])
    return supervised_in(rendered)


def supervised_in(rendered):
    spans = [span for turn in rendered.turns for span in turn.spans]
    return [rendered.text[begin:end] for begin, end in spans]


def test_a_prompt_asks_for_the_next_assistant_turn(tokenizer):
    expected = "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n"
    assert render_prompt(tokenizer, [USER]) == expected


def test_the_rendered_text_is_the_whole_conversation(tokenizer):
    [rendered] = render_turns(tokenizer, LONG, "last", [TURN_END])
    messages = [message.model_dump() for message in LONG.messages]
    assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("loss_on", "contents"),
    [("last", [" three "]), ("all", ["one", "two\n\nlines", " three "])],
)
def test_the_last_assistant_turn_or_all_are_supervised(tokenizer, loss_on, contents):
    assert supervised(tokenizer, loss_on) == [content + TURN_END for content in contents]


def test_an_assistant_turn_that_opens_the_conversation_is_not_supervised(tokenizer):
    messages = conversation({"role": "assistant", "content": "Hello"}, USER, ANSWER)
    [rendered] = render_turns(tokenizer, messages, "all", [TURN_END])
    assert supervised_in(rendered) == ["one" + TURN_END]


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('no system turn, please') }}", "no system turn, please"),
        ("{% for message in messages %}", "chat template"),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "cannot render"),
        (None, "has no chat template"),
    ],
    ids=["raises", "malformed", "leaves the sandbox", "missing"],
)
def test_a_template_that_cannot_be_used_is_refused(tokenizer, template, named):
    tokenizer.chat_template = template
    assert named in refusal(render_prompt, tokenizer, [USER])
    assert named in refusal(render_turns, tokenizer, LONG, "all", [])


def test_turns_that_a_template_drops_later_get_texts_of_their_own(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role != 'assistant' or loop.last %}"
        "{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = render_turns(tokenizer, LONG, "all", [])
    assert [supervised_in(each) for each in found] == [["one"], ["two\n\nlines"], [" three"]]
    assert all(each.text.count("assistant: ") == 1 for each in found)
    assert render_turns(tokenizer, LONG, "last", []) == found[-1:]


@pytest.mark.parametrize("opened", ["<idea>\n", "<think>\nSo,"])
def test_a_template_whose_generation_prompt_differs_is_refused(tokenizer, opened):
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n", f"assistant\n{opened}")
    assert "as a continuation" in refusal(render_turns, tokenizer, LONG, "last", [])


# --- tools and variables of the template ----------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if brief %}Be brief.\n{% endif %}"
    + CHAT_TEMPLATE
)


def test_tools_and_variables_reach_the_template(tokenizer):
    tokenizer.chat_template = WITH_TOOLS
    plain = render_prompt(tokenizer, [USER])
    assert render_prompt(tokenizer, [USER], [TOOL]) == json.dumps([TOOL]) + "\n" + plain
    assert render_prompt(tokenizer, [USER], []) == plain
    brief = render_prompt(tokenizer, [USER], template_kwargs={"brief": True, "other": 1})
    assert brief == "Be brief.\n" + plain
    prompt = "<|im_start|>assistant\n"
    without = render_prompt(tokenizer, [USER], add_generation_prompt=False)
    assert without + prompt == plain


def test_a_message_that_the_template_changes_cannot_be_continued(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(UserError, match=r"^continue_final_message: this model's chat template"):
        render_prompt(tokenizer, [USER, ANSWER], continue_final_message=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}one"
    with pytest.raises(UserError, match=r"^continue_final_message: "):
        render_prompt(tokenizer, [USER, ANSWER], continue_final_message=True)


def test_tools_are_refused_by_a_template_without_them(tokenizer):
    assert "tools: this model's" in refusal(render_prompt, tokenizer, [USER], [TOOL])


def test_of_several_templates_one_is_used_for_tools(tokenizer):
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": WITH_TOOLS}
    assert "add" in render_prompt(tokenizer, [USER], [TOOL])
    assert render_prompt(tokenizer, [USER]).startswith("<|im_start|>user")
    tokenizer.chat_template = {"other": CHAT_TEMPLATE}
    assert "no chat template to use" in refusal(render_prompt, tokenizer, [USER])


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "chat_template", "eos_token", "tokenize"]
)
def test_variables_that_only_the_server_sets_are_refused(tokenizer, name):
    with pytest.raises(UserError, match=f"chat_template_kwargs: '{name}' is set by the server"):
        render_prompt(tokenizer, [USER], template_kwargs={name: "x"})


@pytest.mark.parametrize("name", ["self", "conversations", "raise_exception", "namespace"])
def test_names_of_jinja_as_variables_do_no_harm(tokenizer, name):
    tokenizer.chat_template = "{% set space = namespace(a=1) %}{{ raise_exception('no') }}"
    with pytest.raises(UserError):
        render_prompt(tokenizer, [USER], template_kwargs={name: "x"})


def test_the_role_developer_becomes_system_in_a_template_without_it(tokenizer):
    developer = {"role": "developer", "content": "Be brief."}
    assert "<|im_start|>system\nBe brief." in render_prompt(tokenizer, [developer, USER])
    [rendered] = render_turns(tokenizer, conversation(developer, USER, ANSWER), "last", [])
    assert rendered.text.startswith("<|im_start|>system\nBe brief.")
    tokenizer.chat_template = "{# developer #}" + CHAT_TEMPLATE
    assert "<|im_start|>developer\nBe brief." in render_prompt(tokenizer, [developer, USER])


def test_mistral_templates_get_ids_of_nine_characters(tokenizer):
    call = {"id": "call_0123456789", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "abcdefghi"}]},
        {"role": "tool", "content": "", "tool_call_id": "call_0123456789"},
    ]
    shown = (
        "{% for message in messages %}{% for call in message.tool_calls %}{{ call.id }} "
        "{% endfor %}{{ message.tool_call_id }}{% endfor %}"
    )
    tokenizer.chat_template = shown
    assert render_prompt(tokenizer, turns) == "call_0123456789 abcdefghi call_0123456789"
    tokenizer.chat_template = shown + "{# [TOOL_CALLS] #}"
    first, second, result = render_prompt(tokenizer, turns).split()
    assert first == result
    assert (len(first), first.isalnum(), second) == (9, True, "abcdefghi")
    assert turns[1]["tool_call_id"] == "call_0123456789"
