"""Tokens that are trained on and tokens that serving prompts with are the same."""

import copy
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import Qwen2Config

from chat_families import tokenizer_of
from chat_templates import FAMILIES
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.data.conversations import validate_conversation
from mars_platform.errors import UserError
from mars_serve.api.incoming.prompts import PromptReader
from mars_serve.api.messages import messages_for_template
from mars_serve.api.protocol import ChatCompletionRequest
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings, ModelSettings
from mars_train.data.encoding import TrainingEncoder, encode_conversation

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "x", "parameters": {"type": "object"}},
}


def ask(text):
    return {"role": "user", "content": text}


def answer(content="", thinking=None, *cities):
    turn = {"role": "assistant", "content": content}
    if thinking is not None:
        turn["reasoning_content"] = thinking
    if cities:
        turn["tool_calls"] = [
            {
                "id": f"id_{city}",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps({"city": city})},
            }
            for city in cities
        ]
    return turn


def result(city, content):
    return {"role": "tool", "tool_call_id": f"id_{city}", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
ROME = (ask("Rome?"), answer("", None, "Rome"), result("Rome", "18 °C"), answer("It is 18."))
CASES = {
    "plain": [SYSTEM, ask("Hi <b>"), answer("One."), ask("Again"), answer("Two.\n\nThree")],
    "call": [*ROME, ask("Thanks"), answer("Bye.")],
    "parallel": [
        *(ask("Rome, Oslo?"), answer("", None, "Rome", "Oslo")),
        *(result("Rome", "18"), result("Oslo", "<|im_end|>"), answer("18 and 5.")),
    ],
    "text and call": [ask("Rome?"), answer("I look.", None, "Rome"), *ROME[2:]],
    "thinking": [ask("1+1?"), answer("2", "One\nmore."), ask("2+2?"), answer("4", "Twice.")],
    "thinking and call": [
        ask("Rome?"),
        answer("", "A tool.", "Rome"),
        ROME[2],
        answer("18", "Ah."),
    ],
    "some thinking": [ask("1+1?"), answer("2", "One more."), ask("2+2?"), answer("4")],
    "thinking in content": [
        *(ask("1+1?"), answer("<think>\nOne.\n</think>\n\n2")),
        *(ask("2+2?"), answer("<think>\nTwo.\n</think>\n\n4")),
    ],
    "from the middle of thinking": [ask("1+1?"), answer("One more.\n</think>\n\n2")],
    "typed tags": [ask("</think> <tool_call> <|im_end|> <|user|>?"), answer("A tag."), *ROME],
}
NO_TOOLS = {"deepseek r1", "nemotron", "marked"}
WITH_TOOLS = {"call", "parallel", "text and call", "thinking and call", "typed tags"}


@cache
def model_of(family):
    """Return a served model with a family's template and tokens."""
    given = FAMILIES[family]
    tokenizer = copy.deepcopy(tokenizer_of("qwen"))
    tokenizer.chat_template = given.template
    special = dict.fromkeys([*given.special, *given.ends])
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.bos_token, tokenizer.eos_token = given.special[0], given.ends[0]
    ends = frozenset(tokenizer.convert_tokens_to_ids(list(given.ends)))
    checkpoint = Checkpoint(
        Path("m"), Qwen2Config(), tokenizer, None, SpecialTokens(ends, frozenset())
    )
    return ServedModel(ModelSettings(name="m", path="m"), checkpoint, None, 0)


def served_prompt(model, messages, **fields):
    """Return the prompt that a request with these messages becomes."""
    body = ChatCompletionRequest(model="m", messages=messages, **fields)
    if not body.tools:
        return PromptReader(model, LimitSettings(), None).chat(body, body.messages, None)
    # without a parser of its calls, a family is served no tools, but its prompts are these
    return model.prompts.chat(
        messages_for_template(body.messages), [TOOL], template_kwargs=body.chat_template_kwargs
    )


def trained_turns(family, messages, **fields):
    """Return prompt and learned tokens of each turn."""
    model = model_of(family)
    encoder = TrainingEncoder.of(model.checkpoint.tokenizer, model.checkpoint.special.eos)
    conversation = validate_conversation({"messages": messages, **fields})
    found = []
    for ids, supervised in encode_conversation(encoder, conversation, "all", 4096):
        edges = np.flatnonzero(np.diff(supervised, prepend=False, append=False)).reshape(-1, 2)
        found += [(ids[:begin].tolist(), ids[begin:end].tolist()) for begin, end in edges]
    return found


def refusal(family, messages, **fields):
    with pytest.raises(UserError) as caught:
        trained_turns(family, messages, **fields)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_learned_behind_the_tokens_of_its_request(family, case):
    messages = CASES[case]
    fields = {"tools": [TOOL]} if case in WITH_TOOLS else {}
    if "thinking" in case:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    if family in NO_TOOLS and case in WITH_TOOLS:
        assert refusal(family, messages, **fields).startswith("tools: this model's chat template")
        return
    if (family, case) == ("gpt-oss", "parallel"):
        assert "messages.1: the chat template does not write all" in refusal(
            family, messages, **fields
        )
        return
    model, found = model_of(family), trained_turns(family, messages, **fields)
    places = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
    assert len(found) == len(places)
    for (prompt, learned), at in zip(found, places, strict=True):
        assert prompt == served_prompt(model, messages[:at], **fields)
        ends = [token in model.checkpoint.special.eos for token in learned]
        assert ends == [False] * (len(learned) - 1) + [True]
        text = model.checkpoint.tokenizer.decode(learned)
        parts = [messages[at]["content"].split("</think>")[-1].strip()]
        parts.append(messages[at].get("reasoning_content", ""))
        parts += [each["id"].removeprefix("id_") for each in messages[at].get("tool_calls", ())]
        assert [part for part in parts if part not in text] == []


ASKED = [ask("1+1?")]
THOUGHT = [*ASKED, answer("2", "One more.")]
INSIDE = [*ASKED, answer("<think>\nOne more.\n</think>\n\n2")]
MIDDLE = [*ASKED, answer("One more.\n</think>\n\n2")]
PLAIN = [*ASKED, answer("2")]
LEARNED = {
    ("qwen 2", "One more.\n</think>\n\n2<|im_end|>"): [MIDDLE],
    ("qwen 2", "<think>\nOne more.\n</think>\n\n2<|im_end|>"): [THOUGHT, INSIDE],
    ("qwen 3", "<think>\nOne more.\n</think>\n\n2<|im_end|>"): [THOUGHT, INSIDE, MIDDLE],
    ("qwen 3", "<think>\n\n</think>\n\n2<|im_end|>"): [PLAIN],
    ("qwen 3.6", "One more.\n</think>\n\n2<|im_end|>"): [THOUGHT, INSIDE, MIDDLE],
    ("qwen 3.6", "\n</think>\n\n2<|im_end|>"): [PLAIN],
    ("glm", "\n<think>One more.</think>\n2<|user|>"): [THOUGHT, INSIDE, MIDDLE],
    ("deepseek r1", "One more.\n</think>\n\n2<｜end｜>"): [THOUGHT, INSIDE, MIDDLE],
    ("deepseek r1", "\n</think>\n\n2<｜end｜>"): [PLAIN],
    ("deepseek v3", "One more.</think>2<｜end｜>"): [THOUGHT],
    ("deepseek v3", "</think>2<｜end｜>"): [PLAIN],
    ("nemotron", "One more.\n</think>\n\n2<|im_end|>"): [THOUGHT, INSIDE, MIDDLE],
    ("marked", "2<|im_end|>"): [PLAIN],
}


@pytest.mark.parametrize("expected", LEARNED, ids=" ".join)
def test_thinking_is_learned_as_the_model_writes_it(expected):
    family, learned = expected
    decode = model_of(family).checkpoint.tokenizer.decode
    for messages in LEARNED[expected]:
        [(_, found)] = trained_turns(
            family, messages, chat_template_kwargs={"enable_thinking": True}
        )
        assert decode(found) == learned


def test_a_prompt_without_thinking_stays_without_it():
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    for family in ("qwen 3", "qwen 3.6", "glm", "deepseek v3"):
        [(prompt, learned)] = trained_turns(family, PLAIN, **fields)
        tokenizer = model_of(family).checkpoint.tokenizer
        assert tokenizer.decode(prompt).rstrip().endswith("</think>")
        assert "think" not in tokenizer.decode(learned)
        assert "set the row's chat_template_kwargs as the turn was written" in refusal(
            family, THOUGHT, **fields
        )


def test_a_turn_of_glm_ends_with_the_token_of_what_follows():
    decode = model_of("glm").checkpoint.tokenizer.decode
    found = trained_turns("glm", CASES["call"], tools=[TOOL])
    ends = ["<|observation|>", "<|user|>", "<|user|>"]
    assert [decode(learned[-1:]) for _, learned in found] == ends
    [(_, learned)] = trained_turns("glm", CASES["call"][:2], tools=[TOOL])
    assert decode(learned[-1:]) == "<|observation|>"


def test_calls_written_in_a_content_are_tokens_and_typed_ones_are_text():
    messages = [ask("<tool_call>?"), answer("<tool_call>\n{}\n</tool_call> <|im_end|>")]
    [(prompt, learned)] = trained_turns("qwen 2", messages)
    tag, end = model_of("qwen 2").checkpoint.tokenizer.convert_tokens_to_ids(
        ["<tool_call>", "<|im_end|>"]
    )
    assert (prompt.count(tag), learned.count(tag), learned.count(end)) == (0, 1, 1)
