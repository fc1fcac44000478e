"""The cost of every bound and every regular expression on clients' texts.

A hostile text eight times as long may take about eight times as long, where one that is read in
quadratic time takes 64 times as long, and one of the largest body's size holds nobody up: these run
on the event loop, or in threads that keep it waiting while they hold the interpreter. The model's
output is a client's text, too, as a client can make a model say anything.
"""

from __future__ import annotations

import ast
import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken

import mars_platform.data
import mars_serve.api
import mars_serve.http
from mars_platform.data import prompt_encoding, sources
from mars_platform.data.client_text import ClientText, Shield, strings_in
from mars_platform.data.template_messages import _short_id, adapted
from mars_platform.data.thinking import ThinkingTokens
from mars_serve.api import bounds
from mars_serve.api.errors import ApiError, invalid_value, shown
from mars_serve.api.incoming import structure
from mars_serve.api.incoming.spans import _span_behind
from mars_serve.api.messages import PastAssistantMessage, messages_for_template
from mars_serve.api.responses.items import ThinkingItem, messages_of
from mars_serve.api.text import StopRules, _num_held
from mars_serve.api.tools.families import HermesParser, LlamaParser, MistralParser
from mars_serve.http import stored_responses
from mars_serve.http.endpoints import batches
from mars_serve.http.middleware import bodies, recording, records

SIZE, SMALL_SIZE = 2**17, 2**14
"""Bytes of a text where it is read at once, and where Python reads it piece by piece, letting other
threads go on."""
MOST_S, SMALL_MOST_S = 0.05, 2.0
"""Most CPU time for each, some three times as much as it takes on a slow machine."""
GROWTH, MOST_GROWTH = 8, 24
"""How much longer a text becomes, and how much longer it may take: other programs that share a core
may make it three times as slow."""
MOST_TRIES = 8
FLOOR_S = 0.01
PIECEWISE = {"names", "choices", "texts in templates", "calls", "stops"}
CONTROLS = [AddedToken(f"<|reserved_special_token_{index}|>") for index in range(256)]
PIECE = 64

Work = Callable[[str], object]


@cache
def shield() -> Shield:
    texts = [token.content for token in CONTROLS]
    table = {"<": "\U00030000", ">": "\U00030001"}
    names = dict.fromkeys(texts, "0")
    return Shield(table, table, frozenset(), prompt_encoding._any_of(CONTROLS), names)


def called(arguments: str) -> PastAssistantMessage:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return PastAssistantMessage.model_validate({"role": "assistant", "tool_calls": [call]})


def thinking(text: str) -> object:
    items = [
        ThinkingItem.model_validate({"type": "reasoning", "summary": [], "content": [
            {"type": "reasoning_text", "text": text[start : start + PIECE]}]})
        for start in range(0, len(text), PIECE)
    ]  # fmt: skip
    return messages_of(items, None, 0)


def tried(work: Work) -> Work:
    def run(text: str) -> None:
        with suppress(ApiError):
            work(text)

    return run


def parsed(parser: type[HermesParser | LlamaParser | MistralParser]) -> Work:
    def run(text: str) -> None:
        made = parser(["f"], is_parallel=True)
        for start in range(0, len(text), PIECE):
            made.push(text[start : start + PIECE], last=False)
        made.push("", last=True)

    return run


def replacing(text: str) -> object:
    return ClientText(text * 8, text * 8).replace("\n", "  ")


def cutting(text: str) -> object:
    told = ClientText(text, text)
    cut = told.split(), told.split("\n"), told.splitlines(), told.rsplit("\n", 1)
    return cut, told.strip(), told.partition("</think>"), told.rpartition("</think>"), "x" in told


def held(text: str) -> None:
    """Look for the beginning of a stop string behind every 64 characters, as if they were one."""
    rules = StopRules(tuple("a" * length + "b" for length in range(240, 256)))
    for end in range(PIECE, len(text), PIECE):
        _num_held(text[max(0, end - 300) : end], rules)


DIGITS = "9" * 399 + ","
JSON_WORKS: list[Work] = [
    lambda text: bounds.json_size_of(text.encode()),
    lambda text: bounds.most_depth(text.encode()),
    lambda text: bodies._may_have_surrogates(text.encode()),
    tried(lambda text: bounds.check_arguments([called(text)])),
    tried(lambda text: bodies._check_surrogates(f'{{"a": [{text}0]}}'.encode())),
    lambda text: adapted(messages_for_template([called(text)]), ""),
]
JSON_TEXTS = {
    "digits": DIGITS,
    "digits in a fraction": "0." + DIGITS,
    "values": "0,",
    "empty lists": "[],",
    "quotes": '"",',
    "escaped quotes": '"' + '\\"' * 30 + '",',
    "backslashes": '"' + "\\\\" * 30 + '",',
    "escapes": '"' + "\\u4e00" * 30 + '",',
    "pairs": '"' + "\\ud83d\\ude00" * 30 + '",',
    "halves of pairs": '"' + "\\ud83d" * 60 + '",',
    "numbers as letters": '"' + "9" * 400 + '",',
}
OUTPUTS = {
    each: each
    for each in (
        "<", "{", "[", " ", "a ", "\\", '"', "<tool_call>", '<tool_call>{"a": 1}', "[TOOL_CALLS]",
        "[TOOL_CALLS]" + "a" * 250, '<tool_call>{"name"' + " " * 99, '{"name": "f", "arguments": {',
        '<tool_call>{"name": "f", "arguments": {}}</tool_cal', '{"name": "f", "parameters": {}};',
        '<tool_call>{"a": "\\', "[TOOL_CALLS][",
    )
}  # fmt: skip
TEXTS = {
    "letters": "a", "spaces": " ", "lines": "\n", "words": "a\n", "edges": "<|",
    "almost control tokens": "<|reserved_special_token_", "stand-ins": "\U00030000",
    "control tokens": "<|reserved_special_token_255|>", "marks": "</think>", "accents": "\u00e9",
}  # fmt: skip
CASES: dict[str, tuple[list[Work], dict[str, str]]] = {
    "json": (JSON_WORKS, JSON_TEXTS),
    "lengths": (
        [
            bounds.num_bytes,
            lambda text: bounds.json_length({"a": [text] * 2}),
            lambda text: list(strings_in([[each] for each in text[:PIECE]] + [{text: text}])),
            shown,
            lambda text: invalid_value("stop", text).body(),
        ],
        TEXTS,
    ),
    "control tokens": (
        [
            lambda text: shield().seal(shield().of(text)),
            lambda text: shield().occurrence.search(text),
            lambda text: prompt_encoding._STAND_IN.findall(text),
            _short_id,
        ],
        TEXTS,
    ),
    "texts in templates": ([replacing, cutting], TEXTS),
    "names": (
        [
            sources.without_passwords,
            recording._request_id,
            lambda text: records._UNSAFE.sub("?", text),
            lambda text: re.fullmatch(r"\w+", text),
            lambda text: stored_responses._RESPONSE.fullmatch(text),
            lambda text: stored_responses._ITEM.fullmatch("msg_" + text),
            lambda text: batches._WINDOW.fullmatch(text),
        ],
        {**TEXTS, "urls": "://:", "queries": "?token"},
    ),
    "choices": (
        [
            lambda text: structure._REGEX_META.sub(r"\\\1", text),
            tried(lambda text: structure._choice_grammar("choice", [text])),
            tried(lambda text: structure.json_schema_grammar("schema", {"a": text})),
        ],
        {**TEXTS, "symbols": "\\.+*?()|[]{}^$#&~-"},
    ),
    "prompts": (
        [
            lambda text: bodies._check_unicode(text.encode()),
            thinking,
            lambda text: _span_behind([len(text) % 2] * len(text), ThinkingTokens(1, 2)),
        ],
        TEXTS,
    ),
    "calls": ([parsed(HermesParser), parsed(LlamaParser), parsed(MistralParser)], OUTPUTS),
    "stops": ([held], {"no beginning": "x", "beginning": "a", "end": "a" * 120 + "x"}),
}  # fmt: skip


def cpu_s(work: Work, text: str) -> float:
    """Return the CPU time that some work takes of this thread."""
    begin_s = time.thread_time()
    work(text)
    return time.thread_time() - begin_s


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Keep the garbage collector's time, which is that of all else in this process, out."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, (_, texts) in CASES.items() for name in texts]
)
def test_the_cost_of_a_hostile_text_grows_with_its_length_alone(case, name):
    works, texts = CASES[case]
    size, most_s = (SMALL_SIZE, SMALL_MOST_S) if case in PIECEWISE else (SIZE, MOST_S)
    part = texts[name]
    short, long = (part * (each // len(part.encode())) for each in (size // GROWTH, size))
    for work in works:
        short_s = long_s = limit_s = float("inf")
        for _ in range(MOST_TRIES):
            short_s, long_s = min(short_s, cpu_s(work, short)), min(long_s, cpu_s(work, long))
            limit_s = min(most_s, MOST_GROWTH * short_s + FLOOR_S)
            if long_s < limit_s:
                break
        assert long_s < limit_s


# Regular expressions are found by what uses them, so that none is added without a text here.

OF_CHECKPOINTS = {
    "_BARRED", "_TAG", "_pattern", "_BYTE_FALLBACK", "CallGrammar", "_GENERATION",
}  # fmt: skip
"""On texts of the checkpoint, which is trusted with them."""
OF_DATA = {"_MAGIC", "_MARKS", "_NUMBER", "_PARTS", "_SPACE"}
"""On data to train on."""
TRIED = {
    "_STAND_IN", "PromptEncoder", "_any_of", "_SHORT_ID", "_REGEX_META", "_UNSAFE", "_ID",
    "_HEADER", "_WORDS", "_INERT", "_NAMED_HEADER", "_NAMED_CHARACTERS",
    "_PASSWORD", "_KEY", "_RESPONSE", "_ITEM", "_WINDOW",
}  # fmt: skip
USE = re.compile(r"\bre\.(?!escape)[a-z]+\(")


def test_every_regular_expression_on_clients_texts_is_tried():
    found = set[str]()
    for package in (mars_serve.api, mars_serve.http, mars_platform.data):
        for path in Path(package.__path__[0]).rglob("*.py"):
            found |= {
                getattr(each, "name", None) or ast.unparse(each.targets[0])
                for each in ast.parse(path.read_text()).body
                if USE.search(ast.unparse(each))
            }
    assert found == TRIED | OF_CHECKPOINTS | OF_DATA
