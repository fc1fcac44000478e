from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chat_families import tokenizer_of
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.api.text import decode, encode
from rest.rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS, MESSAGES, PROMPT, text_of
from rest.rest_server import SingleEngineBackend, until_idle
from waiting import until


@pytest.mark.parametrize("threshold", [0.05, 0.9, 1.0])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_a_completion_equals_the_reference_decoder(official, mars, threshold, as_ids, oracle):
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    expected = oracle(ids, threshold)
    response = await official.completions.create(
        model="mars",
        prompt=ids if as_ids else PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"confidence_threshold": threshold},
    )
    assert response.id.startswith("cmpl-")
    assert (response.object, response.model) == ("text_completion", "mars")
    assert [choice.text for choice in response.choices] == [decode(mars.tokenizer, expected.tokens)]
    assert response.choices[0].finish_reason == "length"
    assert response.usage.prompt_tokens == len(ids)
    assert response.usage.completion_tokens == len(expected.tokens) == 24
    assert response.usage.total_tokens == len(ids) + 24
    assert response.mars == {
        "mode": "threshold",
        "confidence_threshold": threshold,
        "forward_passes": len(expected.passes),
        "tokens_per_forward": round(24 / len(expected.passes), 4),
    }


async def test_a_completion_has_16_tokens_by_default(client):
    body = await client.answer(COMPLETIONS, {"model": "mars", "prompt": PROMPT})
    assert body["usage"]["completion_tokens"] == 16


async def test_an_end_token_ends_the_output_and_is_counted(mars, make_loop, client_over, oracle):
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    tokens = oracle(ids, 1.0).tokens
    index = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    special = replace(mars.special, eos=frozenset({tokens[index]}))
    ending = replace(mars, special=special)
    async with client_over(SingleEngineBackend(make_loop(ending)), ending) as client:
        body = await client.answer(COMPLETIONS, {**COMPLETION, "mode": "ar"})
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == index + 1


async def test_pieces_and_bytes_are_decoded_behind_the_prompt(client_over, loops, mars):
    """Its random output is mostly bytes that form no character."""
    tokenizer, backend = tokenizer_of("llama 2"), SingleEngineBackend(loops["mars"])
    prompt = [1, *tokenizer.convert_tokens_to_ids(["▁", "a"])]
    body = {**COMPLETION, "prompt": prompt, "temperature": 2.0, "mode": "ar"}
    texts = []
    async with client_over(backend, replace(mars, tokenizer=tokenizer)) as client:
        for seed in range(8):
            (choice,) = (await client.answer(COMPLETIONS, {**body, "seed": seed}))["choices"]
            events = await client.events(COMPLETIONS, {**body, "seed": seed})
            texts.append(choice["text"])
            assert "".join(event["choices"][0]["text"] for event in events) == texts[-1]
            echoed = {**body, "seed": seed, "echo": True}
            whole = (await client.answer(COMPLETIONS, echoed))["choices"][0]["text"]
            assert whole.endswith(f"a{texts[-1]}")
        bias = {str(prompt[1]): 100.0}
        (choice,) = (await client.answer(COMPLETIONS, {**body, "logit_bias": bias}))["choices"]
        assert choice["text"] == " " * 24
    assert any("\ufffd" in text for text in texts)


# Conversations


async def test_a_chat_equals_the_reference_decoder(official, mars, oracle):
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = encode(mars.tokenizer, rendered, add_special_tokens=False)
    expected = oracle(ids, 0.05)
    response = await official.chat.completions.create(
        model="mars",
        messages=MESSAGES,
        max_completion_tokens=24,
        extra_body={"confidence_threshold": 0.05},
    )
    assert response.id.startswith("chatcmpl-")
    assert response.object == "chat.completion"
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == decode(mars.tokenizer, expected.tokens)
    assert choice.finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(ids), 24)
    assert response.mars["forward_passes"] == len(expected.passes)


async def test_a_chat_may_fill_the_models_context_by_default(client):
    body = await client.answer(CHAT, {"model": "mars", "messages": MESSAGES})
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    is_full = body["choices"][0]["finish_reason"] == "length"
    assert usage["total_tokens"] == 256 if is_full else usage["total_tokens"] < 256


# Several choices


@pytest.mark.parametrize("path", BODIES)
async def test_several_choices_share_one_prompt(client, path):
    one = await client.answer(path, BODIES[path])
    several = await client.answer(path, {**BODIES[path], "n": 3, "best_of": 3})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert [{**choice, "index": 0} for choice in several["choices"]] == one["choices"] * 3
    usage = several["usage"]
    assert usage["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert several["mars"] == {**one["mars"], "forward_passes": 3 * one["mars"]["forward_passes"]}


@pytest.mark.parametrize("path", BODIES)
async def test_streams_of_several_choices_interleave(client, path):
    # Answers are so long that none has ended when the last one begins.
    body = {**BODIES[path], "n": 3, "confidence_threshold": 0.05, "max_tokens": 120}
    await client.answer(path, body)  # caches the prompt
    whole = await client.answer(path, body)
    body["stream_options"] = {"include_usage": True}
    *events, last = await client.events(path, body)
    assert last["usage"] == whole["usage"]
    for index in range(3):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        choices = [event["choices"][0] for event in mine]
        text = "".join(text_of(choice) for choice in choices)
        assert text == text_of(whole["choices"][index])
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["mars"]["forward_passes"] == len(mine)
        if path == CHAT:
            assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (
                len(mine) - 1
            )
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order)


async def test_a_choice_that_cannot_be_queued_ends_the_others(
    mars, make_loop, client_over, monkeypatch
):
    loop = make_loop(mars, max_requests=2)
    ended, cancel = list[str](), loop.engine.cancel
    monkeypatch.setattr(loop.engine, "cancel", lambda name: (ended.append(name), cancel(name)))

    async def are_ended() -> bool:
        return len(ended) == num_queued

    num_queued = 0
    for stream in (False, True):
        async with client_over(SingleEngineBackend(loop)) as client:
            body = {**COMPLETION, "n": 3, "max_tokens": 200, "mode": "ar", "stream": stream}
            response = await client.post(COMPLETIONS, json=body)
        # a stream has begun if the first's first token was faster than the refusal of the last
        begun = stream and response.status_code == 200
        assert begun or response.status_code == 503
        assert '"code":"queue_full"' in response.text
        num_queued += 2
        await until(are_ended, "the two that had been queued are ended")
        await until_idle(loop.engine)


# Several prompts


def prompts_of(mars: Checkpoint, kind: str) -> list[Any]:
    """Return several prompts, as text or as token ids."""
    texts = ["What is 3 plus 4?", "What", "It is 7, I think."]
    ids = [encode(mars.tokenizer, text, add_special_tokens=True) for text in texts]
    return {"texts": texts, "ids": ids}[kind]


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1, "seed": 3}, {"echo": True, "logprobs": 2}]
)
@pytest.mark.parametrize("kind", ["texts", "ids"])
async def test_each_of_several_prompts_is_served_as_if_alone(client, mars, kind, fields):
    body = {**COMPLETION, "n": 2, "mode": "ar", "max_tokens": 9, **fields}
    several = prompts_of(mars, kind)
    together = await client.answer(COMPLETIONS, {**body, "prompt": several})
    alone = [await client.answer(COMPLETIONS, {**body, "prompt": prompt}) for prompt in several]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    expected = [choice for each in alone for choice in each["choices"]]
    for index, choice in enumerate(expected):
        found = dict(together["choices"][index])
        values = [each.pop("logprobs") for each in (found, choice)]
        assert found == {**choice, "index": index}
        if values[0] is not None:
            assert values[0]["tokens"] == values[1]["tokens"]
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][field] == sum(each["usage"][field] for each in alone)
    assert together["mars"]["forward_passes"] == 6 * 9


# Echo


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_puts_the_prompt_before_the_output(client, mars, as_ids):
    prompt = "é What is 3 plus 4?"
    ids = encode(mars.tokenizer, prompt, add_special_tokens=True)
    body = {**COMPLETION, "prompt": ids if as_ids else prompt, "mode": "ar"}
    plain = (await client.answer(COMPLETIONS, body))["choices"][0]
    echoed = (await client.answer(COMPLETIONS, {**body, "echo": True}))["choices"][0]
    assert echoed == {**plain, "text": prompt + plain["text"]}
    events = await client.events(COMPLETIONS, {**body, "echo": True})
    assert events[0]["choices"][0]["text"].startswith(prompt)
    assert "".join(event["choices"][0]["text"] for event in events) == echoed["text"]
    assert len(events) == 24


async def test_echo_without_output_tokens_returns_the_prompt(client):
    body = {**COMPLETION, "max_tokens": 0, "echo": True}
    answer = await client.answer(COMPLETIONS, body)
    expected = {"index": 0, "text": PROMPT, "logprobs": None, "finish_reason": "length"}
    expected |= {"stop_reason": None}
    assert answer["choices"] == [expected]
    assert answer["usage"]["completion_tokens"] == 0
    (event,) = await client.events(COMPLETIONS, body)
    assert event["choices"] == [expected]


# Fields around the output


async def test_responses_of_a_model_share_only_its_fingerprint(client):
    first, second = [await client.answer(COMPLETIONS, COMPLETION) for _ in range(2)]
    assert first["id"] != second["id"]
    assert first["system_fingerprint"] == second["system_fingerprint"]
    other = await client.answer(COMPLETIONS, {**COMPLETION, "model": "plain"})
    assert other["system_fingerprint"] != first["system_fingerprint"]
    assert "service_tier" not in first


async def test_cached_tokens_are_counted(client):
    body = {**COMPLETION, "prompt": "Nobody has asked this before, I think: what is 1 plus 2?"}
    first, second = [(await client.answer(COMPLETIONS, body))["usage"] for _ in range(2)]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["prompt_tokens"]
    several = (await client.answer(COMPLETIONS, {**body, "n": 2}))["usage"]
    assert several["prompt_tokens_details"]["cached_tokens"] == cached
