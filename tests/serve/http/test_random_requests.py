"""Random requests, cut at random into passes of one token up to a whole block: a stream says what a
whole response says, and both say in mode exact what one token a pass says.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from decoding.local_engine_client import LocalEngineClient
from mars_platform.method.mode import Mode
from mars_serve.engine.settings import EngineSettings
from rest.random_requests import (
    BLOCK_SIZE,
    FAMILIES,
    ForeseeingEngine,
    draw_request,
    make_checkpoint,
)
from rest.rest_server import Client, SingleEngineBackend, app_of, client_of, served

_AT_ONCE = 6
_SETTINGS = EngineSettings(
    page_size=8,
    num_pages=72,  # some requests are preempted
    max_num_seqs=8,
    max_num_batched_tokens=512,
)
_NUM_REQUESTS, _NUM_MORE = 40, 1500
"""Requests of each tokenizer, without and with ``--full``."""


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngineClient]:
    checkpoint, model = make_checkpoint(request.param)
    loop = LocalEngineClient(ForeseeingEngine(checkpoint, _SETTINGS, model=model))
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Counts of what the requests have met."""
    return Counter()


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(_NUM_REQUESTS), id="some"),
        pytest.param(range(_NUM_REQUESTS, _NUM_MORE), id="many", marks=pytest.mark.full),
    ],
)
async def test_an_answer_does_not_depend_on_how_it_is_cut_into_passes(
    engine: LocalEngineClient, seen: Counter[str], seeds: range
) -> None:
    backend = SingleEngineBackend(engine)
    checkpoint, gate = engine.engine.checkpoint, asyncio.Semaphore(_AT_ONCE)
    seen.clear()
    async with client_of(app_of(served("mars", checkpoint, backend))) as client:

        async def check(seed: int) -> str | None:
            request = draw_request(random.Random(seed), checkpoint.tokenizer)
            case = f"seed {seed}: {json.dumps(request)}"
            async with gate:
                try:
                    found = await _differences(client, request, seed, seen)
                except Exception as error:
                    error.add_note(case)
                    raise
            return found and f"{case}\n{found}"

        found = [each for each in await asyncio.gather(*map(check, seeds)) if each]
    assert not found, f"{len(found)} differ:\n\n" + "\n\n".join(found)
    assert min(seen[name] for name in _MET) >= len(seeds) // 40, seen
    assert seen["error"] < len(seeds) // 5  # requests that allow no token any more, mostly
    lengths = engine.engine.lengths
    for mode in (Mode.EXACT, Mode.THRESHOLD):
        counts = [lengths[mode, count] for count in range(1, BLOCK_SIZE + 2)]
        assert min(counts) >= len(seeds) // 5, (mode, counts)


_MET = ["calls", "reasoning", "stop", "length", "tool_calls", "\ufffd", "\U0001f642"]
"""Traits that some of the answers have."""


async def _differences(
    client: Client, request: dict[str, Any], seed: int, seen: Counter[str]
) -> str | None:
    """Run a request in all ways, and return what differs."""
    body, runs = {**request}, dict[str, Any]()
    path = body.pop("path")
    exact = {**body, "mode": "exact"}
    runs["ar, streamed"] = await _streamed(client, path, {**body, "mode": "ar"}, f"{seed}/")
    _count(seen, runs["ar, streamed"])
    runs["exact, streamed"] = await _streamed(client, path, exact, f"{seed}/a")
    runs["exact, whole"] = await _whole(client, path, exact, f"{seed}/b")
    body["mode"] = "threshold"
    runs["threshold, streamed"] = await _streamed(client, path, body, f"{seed}/c")
    runs["threshold, whole"] = await _whole(client, path, body, f"{seed}/d")
    pairs = {
        ("threshold, streamed", "threshold, whole"): (),
        ("ar, streamed", "exact, streamed"): ("mars",),
        ("ar, streamed", "exact, whole"): ("mars",),
    }
    for (one, other), differing in pairs.items():
        if not _are_equal(*(_without(runs[name], *differing) for name in (one, other))):
            return f"{one}: {runs[one]}\n{other}: {runs[other]}"
    failed = [run for run in runs.values() if isinstance(run, str) and run.startswith("server")]
    return failed[0] if failed else None


def _count(seen: Counter[str], answer: Any) -> None:
    seen["error"] += isinstance(answer, str)
    for choice in [] if isinstance(answer, str) else answer["choices"]:
        seen[choice["finish_reason"]] += 1
        for name in ("calls", "reasoning"):
            seen[name] += bool(choice[name])
        for text in ("\ufffd", "\U0001f642"):
            seen[text] += text in choice["text"]


def _without(answer: Any, *names: str) -> Any:
    if isinstance(answer, str):
        return answer
    return {name: value for name, value in answer.items() if name not in names}


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two answers are equal, up to rounding errors of their numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)


async def _whole(client: Client, path: str, body: dict[str, Any], salt: str) -> Any:
    """Return an answer: its choices and counts, or the message of an error."""
    given = {name: value for name, value in body.items() if name != "stream_options"}
    response = await client.post(path, json={**given, "cache_salt": salt})
    answer = response.json()
    if response.status_code != 200:
        return _message(answer)
    return {
        "choices": [_choice(each, each.get("message", each)) for each in answer["choices"]],
        "mars": answer["mars"] if len(answer["choices"]) == 1 else None,
        **_counts(answer["usage"]),
    }


async def _streamed(client: Client, path: str, body: dict[str, Any], salt: str) -> Any:
    """Return what the events of a stream make together, in the same form."""
    response = await client.post(path, json={**body, "cache_salt": salt, "stream": True})
    if response.status_code != 200:
        return _message(response.json())
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
    last = events.pop()
    if last != "[DONE]":
        return _message(json.loads(last))
    *parts, end = map(json.loads, events)
    pieces: dict[int, list[dict[str, Any]]] = {}
    for part in parts:
        [piece] = part["choices"]
        assert part["mars"]["tokens"] >= len(piece.get("token_ids", []))
        pieces.setdefault(piece["index"], []).append(piece)
    assert sum(part["mars"]["tokens"] for part in parts) == end["usage"]["completion_tokens"]
    joined = [_joined(pieces[index]) for index in range(len(pieces))]
    mars = _without(parts[-1]["mars"], "tokens") if len(pieces) == 1 else None
    return {"choices": joined, "mars": mars, **_counts(end["usage"])}


def _message(answer: dict[str, Any]) -> str:
    return f"{answer['error']['type']}: {answer['error']['message']}"


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the choice that the pieces of a stream make."""
    assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    calls: dict[int, dict[str, Any]] = {}
    message: dict[str, Any] = {"text": "", "reasoning_content": ""}
    for piece in pieces:
        delta = piece.get("delta", piece)
        message["text"] += delta.get("content", delta.get("text")) or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            known = calls.setdefault(call["index"], {"function": {"arguments": ""}})["function"]
            known["name"] = call["function"].get("name", known.get("name"))
            known["arguments"] += call["function"]["arguments"]
    whole: dict[str, Any] = {"finish_reason": pieces[-1]["finish_reason"], "logprobs": None}
    if pieces[0]["logprobs"] is not None:
        whole["logprobs"] = logprobs = dict[str, Any]()
        for name, value in ((n, v) for piece in pieces for n, v in piece["logprobs"].items()):
            logprobs[name] = value if value is None else [*logprobs.get(name, []), *value]
    if "token_ids" in pieces[0]:
        whole["token_ids"] = [token for piece in pieces for token in piece["token_ids"]]
    return _choice(whole, {**message, "tool_calls": list(calls.values())})


def _choice(choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Return what one choice says, without what is drawn anew for each response."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "text": message.get("content", message.get("text")) or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(function["name"], function["arguments"]) for function in functions],
        "finish_reason": choice["finish_reason"],
        "logprobs": choice["logprobs"],
        "token_ids": choice.get("token_ids"),
    }
