from __future__ import annotations

from typing import Any

import pytest

from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.api.text import OutputText, StopRules, decode, encode
from rest.rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS, PROMPT, text_of
from rest.rest_server import until_idle


def tokens_of(oracle: Any, checkpoint: Checkpoint, path: str, threshold: float) -> list[int]:
    text = PROMPT
    if path == CHAT:
        text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    prompt = encode(checkpoint.tokenizer, text, add_special_tokens=path == COMPLETIONS)
    return oracle(prompt, threshold).tokens


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("threshold", [0.05, 1.0])
@pytest.mark.parametrize("path", BODIES)
async def test_an_output_ends_at_a_stop_string(
    client, loops, mars, oracle, path, threshold, include
):
    tokens = tokens_of(oracle, mars, path, threshold)
    text = decode(mars.tokenizer, tokens)
    middle = len(text) // 2
    stop = text[middle : middle + 3]  # spans several tokens, as most tokens are one character
    rules = StopRules((stop,), in_output=include)
    expected = OutputText(mars.tokenizer, rules).push(tokens, last=True)
    assert expected.is_stopped
    assert expected.num_tokens < 24
    body = {**BODIES[path], "confidence_threshold": threshold, "stop": [stop, "not there"]}
    body["include_stop_str_in_output"] = include
    whole = await client.answer(path, body)
    (choice,) = whole["choices"]
    assert (text_of(choice), choice["finish_reason"]) == (expected.text, "stop")
    assert choice["stop_reason"] == stop
    assert whole["usage"]["completion_tokens"] == expected.num_tokens
    events = await client.events(path, body)
    choices = [event["choices"][0] for event in events]
    assert "".join(text_of(each) for each in choices) == expected.text
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["stop_reason"] == stop
    assert sum(event["mars"]["tokens"] for event in events) == expected.num_tokens
    assert events[-1]["mars"]["forward_passes"] == whole["mars"]["forward_passes"] == len(events)
    await until_idle(loops["mars"].engine)


async def test_a_stop_string_cancels_the_engines_request(loops, client, monkeypatch):
    engine = loops["mars"].engine
    ended, cancel = list[str](), engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda name: (ended.append(name), cancel(name)))
    plain = await client.answer(COMPLETIONS, {**COMPLETION, "mode": "ar"})
    stop = plain["choices"][0]["text"][:2]
    for stream in (False, True):
        body = {**COMPLETION, "mode": "ar", "max_tokens": 200, "stop": stop, "stream": stream}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        await until_idle(engine)
    assert len(ended) == 2


async def test_an_output_ends_at_a_stop_token(client, mars, oracle):
    tokens = tokens_of(oracle, mars, COMPLETIONS, 0.05)
    index = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    for include, kept in ((False, tokens[:index]), (True, tokens[: index + 1])):
        body = {**COMPLETION, "confidence_threshold": 0.05, "stop_token_ids": [tokens[index]]}
        body["include_stop_str_in_output"] = include
        whole = await client.answer(COMPLETIONS, body)
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["choices"][0]["stop_reason"] == tokens[index]
        assert whole["choices"][0]["text"] == decode(mars.tokenizer, kept)
        assert whole["usage"]["completion_tokens"] == index + 1
