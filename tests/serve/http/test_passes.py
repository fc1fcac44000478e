"""Tests the report of each forward pass in streams, which `return_passes` asks for."""

from __future__ import annotations

import pytest

from rest.rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS

_TAU = 0.1  # low for a trained model; this one is random, and some proposals reach it


async def passes_of(client, path, **fields):
    body = {**BODIES[path], "return_passes": True, "return_token_ids": True, **fields}
    events = await client.events(path, body)
    return [(event["mars"], event["choices"][0]["token_ids"]) for event in events]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_pass_tells_its_tokens_and_what_it_rejected(client, path):
    passes = await passes_of(client, path, confidence_threshold=_TAU)
    for mars, ids in passes:
        told = mars["pass"]
        assert [each["id"] for each in told["accepted"]] == ids
        assert (len(ids), told["confidence_threshold"]) == (mars["tokens"], pytest.approx(_TAU))
        assert all(each["confidence"] >= _TAU for each in told["accepted"][1:])
        if told["rejected"]:
            assert told["rejected"][0]["confidence"] < _TAU
    assert {len(ids) > 1 for _, ids in passes} == {True, False}
    assert any(mars["pass"]["rejected"] for mars, _ in passes)
    assert passes[-1][0]["pass"]["rejected"] == [], "nothing was proposed behind the end"


async def test_drafts_of_mode_exact_that_were_wrong_are_rejected(client):
    passes = await passes_of(client, COMPLETIONS, mode="exact")
    wrong = [
        (mars["pass"]["rejected"][0]["id"], ids[-1])
        for mars, ids in passes
        if mars["pass"]["rejected"]
    ]
    assert wrong
    assert all(draft != verified for draft, verified in wrong)
    assert all(mars["pass"]["confidence_threshold"] == 1 for mars, _ in passes)


async def test_a_stream_tells_it_only_if_asked(client):
    events = await client.events(COMPLETIONS, {**COMPLETION, "confidence_threshold": _TAU})
    assert all("pass" not in event["mars"] for event in events)


async def test_behind_a_stop_string_nothing_is_told(client):
    fields = {"confidence_threshold": _TAU, "max_tokens": 12}
    told = await client.events(COMPLETIONS, {**COMPLETION, **fields})
    text = "".join(event["choices"][0]["text"] for event in told)
    *_, (mars, ids) = await passes_of(client, COMPLETIONS, **fields, stop=text[3:6])
    assert [each["id"] for each in mars["pass"]["accepted"]] == ids
    assert mars["pass"]["rejected"] == []
