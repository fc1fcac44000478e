"""vLLM's request fields over HTTP: what each does to prompts, outputs and reports."""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from decoding.failing_engines import ControlledEngine
from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_serve.api.text import TokenBytes, decode, encode
from rest.api_keys import bearer, key_entry
from rest.rest_requests import BODIES, CHAT, COMPLETIONS, CONVERSATION, MESSAGES, PROMPT, text_of
from rest.rest_server import ENGINE, SingleEngineBackend, app_of, client_of, served

NUM_TOKENS = 12
LOW = {"confidence_threshold": 0.02}
"""τ at which mode threshold accepts several tokens a pass from a random model."""


async def choice_of(client: Any, path: str, **fields: Any) -> dict[str, Any]:
    asked = {"max_tokens": NUM_TOKENS, "return_token_ids": True, **fields}
    answer = await client.answer(path, {**BODIES[path], **asked})
    found: dict[str, Any] = answer["choices"][0]
    return found


# Fields that decide which tokens are chosen


@pytest.mark.parametrize("path", BODIES)
async def test_ignored_end_tokens_are_tokens_like_any_other(client, mars, path):
    (end,) = mars.special.eos
    wanted = {"logit_bias": {str(end): 100}, "ignore_eos": True}
    choice = await choice_of(client, path, **wanted)
    assert (choice["token_ids"], choice["finish_reason"]) == ([end] * NUM_TOKENS, "length")
    assert text_of(choice) == ""
    apart = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    shown = await choice_of(client, path, **wanted, **apart)
    assert text_of(shown) == "<|im_end|>" * NUM_TOKENS
    ended = {**wanted, **apart, "stop_token_ids": [end]}
    stopped = await choice_of(client, path, **ended)
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([end], "stop")
    assert text_of(stopped) == ""
    kept = await choice_of(client, path, **ended, include_stop_str_in_output=True)
    assert text_of(kept) == "<|im_end|>"


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    return encode(tokenizer, text, add_special_tokens=False)


async def test_a_bad_word_is_kept_out_behind_a_space_too(client, tokenizer):
    """The word is one token, with and without the space."""
    word = next(each for each in "WwIitpaofs" if len(encode_plain(tokenizer, f" {each}")) == 1)
    (plain,), (spaced,) = encode_plain(tokenizer, word), encode_plain(tokenizer, f" {word}")
    bias = {str(plain): 60, str(spaced): 80}
    free = await choice_of(client, COMPLETIONS, logit_bias=bias)
    assert set(free["token_ids"]) == {spaced}
    for text in (word, f" {word}"):
        choice = await choice_of(client, COMPLETIONS, logit_bias=bias, bad_words=[text])
        assert not {plain, spaced}.intersection(choice["token_ids"])


async def test_a_bad_word_is_kept_out_where_it_is_fewer_tokens_behind_a_space(client, tokenizer):
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    words = [text[1:] for text in texts if re.fullmatch(" [a-z]+", text)]
    word = next(each for each in words if len(encode_plain(tokenizer, each)) > 1)
    (spaced,) = encode_plain(tokenizer, f" {word}")
    for text in (word, f" {word}"):
        fields = {"logit_bias": {str(spaced): 80}, "bad_words": [text]}
        assert spaced not in (await choice_of(client, COMPLETIONS, **fields))["token_ids"]


async def test_a_control_token_is_text_among_bad_words(client, mars):
    (end,) = mars.special.eos
    bias = {str(end): 100}
    choice = await choice_of(client, COMPLETIONS, logit_bias=bias, bad_words=["<|im_end|>"])
    assert choice["token_ids"] == [end]


# The prompt


@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_is_cut_to_the_tokens_to_keep(client, path):
    given = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    ids, num_kept = await client.ids_of(**given), 4
    assert len(ids) > num_kept
    for side, kept in ((None, ids[-4:]), ("left", ids[-4:]), ("right", ids[:4])):
        fields = {"truncate_prompt_tokens": num_kept, "truncation_side": side}
        body = {**BODIES[path], **fields, "return_token_ids": True, "max_tokens": NUM_TOKENS}
        answer = await client.answer(path, body)
        assert answer["usage"]["prompt_tokens"] == num_kept
        where = answer if path == CHAT else answer["choices"][0]
        assert where["prompt_token_ids"] == kept
        same = await choice_of(client, COMPLETIONS, prompt=kept)
        assert text_of(answer["choices"][0]) == same["text"]
    longer = {**BODIES[path], "truncate_prompt_tokens": 200}
    assert (await client.answer(path, longer))["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_kept", [-1, 200])
async def test_a_prompt_that_is_too_long_is_cut_to_fit(client, path, num_kept):
    long = "plus 12 " * 300
    given = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    body = {**BODIES[path], **given}
    await client.refusal(path, body, 400, "max_tokens")
    answer = await client.answer(path, {**body, "truncate_prompt_tokens": num_kept})
    expected = 256 - 24 if num_kept < 0 else num_kept
    assert answer["usage"]["prompt_tokens"] == expected


@pytest.mark.parametrize("path", BODIES)
async def test_a_limit_that_nobody_sent_is_not_to_blame_at_the_end_of_the_context(client, path):
    body = {key: value for key, value in BODIES[path].items() if key != "max_tokens"}

    def with_tokens(text: str) -> dict[str, Any]:
        given = {"messages": [{"role": "user", "content": text}]}
        return {**body, **(given if path == CHAT else {"prompt": text})}

    num_first = (await client.answer(path, {**with_tokens("a"), "max_tokens": 1}))["usage"]
    text = "a" + "!" * (256 - num_first["prompt_tokens"])
    long = with_tokens(text)
    where = "messages" if path == CHAT else "prompt"
    message = await client.refusal(path, long, 400, where)
    assert message == f"{where}: 256 tokens leave no room for an output within this model's " + (
        "limit of 256; shorten the prompt"
    )
    usage = (await client.answer(path, with_tokens(text[:-5]) | {"ignore_eos": True}))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (251, 5)


async def test_an_echo_repeats_what_is_left_of_a_prompt(client, tokenizer):
    ids = encode(tokenizer, PROMPT, add_special_tokens=True)
    for prompt in (PROMPT, ids):
        fields = {"prompt": prompt, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 3}
        choice = await choice_of(client, COMPLETIONS, **fields, max_tokens=0)
        assert choice["text"] == decode(tokenizer, ids[-3:], skip_special_tokens=False)
        assert len(choice["logprobs"]["tokens"]) == 3


async def test_the_tokenizers_own_tokens_are_added_where_they_are_asked_for(
    client_over, loops, mars
):
    """Here the tokenizer puts a control token before each text."""
    tokenizer = copy.deepcopy(mars.tokenizer)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    template = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    tokenizer.backend_tokenizer.post_processor = template
    backend = SingleEngineBackend(loops["mars"])
    async with client_over(backend, replace(mars, tokenizer=tokenizer)) as client:
        found = {
            (path, adds): (
                await client.answer(
                    path, {**BODIES[path], "add_special_tokens": adds, "max_tokens": 1}
                )
            )["usage"]["prompt_tokens"]
            for path in BODIES
            for adds in (True, False, None)
        }
    for path, default in ((COMPLETIONS, True), (CHAT, False)):
        assert found[path, True] == found[path, False] + 1
        assert found[path, None] == found[path, default]


@pytest.mark.parametrize("content", ["It is 7, I", "It is <|im_end|> 7, ", "<|im_end|>", ""])
async def test_the_last_message_is_continued_as_transformers_does(client, tokenizer, content):
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    ids = await client.ids_of(messages=messages, continue_final_message=True)
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    assert decode(tokenizer, ids, skip_special_tokens=False) == expected
    control = [token for token in ids if token in tokenizer.all_special_ids]
    harmless = [*MESSAGES, {"role": "assistant", "content": "x"}]
    same = await client.ids_of(messages=harmless, continue_final_message=True)
    assert control == [token for token in same if token in tokenizer.all_special_ids]
    fields = {"continue_final_message": True, "max_tokens": NUM_TOKENS}
    whole = {**CONVERSATION, "messages": messages, **fields}
    answer = await client.answer(CHAT, whole)
    again = await choice_of(client, COMPLETIONS, prompt=ids)
    assert text_of(answer["choices"][0]) == again["text"]
    echoed = await client.answer(CHAT, {**whole, "echo": True})
    assert text_of(echoed["choices"][0]) == content + again["text"]
    events = await client.events(CHAT, {**whole, "echo": True})
    assert "".join(text_of(event["choices"][0]) for event in events) == content + again["text"]


async def test_a_new_message_repeats_no_message_of_another_role(client):
    plain = await choice_of(client, CHAT)
    assert await choice_of(client, CHAT, echo=True) == plain


async def test_a_prompt_without_the_assistants_header(client):
    body = {**CONVERSATION, "add_generation_prompt": False, "return_token_ids": True}
    expected = await client.ids_of(messages=MESSAGES, add_generation_prompt=False)
    assert (await client.answer(CHAT, body))["prompt_token_ids"] == expected


# Reports


@torch.inference_mode()
def raw_logprobs(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities of the token behind each of some tokens: [tokens, vocabulary]."""
    return load_model(checkpoint.path)(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("path", BODIES)
async def test_a_prompts_log_probabilities_are_the_models(client, mars, path, num_top):
    body = {**BODIES[path], "prompt_logprobs": num_top, "return_token_ids": True}
    answer = await client.answer(path, body)
    where = answer if path == CHAT else answer["choices"][0]
    ids, found = where["prompt_token_ids"], where["prompt_logprobs"]
    expected, names = raw_logprobs(mars, ids), TokenBytes(mars.tokenizer)
    assert found[0] is None
    assert len(found) == len(ids)
    for token, row, entries in zip(ids[1:], expected, found[1:], strict=False):
        order = row.argsort(descending=True, stable=True).tolist()
        assert set(entries) == {str(each) for each in [token, *order[:num_top]]}
        assert next(iter(entries)) == str(token)
        for each, entry in entries.items():
            assert entry["logprob"] == pytest.approx(float(row[int(each)]), abs=1e-4)
            assert entry["rank"] == order.index(int(each)) + 1
        assert entries[str(token)]["decoded_token"] == names.text_of(token)


async def test_a_prompt_is_scored_without_output(client):
    fields = {"max_tokens": 0, "prompt_logprobs": 2}
    choice = await choice_of(client, COMPLETIONS, **fields)
    assert (choice["token_ids"], choice["logprobs"]) == ([], None)
    echoed = await choice_of(client, COMPLETIONS, **fields, echo=True, logprobs=1)
    assert echoed["prompt_logprobs"] == choice["prompt_logprobs"]
    assert max(len(top) for top in echoed["logprobs"]["top_logprobs"][1:]) == 2
    own = [
        entries and next(iter(entries.values()))["logprob"] for entries in choice["prompt_logprobs"]
    ]
    assert echoed["logprobs"]["token_logprobs"] == own


@pytest.mark.parametrize("path", BODIES)
async def test_tokens_are_named_by_their_ids(client, path):
    several = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    choice = await choice_of(client, path, **several, return_tokens_as_token_ids=True)
    ids = [f"token_id:{token}" for token in choice["token_ids"]]
    if path == CHAT:
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == ids
        named = [top["token"] for each in content for top in each["top_logprobs"]]
    else:
        assert choice["logprobs"]["tokens"] == ids
        named = [name for top in choice["logprobs"]["top_logprobs"] for name in top]
    assert all(re.fullmatch(r"token_id:\d+", name) for name in named)
    assert len(named) >= 2 * len(ids)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_reports_the_token_ids_of_a_whole_response(client, path):
    body = {**BODIES[path], **LOW, "return_token_ids": True, "n": 2}
    answer, events = await client.answer(path, body), await client.events(path, body)
    for choice in answer["choices"]:
        own = [event for event in events if event["choices"][0]["index"] == choice["index"]]
        passes = [event["choices"][0]["token_ids"] for event in own]
        assert [token for tokens in passes for token in tokens] == choice["token_ids"]
        first, *others = own if path == CHAT else [event["choices"][0] for event in own]
        where = answer if path == CHAT else choice
        assert first["prompt_token_ids"] == where["prompt_token_ids"]
        assert not any("prompt_token_ids" in each for each in others)
    plain = await client.answer(path, BODIES[path])
    assert "prompt_token_ids" not in {**plain, **plain["choices"][0]}


@pytest.mark.parametrize("path", BODIES)
async def test_a_response_has_the_id_that_the_client_chose(client, path):
    """Several at a time may have the same one."""
    body = {**BODIES[path], "request_id": "run-7/a:1", "max_tokens": 1}
    several = await asyncio.gather(*(client.answer(path, body) for _ in range(3)))
    prefix = "chatcmpl" if path == CHAT else "cmpl"
    assert {answer["id"] for answer in several} == {f"{prefix}-run-7/a:1"}


# Routing and prefixes


@pytest.mark.parametrize("path", BODIES)
async def test_prefixes_are_shared_only_with_the_same_salt(client, path):
    text = f"{path} salted, and long enough to fill some pages of the cache. " * 2
    given = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}

    async def num_cached(**salt: str) -> int:
        answer = await client.answer(path, {**BODIES[path], **given, **salt, "max_tokens": 1})
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    for salt in ({"cache_salt": "one"}, {"cache_salt": "two"}, {}):
        assert await num_cached(**salt) == 0
        assert await num_cached(**salt) >= 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_sessions_and_consent_to_audits_reach_the_engine(mars, path, stream):
    """A session counts before a user, and a request cannot consent to what its key forbids."""
    engine = ControlledEngine(mars, ENGINE)
    loop = LocalEngineClient(engine)
    keys = {"entries": [key_entry("open"), key_entry("shy", audit=False)]}
    asked: list[dict[str, Any]] = [
        *({}, {"user": "u"}, {"session_id": "s", "audit": True}),
        *({"user": "u", "session_id": "s", "audit": None}, {"audit": False}),
    ]
    async with client_of(
        app_of(served("mars", mars, SingleEngineBackend(loop)), keys=keys)
    ) as client:
        for key in ("open", "shy"):
            for fields in asked:
                body = {**BODIES[path], "max_tokens": 1, "stream": stream, **fields}
                response = await client.post(path, json=body, headers=bearer(key))
                assert response.status_code == 200, response.text
    loop.stop()
    neither, user, session, both, _ = (request.session for request in engine.received[:5])
    assert neither is None
    assert session == both != user
    consents = [request.may_be_audited for request in engine.received]
    assert consents == [True] * 4 + [False] * 6
