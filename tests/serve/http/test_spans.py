"""Thresholds by span, and thinking apart from answers, from the body to the response."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.api.text import special_tokens
from mars_serve.engine.engine import Engine
from rest.rest_requests import CHAT, COMPLETIONS, SHORT_TOOL_TEMPLATE
from rest.rest_server import ENGINE, Client, SingleEngineBackend, app_of, client_of, served

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
NEXT = {
    ("answer", "<think>"): "thinking",
    ("answer", "<tool_call>"): "tool_arguments",
    ("thinking", "</think>"): "answer",
    ("tool_arguments", "</tool_call>"): "answer",
    ("tool_arguments", "<think>"): "thinking",
}
TEMPLATE = (
    SHORT_TOOL_TEMPLATE.replace(
        "{{ message.content or",
        "{% if message.reasoning_content %}({{ message.reasoning_content"
        " }}){% endif %}{{ message.content or",
        1,
    )
    + "{% if add_generation_prompt and (thinks or thinking) %}<think>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "get"}}]
BODY = {
    "model": "mars",
    "messages": [{"role": "user", "content": "7?"}],
    "max_tokens": 40,
    "temperature": 1,
    "logprobs": True,
    "mode": "threshold",
}
LOW, HIGH = 1e-5, 1.0
"""Thresholds that accept nearly all that an untrained model proposes, and nothing."""


@pytest.fixture(scope="module")
def thinker(plain_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a checkpoint whose tokenizer has the tags as tokens, and whose template thinks."""
    model, tokenizer = load_model(plain_dir), read_checkpoint(plain_dir).tokenizer
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer) + 1, mean_resizing=False)  # no id has no token
    mask, _ = add_mask_token(model, tokenizer)
    path = tmp_path_factory.mktemp("thinker")
    save_checkpoint(path, model, tokenizer, MarsMetadata(block_size=4, mask_token_id=mask))
    return read_checkpoint(path)


@pytest.fixture(scope="module")
def loop(thinker: Checkpoint) -> Iterator[LocalEngineClient]:
    loop = LocalEngineClient(Engine(thinker, ENGINE))
    yield loop
    loop.stop()


@pytest.fixture
def make_client(loop: LocalEngineClient, thinker: Checkpoint) -> Callable[..., Client]:
    """Make a client of the model with some settings."""

    def make(**settings: Any) -> Client:
        return client_of(app_of(served("mars", thinker, SingleEngineBackend(loop), **settings)))

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


@pytest.fixture(scope="module")
def bias(thinker: Checkpoint) -> dict[str, float]:
    """Return a bias that makes tags frequent and bans special tokens and what is not ASCII."""
    tokenizer = thinker.tokenizer
    spoken = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    banned = {token for token, text in spoken.items() if not text.isascii()}
    found = {str(token): -100.0 for token in banned | special_tokens(tokenizer)}
    return found | {str(token): 3.5 for token in tokenizer.convert_tokens_to_ids(TAGS)}


def walk(choice: dict[str, Any], start: str = "answer") -> list[tuple[str, str]]:
    """Return the tokens of a choice by their log-probabilities, each with its span."""
    found, span = list[tuple[str, str]](), start
    for entry in choice["logprobs"]["content"]:
        found.append((entry["token"], span))
        span = NEXT.get((span, entry["token"]), span)
    return found


def text_in(tokens: list[tuple[str, str]], *, of_thinking: bool) -> str:
    """Return the text of all thinking, or of all else, without the markers between them."""
    return "".join(
        token
        for token, span in tokens
        if (span == "thinking") == (NEXT.get((span, token), span) == "thinking") == of_thinking
    )


def asked(bias: dict[str, float], seed: int = 1, **fields: Any) -> dict[str, Any]:
    return {**BODY, "logit_bias": bias, "seed": seed, **fields}


def joined(events: list[dict[str, Any]], name: str) -> str:
    return "".join(event["choices"][0]["delta"].get(name) or "" for event in events)


@pytest.mark.parametrize(
    ("mode", "thinks"), [(Mode.AR, False), (Mode.EXACT, True), (Mode.THRESHOLD, True)]
)
async def test_reasoning_and_content_are_those_of_the_tokens(client, bias, mode, thinks):
    body = asked(bias, mode=mode, confidence_threshold=LOW, chat_template_kwargs={"thinks": thinks})
    answer = await client.answer(CHAT, body)
    (choice,) = answer["choices"]
    tokens = walk(choice, "thinking" if thinks else "answer")
    message = choice["message"]
    assert {span for _, span in tokens} >= {"thinking", "answer"}
    num_thinking = [span for _, span in tokens].count("thinking")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thinking}
    assert message["reasoning_content"] == text_in(tokens, of_thinking=True)
    assert (message["content"] or "") == text_in(tokens, of_thinking=False)
    assert "spans" not in answer["mars"], "the request has one threshold for all"
    events = await client.events(CHAT, body)
    for name in ("reasoning_content", "content"):
        assert joined(events, name) == (message[name] or "")


@pytest.mark.parametrize(
    ("thresholds", "lowest"),
    [
        ({"thinking": LOW, "answer": HIGH, "tool_arguments": HIGH}, None),
        ({"thinking": HIGH, "answer": LOW, "tool_arguments": HIGH}, None),
        ({"thinking": HIGH, "answer": HIGH, "tool_arguments": LOW}, None),
        ({"thinking": LOW, "tool_arguments": LOW}, 0.5),  # the floor of the request
    ],
)
async def test_each_span_is_served_with_its_threshold(client, bias, thresholds, lowest):
    fields = {"confidence_threshold": thresholds, "min_confidence_threshold": lowest}
    for seed in range(2):
        body = asked(bias, seed, tools=TOOLS, **fields)
        answer = await client.answer(CHAT, body)
        tokens, spans = walk(answer["choices"][0]), answer["mars"]["spans"]
        assert {name: each["tokens"] for name, each in spans.items()} == Counter(
            span for _, span in tokens
        )
        assert (
            sum(each["forward_passes"] for each in spans.values())
            == (answer["mars"]["forward_passes"])
        )
        for name, each in spans.items():
            expected = max(thresholds.get(name, 0.95), lowest or 0)
            assert each["confidence_threshold"] == expected
            assert "min_confidence_threshold" not in each
            assert each.get("requested_confidence_threshold") == thresholds.get(name)
            if expected == HIGH:
                assert each["forward_passes"] == each["tokens"]
            elif expected == LOW and each["tokens"] > 8:
                assert each["forward_passes"] < each["tokens"]


async def test_no_pass_goes_beyond_a_marker_and_a_stream_equals_the_whole(client, bias):
    body = asked(bias, tools=TOOLS, confidence_threshold={"thinking": LOW, "answer": 2 * LOW})
    events = await client.events(CHAT, body)
    span, longest = "answer", 0
    for event in events:
        tokens = walk(event["choices"][0], span)
        assert {each for _, each in tokens} == {span}
        token, before = tokens[-1]
        span, longest = NEXT.get((before, token), before), max(longest, len(tokens))
    assert longest > 2
    answer = await client.answer(CHAT, body)
    assert events[-1]["mars"].pop("tokens")
    assert events[-1]["mars"] == answer["mars"]
    message = answer["choices"][0]["message"]
    assert joined(events, "content") == (message["content"] or "")
    assert joined(events, "reasoning_content") == message["reasoning_content"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-z]{2,4}"}, "[a-z]{2,4}"),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, ""),
    ],
)
@pytest.mark.parametrize("thinks", [True, False])
async def test_grammars_and_forced_calls_begin_behind_the_thinking(
    client, bias, thinker, fields, pattern, thinks
):
    """A template that leaves it open lets the model think, too, if it begins to at once."""
    begin, end = map(str, thinker.tokenizer.convert_tokens_to_ids(TAGS[:2]))
    if not thinks:
        bias, fields = {**bias, begin: 100.0}, {**fields, "thinking_token_budget": 9}
    body = asked({**bias, end: 5.0}, 3, max_tokens=120, **fields)
    body |= {"chat_template_kwargs": {"thinks": thinks}}
    found = list[dict[str, Any]]()
    for mode in (Mode.AR, Mode.EXACT, Mode.THRESHOLD):
        asked_mode = {**body, "mode": mode, "confidence_threshold": LOW}
        (choice,) = (await client.answer(CHAT, asked_mode))["choices"]
        message = choice["message"]
        assert message["reasoning_content"]
        assert re.fullmatch(pattern, message["content"] or "")
        assert bool(message.get("tool_calls")) == ("tools" in fields)
        assert choice["finish_reason"] == ("tool_calls" if "tools" in fields else "stop")
        events = await client.events(CHAT, asked_mode)
        for name in ("reasoning_content", "content"):
            assert joined(events, name) == (message[name] or "")
        found.append(choice["logprobs"]["content"])
    assert [each["token"] for each in found[1]] == [each["token"] for each in found[0]]
    closed = {**body, "chat_template_kwargs": {"thinks": False, "enable_thinking": False}}
    (choice,) = (await client.answer(CHAT, closed))["choices"]
    assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize("budget", [0, 3])
async def test_thinking_ends_with_its_budget(client, bias, budget):
    body = asked(bias, thinking_token_budget=budget, chat_template_kwargs={"thinks": True})
    for mode in Mode:
        choice = (await client.answer(CHAT, {**body, "mode": mode}))["choices"][0]
        tokens = "".join("t" if s == "thinking" else "a" for _, s in walk(choice, "thinking"))
        lengths = [len(run) - 1 for run in re.findall("t+", tokens)]  # without what ends it
        assert max(lengths) == budget


@pytest.mark.parametrize(
    "names", [["reasoning_content"], ["reasoning"], ["reasoning", "reasoning_content"]]
)
async def test_thinking_comes_under_the_names_of_the_setting(make_client, bias, names):
    body = asked(bias, chat_template_kwargs={"thinks": True})
    async with make_client(reasoning_fields=names) as client:
        (choice,) = (await client.answer(CHAT, body))["choices"]
        events = await client.events(CHAT, body)
    message = choice["message"]
    assert [name for name in message if name.startswith("reasoning")] == names
    assert {joined(events, name) for name in names} == {message[name] for name in names}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_earlier_thinking_is_rendered_by_either_name(client, name):
    turns = [*BODY["messages"], {"role": "assistant", "content": "8", name: "7 and one"}]
    messages = [*turns, {"role": "user", "content": "And?"}]
    ids = await client.ids_of(messages=messages)
    text = (await client.answer("/detokenize", {"tokens": ids}))["prompt"]
    assert "(7 and one)8" in text


@pytest.mark.parametrize(
    ("effort", "begins"), [("none", False), ("low", True), ("high", True), (None, False)]
)
async def test_an_effort_sets_the_switch_of_the_template(client, bias, effort, begins):
    body = asked(bias, reasoning_effort=effort, return_token_ids=True, max_tokens=1)
    response = await client.post(CHAT, json=body)
    ids = response.json()["prompt_token_ids"]
    text = (await client.answer("/detokenize", {"tokens": ids}))["prompt"]
    assert text.endswith("<think>") == begins
    assert "x-marsray-unknown-fields" not in response.headers
    body |= {"chat_template_kwargs": {"thinking": not begins}}
    ids = (await client.answer(CHAT, body))["prompt_token_ids"]
    assert ((await client.answer("/detokenize", {"tokens": ids}))["prompt"]).endswith(
        "<think>"
    ) == (not begins), "a variable that is given counts before the effort"


async def test_the_spans_of_several_outputs_are_added(client, bias):
    body = asked(bias, n=3, confidence_threshold={"thinking": LOW})
    answer = await client.answer(CHAT, body)
    walked = [each for choice in answer["choices"] for each in walk(choice)]
    tokens = {name: each["tokens"] for name, each in answer["mars"]["spans"].items()}
    assert tokens == Counter(span.replace("tool_arguments", "answer") for _, span in walked)


async def test_thinking_may_be_left_out(client, bias):
    body = asked(bias)
    (whole,) = (await client.answer(CHAT, body))["choices"]
    hidden = {**body, "include_reasoning": False}
    (choice,) = (await client.answer(CHAT, hidden))["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": whole["message"]["content"],
        "refusal": None,
    }
    shown = [token for token, span in walk(whole) if span != "thinking"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == shown
    events = await client.events(CHAT, hidden)
    assert joined(events, "content") == whole["message"]["content"]
    assert joined(events, "reasoning_content") == ""
    assert [each["token"] for event in events for each in logprobs_of(event)] == shown


def logprobs_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = event["choices"][0]["logprobs"]["content"]
    return found


async def test_without_a_parser_the_tags_stay_in_the_content(make_client, bias):
    async with make_client(reasoning_parser="none") as client:
        (choice,) = (await client.answer(CHAT, asked(bias)))["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == "".join(token for token, _ in walk(choice))


async def test_completions_have_spans_and_whole_texts(client, bias):
    body = asked(bias, prompt="7?", confidence_threshold={"thinking": LOW, "answer": HIGH})
    del body["messages"], body["logprobs"]
    answer = await client.answer(COMPLETIONS, body)
    assert "<think>" in answer["choices"][0]["text"]
    assert answer["mars"]["spans"].keys() == {"thinking", "answer"}
    assert answer["mars"]["spans"]["answer"]["confidence_threshold"] == HIGH
