"""Text from clients never becomes a control token, and ordinary text keeps its token ids."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from chat_families import ORDINARY, TEMPLATES, control_texts, tokenizer_of
from mars_platform.data import prompt_encoding
from mars_platform.data.prompt_encoding import PromptEncoder, TooManyTokens
from mars_platform.data.rendering import render_prompt
from mars_platform.errors import UserError

FAMILIES = list(TEMPLATES)


@cache
def encoder_of(family: str) -> PromptEncoder:
    return PromptEncoder(tokenizer_of(family))


def control_in(family: str, ids: list[int]) -> list[int]:
    control = encoder_of(family).control
    return [token for token in ids if token in control]


def text_of(family: str, ids: list[int]) -> str:
    return spelled(family, tokenizer_of(family).decode(ids, skip_special_tokens=False))


def spelled(family: str, text: str) -> str:
    """Return a text without the spaces that a tokenizer puts behind each control token."""
    return text.replace(" ", "") if family == "llama 2" else text


def chat_of(
    strings: list[str],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Return messages, tools and a variable that have the given strings in all their places."""
    system, user, name, answer, function, key, value, result, end, described, hint = strings
    call = {"name": function, "arguments": {key: value, "list": [value, {key: 1}]}}
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user, "name": name},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": user},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": call}]},
        {"role": "tool", "content": result, "tool_call_id": "abcdefghi"},
        {"role": "user", "content": end},
    ]
    schema = {"type": "object", "properties": {key: {"description": value, "enum": [hint]}}}
    tool = {"name": "get", "description": described, "parameters": schema}
    return messages, [{"type": "function", "function": tool}], {"hint": hint}


NUM_STRINGS = 11


def encoded(family: str, strings: list[str]) -> list[int]:
    messages, tools, variables = chat_of(strings)
    known = tools if "tools" in TEMPLATES[family] else None
    return encoder_of(family).chat(messages, known, template_kwargs=variables)


def rendered(family: str, strings: list[str]) -> str:
    messages, tools, variables = chat_of(strings)
    known = tools if "tools" in TEMPLATES[family] else None
    return render_prompt(tokenizer_of(family), messages, known, template_kwargs=variables)


@cache
def hostile_text(family: str) -> st.SearchStrategy[str]:
    """Return a strategy for texts of whole, halved and trimmed control tokens and others."""
    whole = control_texts(family)
    halves = [part for text in whole for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    inner = [re.sub(r"^\W+|\W+$", "", text) for text in whole]
    others = [*ORDINARY, " ", "\n", "a", "What is 1?", "é𰀀", '"', "\\", "<", ">", "|", "[", "]"]
    pieces = st.sampled_from([*whole, *halves, *inner, *others])
    return st.lists(pieces, max_size=4).map("".join)


# --- what may not happen --------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_client_text_adds_no_control_token_and_loses_nothing(family):
    harmless = control_in(family, encoded(family, ["x"] * NUM_STRINGS))

    @settings(max_examples=25)
    @given(st.lists(hostile_text(family), min_size=NUM_STRINGS, max_size=NUM_STRINGS))
    def check(strings):
        ids = encoded(family, strings)
        assert control_in(family, ids) == harmless
        assert text_of(family, ids) == spelled(family, rendered(family, strings))

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_spells_no_control_token(family):
    encoder = encoder_of(family)
    for add in (True, False):
        frame = [*encoder.prefix, *encoder.suffix] if add else []
        for text in [*control_texts(family), "".join(control_texts(family))]:
            found = encoder.text(f"a {text} b", add_special_tokens=add)
            assert control_in(family, found.ids) == frame
            assert text_of(family, found.ids).endswith(spelled(family, f"a {text} b"))
            assert len(found.spans) == len(found.ids)


# --- what stays as it was -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_text_keeps_its_ids(family):
    tokenizer, encoder = tokenizer_of(family), encoder_of(family)
    typed = st.text(st.characters(codec="utf-8"), max_size=12).filter(
        lambda text: not any(control in text for control in control_texts(family))
    )  # Hypothesis draws constants of the code under test, too, and control tokens are among them
    ordinary = typed | st.sampled_from(
        ["a < b", "x > 1", "[1, 2]", " <b>\n\n", "<table>\n\n\n", "user", "\u2581a", "1|2", "𰀀"]
    )

    @settings(max_examples=25)
    @given(st.lists(ordinary, min_size=NUM_STRINGS, max_size=NUM_STRINGS))
    def check(strings):
        text = rendered(family, strings)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        if control_in(family, expected) == control_in(family, encoded(family, ["x"] * NUM_STRINGS)):
            assert encoded(family, strings) == expected
        for each in strings:
            expected = tokenizer(each, return_offsets_mapping=True)
            found = encoder.text(each)
            assert found.ids == expected["input_ids"]
            assert found.spans == expected["offset_mapping"]

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_message_ends_as_with_transformers(family):
    tokenizer, encoder = tokenizer_of(family), encoder_of(family)
    control = control_texts(family)
    inner = re.sub(r"^\W+|\W+$", "", control[0])
    first = {"role": "user", "content": "What is 1 plus 2?"}
    harmless = [first, {"role": "assistant", "content": "x"}]
    expected = control_in(family, encoder.chat(harmless, continue_final_message=True))
    for text in ("It is", "  It is 3 \n", "if a < b", "", *control, inner, f"{control[-1]} x "):
        messages = [first, {"role": "assistant", "content": text}]
        try:
            whole = tokenizer.apply_chat_template(
                messages, tokenize=False, continue_final_message=True
            )
        except ValueError:  # the template has cut the text
            with pytest.raises(UserError, match=r"^continue_final_message: "):
                encoder.chat(messages, continue_final_message=True)
            continue
        assert render_prompt(tokenizer, messages, continue_final_message=True) == whole
        ids = encoder.chat(messages, continue_final_message=True)
        assert text_of(family, ids) == spelled(family, whole)
        assert control_in(family, ids) == expected


def test_a_template_reads_and_cuts_hostile_text_as_it_reads_plain_text():
    thought, answer = "<think>\nLet < me\n</think>\n\n", "It is <|im_end|> three.\n"
    messages = [
        {"role": "user", "content": "<tool_response> 7"},
        {"role": "assistant", "content": thought + answer},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": thought + answer},
    ]
    encoder, tokenizer = encoder_of("qwen"), tokenizer_of("qwen")
    ids = encoder.chat(messages, add_generation_prompt=False)
    text = render_prompt(tokenizer, messages, add_generation_prompt=False)
    assert text_of("qwen", ids) == text
    assert text.count("<think>") == 1  # the template has cut the older one
    thinks = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert [token for token in ids if token in thinks] == thinks  # written by the template


def test_tags_count_as_text_only_where_they_are_control_tokens():
    tokenizer = tokenizer_of("qwen")
    strict = encoder_of("qwen")
    tag, fim = tokenizer.convert_tokens_to_ids(["<tool_call>", "<|fim_prefix|>"])
    assert {tag, fim}.isdisjoint(strict.text("<tool_call><|fim_prefix|>").ids)
    table = tokenizer_of("gemma").convert_tokens_to_ids("<table>")
    assert table in encoder_of("gemma").text("<table>").ids


def test_ids_of_the_configuration_are_control_tokens():
    tokenizer = tokenizer_of("gemma")
    table = tokenizer.convert_tokens_to_ids("<table>")
    assert table not in PromptEncoder(tokenizer, [table]).text("a <table> b").ids


def test_characters_that_become_a_control_token_when_normalized_stay_text():
    model = models.BPE({"<": 0, "a": 1, ">": 2, "\uff1c": 3, "\uff1e": 4}, [])
    backend = Tokenizer(model)
    backend.normalizer = normalizers.NFKC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens([AddedToken("<a>", special=True, normalized=True)])
    assert tokenizer("\uff1ca\uff1e")["input_ids"] == [5]
    assert PromptEncoder(tokenizer).text("\uff1ca\uff1e").ids == [0, 1, 2]


def test_a_model_that_spells_a_control_token_itself_refuses_it():
    backend = Tokenizer(models.Unigram([("<unk>", -9.0), ("<s>", 0.0), ("a", -1.0)], 0, False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    encoder = PromptEncoder(tokenizer)
    assert encoder.text("aa").ids == [2, 2]
    with pytest.raises(UserError, match="'<s>' cannot be told from"):
        encoder.text("a<s>a")


def test_single_words_are_control_tokens_only_between_spaces():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "<a>": 1, "<": 2, ">": 3}, []))
    )
    tokenizer.add_tokens([AddedToken("<a>", special=True, single_word=True, normalized=False)])
    tokenizer.chat_template = "{% for m in messages %}a<a>a <a> {{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "<a>"}]
    expected = tokenizer("a<a>a <a> ", add_special_tokens=False)["input_ids"]
    assert PromptEncoder(tokenizer).chat(messages) == [*expected, 2, 0, 3]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20)
@given(text=st.text(st.sampled_from("ab  \n<|>.1日é"), max_size=200), piece=st.integers(5, 60))
def test_only_texts_with_too_many_tokens_are_given_up(family, text, piece):
    encoder = encoder_of(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_encoding, "_PIECE", piece)
        num_tokens = len(encoder.plain(text, add_special_tokens=False).ids)
        encoder.check_length(text, num_tokens)
        encoder.check_length(text, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_is_given_up_before_it_is_tokenized_as_a_whole(family):
    encoder, text = encoder_of(family), "plus 12 " * 100_000
    with pytest.raises(TooManyTokens, match="800000 characters are more than the limit of 1000"):
        encoder.check_length(text, 1000)
    messages = [{"role": "user", "content": text + control_texts(family)[0]}]
    for turns in ([{"role": "user", "content": text}], messages):
        with pytest.raises(TooManyTokens):
            encoder.chat(turns, max_tokens=1000)
