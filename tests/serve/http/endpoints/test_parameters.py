from __future__ import annotations

import json
import re

import pytest

from decoding.grammar_specs import ambiguous
from rest.rest_requests import BODIES, COMPLETION, COMPLETIONS, text_of

SAMPLED = {"temperature": 1, "seed": 11}


@pytest.mark.parametrize("path", BODIES)
async def test_a_seed_repeats_the_output(client, path):
    body = {**BODIES[path], **SAMPLED}
    first, again = await client.answer(path, body), await client.answer(path, body)
    other = await client.answer(path, {**body, "seed": 12})
    greedy = await client.answer(path, BODIES[path])
    assert first["choices"] == again["choices"]
    texts = {text_of(each["choices"][0]) for each in (first, other, greedy)}
    assert len(texts) == 3
    events = await client.events(path, body)
    streamed = "".join(text_of(event["choices"][0]) for event in events)
    assert streamed == text_of(first["choices"][0])


async def test_choices_have_consecutive_seeds(client):
    body = {**COMPLETION, **SAMPLED}
    several = await client.answer(COMPLETIONS, {**body, "n": 3})
    texts = [choice["text"] for choice in several["choices"]]
    alone = [
        (await client.answer(COMPLETIONS, {**body, "seed": 11 + index}))["choices"][0]["text"]
        for index in range(3)
    ]
    assert texts == alone
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"guided_json": {"enum": [1, "x", None]}}, '1|"x"|null'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
            "5",
        ),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_the_output_matches_its_grammar(client, path, fields, pattern):
    body = {**BODIES[path], **fields, **SAMPLED}
    choice = (await client.answer(path, body))["choices"][0]
    assert re.fullmatch(pattern, text_of(choice).strip())
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "("),
        ("guided_grammar", "start: nothing"),
        ("guided_json", '{"type": '),
        ("guided_json", {"type": "thing"}),
        ("structured_outputs", {"regex": "("}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}},
        ),
    ],
)
async def test_a_grammar_that_does_not_compile_is_refused_by_field(client, field, value, stream):
    response = await client.post(COMPLETIONS, json={**COMPLETION, field: value, "stream": stream})
    assert client.error_of(response, 400, field).startswith(f"{field}: ")


async def test_a_grammar_that_fails_in_use_is_refused_by_field(client):
    """It has too many readings behind its second token, when a stream has begun already."""
    body = {**COMPLETION, "guided_grammar": ambiguous("D D x", 900).text, "mode": "ar"}
    for _ in range(4):
        message = await client.refusal(COMPLETIONS, body, 400, "guided_grammar")
        assert message.startswith("guided_grammar: it failed while the output was written")
    response = await client.post(COMPLETIONS, json={**body, "stream": True})
    *_, last, nothing = response.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["param"], error["message"], nothing) == ("guided_grammar", message, "")
    assert (await client.answer(COMPLETIONS, COMPLETION))["choices"]
