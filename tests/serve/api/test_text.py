from __future__ import annotations

import copy
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from chat_families import BYTE_FALLBACK, TEMPLATES, tokenizer_of
from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.api.text import (
    OutputPart,
    OutputText,
    StopRules,
    TextStream,
    TokenBytes,
    decode,
    echo_text,
    echo_tokens,
    encode,
    special_tokens,
)


@pytest.fixture(scope="session")
def tokenizer(mars_dir: Path) -> PreTrainedTokenizerBase:
    return read_checkpoint(mars_dir).tokenizer


# Whole characters

MULTIBYTE = "aé漢😀"


def push_all(tokenizer: PreTrainedTokenizerBase, groups: list[list[int]]) -> list[str]:
    stream = TextStream(tokenizer)
    last = len(groups) - 1
    return [stream.push(group, last=index == last) for index, group in enumerate(groups)]


def grouped(tokens: list[int], cuts: tuple[bool, ...]) -> list[list[int]]:
    """Split ``tokens`` after each place where ``cuts`` is true."""
    groups = [tokens[:1]]
    for token, cut in zip(tokens[1:], cuts, strict=True):
        if cut:
            groups.append([])
        groups[-1].append(token)
    return groups


def spans_of(tokenizer, text):
    return tokenizer(text, return_offsets_mapping=True)["offset_mapping"]


def test_characters_come_as_soon_as_they_are_whole(tokenizer):
    tokens = encode(tokenizer, MULTIBYTE, add_special_tokens=False)
    parts = push_all(tokenizer, [[token] for token in tokens])
    assert parts == ["a", "", "é", "", "", "漢", "", "", "", "😀"]


@pytest.mark.parametrize("length", [2, 4, 5, 7, 8, 9])
def test_an_output_may_end_inside_a_character(tokenizer, length):
    tokens = encode(tokenizer, MULTIBYTE, add_special_tokens=False)[:length]
    whole = decode(tokenizer, tokens)
    assert whole.endswith("\ufffd")
    *before, last = push_all(tokenizer, [[token] for token in tokens])
    assert "".join([*before, last]) == whole
    assert not any("\ufffd" in part for part in before)


@given(data=st.data())
def test_the_parts_join_to_the_decoded_whole_however_tokens_are_grouped(tokenizer, data):
    ids = st.integers(0, len(tokenizer) - 1)
    groups = data.draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=12))
    whole = decode(tokenizer, [token for group in groups for token in group])
    assert "".join(push_all(tokenizer, groups)) == whole


@given(data=st.data())
def test_some_special_tokens_may_be_kept(tokenizer, data):
    special = special_tokens(tokenizer)
    assert special == {token for token in range(len(tokenizer)) if decode(tokenizer, [token]) == ""}
    hidden = special - {tokenizer.eos_token_id}
    ids = st.one_of(st.sampled_from(sorted(special)), st.integers(0, len(tokenizer) - 1))
    groups = data.draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=12))
    stream = TextStream(tokenizer, hidden)
    last = len(groups) - 1
    parts = [stream.push(group, last=index == last) for index, group in enumerate(groups)]
    shown = [token for group in groups for token in group if token not in hidden]
    assert "".join(parts) == decode(tokenizer, shown, skip_special_tokens=False)


def continued(tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int]) -> str:
    return decode(tokenizer, [*prompt, *tokens]).removeprefix(decode(tokenizer, prompt))


def characters_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[list[int]]:
    """Divide tokens into texts, whole characters of byte tokens, and single broken bytes."""
    names = tokenizer.convert_ids_to_tokens(tokens)
    found, run = list[list[int]](), bytearray()
    for index in range(len(tokens) + 1):
        if index < len(tokens) and names[index].startswith("<0x"):
            run.append(int(names[index][3:5], 16))
            continue
        start = index - len(run)
        for character in run.decode(errors="surrogateescape"):
            length = len(character.encode(errors="surrogateescape"))
            found.append(tokens[start : start + length])
            start += length
        run.clear()
        found.append(tokens[index : index + 1])
    return found


@pytest.mark.parametrize("family", TEMPLATES)
@given(data=st.data())
def test_an_output_is_what_the_tokenizer_decodes_behind_the_prompt(family, data):
    tokenizer = tokenizer_of(family)
    prompt = data.draw(st.sampled_from(["What is 2?", "", "It is \n\n", "漢"]))
    prompt = encode(tokenizer, prompt, add_special_tokens=data.draw(st.booleans()))
    texts = st.text("a é漢😀", max_size=6).map(
        lambda text: encode(tokenizer, text, add_special_tokens=False)
    )
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=4)
    halves = texts.flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end]))
    drawn = data.draw(st.lists(st.one_of(texts, ids, halves), max_size=6))
    tokens = [token for each in drawn for token in each]
    cuts = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    groups = grouped(tokens, tuple(cuts[1:]))
    stream, last = TextStream(tokenizer, prompt=prompt), len(groups) - 1
    parts = [stream.push(group, last=index == last) for index, group in enumerate(groups)]
    whole = continued(tokenizer, prompt, tokens)
    if family in BYTE_FALLBACK and "\ufffd" in whole:
        # There a broken byte breaks the whole run of bytes around it, and here itself alone.
        shown = [token for token in tokens if token not in special_tokens(tokenizer)]
        filler = encode(tokenizer, "a", add_special_tokens=False)
        before, whole = filler if decode(tokenizer, prompt) else prompt, ""
        for character in characters_of(tokenizer, shown):
            whole += continued(tokenizer, before, character)
            before = filler
    assert "".join(parts) == whole


def test_broken_bytes_and_first_spaces_of_pieces():
    tokenizer = tokenizer_of("llama 2")
    text = encode(tokenizer, "漢 is", add_special_tokens=False)
    assert push_all(tokenizer, [[each] for each in text[1:3]]) == ["", "\ufffd\ufffd"]
    assert "".join(push_all(tokenizer, [text[:4], text[1:2]])) == "漢\ufffd"
    assert push_all(tokenizer, [text[1:2], text[:1]]) == ["", "\ufffd "]
    stream = TextStream(tokenizer, prompt=encode(tokenizer, "a", add_special_tokens=True))
    assert stream.push(text, last=True) == " 漢 is"


# Echoed prompts


@pytest.mark.parametrize(
    "text", ["What is 3?", "aé漢😀b", "<|im_start|>user\nWhat?<|im_end|>\n", " a", "e\u0301"]
)
def test_an_echoed_text_is_the_prompt(tokenizer, text):
    tokens = encode(tokenizer, text, add_special_tokens=True)
    echo = echo_text(text, spans_of(tokenizer, text))
    assert echo.text == text
    assert len(echo.offsets) == len(tokens)
    assert echo.offsets == sorted(echo.offsets)
    for token, offset in zip(tokens, echo.offsets, strict=True):
        name = tokenizer.decode([token])
        assert "\ufffd" in name or unicodedata.normalize("NFC", text[offset:]).startswith(name)


def test_added_special_tokens_have_no_text_in_an_echo(tokenizer):
    with_ends = copy.deepcopy(tokenizer)
    with_ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A <|im_end|>", special_tokens=[("<|im_end|>", tokenizer.eos_token_id)]
    )
    plain, found = (echo_text("ab c", spans_of(each, "ab c")) for each in (tokenizer, with_ends))
    assert found.offsets == [0, *plain.offsets, 4]


@given(data=st.data())
def test_echoed_tokens_are_spelled_out(tokenizer, data):
    ids = st.integers(0, len(tokenizer) - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=12))
    echo = echo_tokens(tokenizer, tokens)
    assert echo.text == tokenizer.decode(tokens)
    assert echo.offsets[0] == 0
    assert echo.offsets == sorted(echo.offsets)


# Stop strings


def texts_of(
    tokenizer: PreTrainedTokenizerBase, groups: list[list[int]], rules: StopRules
) -> list[OutputPart]:
    """Return the parts of an output that arrives in groups, up to the one that stopped it."""
    output, parts = OutputText(tokenizer, rules), list[OutputPart]()
    for index, group in enumerate(groups):
        parts.append(output.push(group, last=index == len(groups) - 1))
        if parts[-1].is_stopped:
            break
    return parts


def expected_output(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], rules: StopRules
) -> tuple[str, int, bool]:
    """Return text, number of tokens and whether it stopped, by a plain reading of the rules."""
    pieces = push_all(tokenizer, [[token] for token in tokens])
    for index in range(len(tokens)):
        before, now = "".join(pieces[:index]), "".join(pieces[: index + 1])
        found = [
            (start + len(string), start)
            for string in rules.strings
            for start in range(len(now))
            if now.startswith(string, start) and start + len(string) > len(before)
        ]
        if found and index >= rules.min_tokens:
            end, start = min(found)
            return now[: end if rules.in_output else start], index + 1, True
    return "".join(pieces), len(tokens), False


@pytest.mark.parametrize(
    ("strings", "stop", "expected"),
    [(("three", "re"), "re", " th"), (("e", "hre", "re"), "hre", " t"), (("ree", "h"), "h", " t")],
)
def test_of_two_strings_in_a_token_the_one_that_ends_first_counts(strings, stop, expected):
    tokenizer = tokenizer_of("qwen")
    tokens = encode(tokenizer, " three", add_special_tokens=False)
    part = OutputText(tokenizer, StopRules(strings)).push(tokens, last=False)
    assert (len(tokens), part.text, part.stop) == (1, expected, stop)


def longest_beginning(text: str, strings: Sequence[str]) -> int:
    lengths = [
        length
        for string in strings
        for length in range(1, len(string))
        if text.endswith(string[:length])
    ]
    return max(lengths, default=0)


STOP_TEXTS = st.text("abé漢😀", max_size=12)
STOP_STRINGS = st.lists(st.text("abé漢😀", min_size=1, max_size=4), max_size=3)


@given(
    text=STOP_TEXTS,
    strings=STOP_STRINGS,
    in_output=st.booleans(),
    min_tokens=st.integers(0, 5),
    data=st.data(),
)
def test_stop_strings_are_found_however_tokens_are_grouped(
    tokenizer, text, strings, in_output, min_tokens, data
):
    rules = StopRules(tuple(strings), in_output=in_output, min_tokens=min_tokens)
    tokens = encode(tokenizer, "a" + text, add_special_tokens=False)
    num_cuts = len(tokens) - 1
    cuts = data.draw(st.lists(st.booleans(), min_size=num_cuts, max_size=num_cuts))
    parts = texts_of(tokenizer, grouped(tokens, tuple(cuts)), rules)
    expected, num_tokens, is_stopped = expected_output(tokenizer, tokens, rules)
    assert "".join(part.text for part in parts) == expected
    assert sum(part.num_tokens for part in parts) == num_tokens
    assert [part.is_stopped for part in parts] == [False] * (len(parts) - 1) + [is_stopped]
    assert all(len(part.offsets) == part.num_tokens for part in parts)


@given(text=STOP_TEXTS, strings=STOP_STRINGS)
@example(text="aab", strings=["aab"])
def test_only_what_may_begin_a_stop_string_is_held(tokenizer, text, strings):
    output = OutputText(tokenizer, StopRules(tuple(strings)))
    stream = TextStream(tokenizer)
    released, seen = "", ""
    for token in encode(tokenizer, "a" + text, add_special_tokens=False):
        part = output.push([token], last=False)
        if part.is_stopped:
            break
        seen += stream.push([token], last=False)
        released += part.text
        held = longest_beginning(seen, strings)
        assert released == seen[: len(seen) - held]


@pytest.mark.parametrize(("in_output", "expected"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_adds_text_only_on_request(tokenizer, in_output, expected):
    tokens = [encode(tokenizer, each, add_special_tokens=False)[0] for each in "abc"]
    rules = StopRules(tokens=frozenset(tokens[-1:]), in_output=in_output)
    (part,) = texts_of(tokenizer, [tokens], rules)
    assert (part.text, part.num_tokens, part.is_stopped) == (expected, 3, False)


def test_offsets_count_the_characters_before(tokenizer):
    tokens = encode(tokenizer, MULTIBYTE, add_special_tokens=False)
    parts = texts_of(tokenizer, [tokens[:4], tokens[4:]], StopRules(("漢!",)))
    assert [offset for part in parts for offset in part.offsets] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]


# Bytes of single tokens


@pytest.fixture(scope="module")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words contain spaces and whose other tokens are bytes, as in Llama
    2."""
    words = ["<unk>", "<s>", "▁", "▁hi", "a", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.WordLevel(vocabulary, unk_token="<unk>")  # noqa: S106
    plain = Tokenizer(model)
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"bos_token": "<s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def test_byte_tokens_are_reported_as_bytes(fallback_tokenizer):
    names = TokenBytes(fallback_tokenizer)
    tokens = fallback_tokenizer.convert_tokens_to_ids(["▁hi", "▁", "a", "<0xC3>", "<0xA9>", "<s>"])
    assert b"".join(names.bytes_of(token) for token in tokens) == " hi aé<s>".encode()
    assert [names.name_of(token) for token in tokens[2:5]] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    (replacement,) = fallback_tokenizer.convert_tokens_to_ids(["\ufffd"])
    assert names.bytes_of(replacement) == "\ufffd".encode()


@given(text=st.text(max_size=20))
def test_the_bytes_of_tokens_join_to_the_text(tokenizer, text):
    names = TokenBytes(tokenizer)
    tokens = encode(tokenizer, text, add_special_tokens=False)
    found = b"".join(names.bytes_of(token) for token in tokens).decode()
    assert found == unicodedata.normalize("NFC", text), "as this tokenizer does with prompts"
