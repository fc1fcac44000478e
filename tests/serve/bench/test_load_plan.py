from __future__ import annotations

import json
from pathlib import Path

import pytest

from mars_autoscale.traces.files import TraceRequest
from mars_platform.errors import UserError
from mars_serve.bench.load.plan import (
    LoadPlan,
    Question,
    made_up_requests,
    question_requests,
    read_questions,
)
from mars_serve.bench.load.target import checked_url, open_client
from rest.sent_requests import planned

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (10, 20, (10, 20, False)),
        (80, 20, (80, 20, False)),
        (90, 20, (80, 20, True)),  # the output is short, and the prompt is cut
        (20, 500, (20, 80, True)),
        (500, 500, (50, 50, True)),
        (500, 1, (99, 1, True)),
        (0, 5, (1, 5, False)),
    ],
)
def test_lengths_are_cut_to_what_the_model_takes(
    prompt: int, output: int, expected: tuple[int, int, bool]
) -> None:
    (request,) = made_up_requests([TraceRequest(6.0, prompt, output)], 3.0, 100)
    assert (request.prompt_tokens, request.max_tokens, request.is_capped) == expected
    assert request.at_s == 2.0


def test_made_up_prompts_consist_of_the_vocabulary() -> None:
    plan = LoadPlan("m", [planned(0), planned(1)], [5, 6, 7, 8], seed=3)
    bodies = [json.loads(plan.content(request)[1]) for request in plan.requests]
    assert [len(body["prompt"]) for body in bodies] == [3, 3]
    assert {token for body in bodies for token in body["prompt"]} <= {5, 6, 7, 8}
    assert bodies[0]["prompt"] != bodies[1]["prompt"]
    assert {(body["max_tokens"], body["min_tokens"]) for body in bodies} == {(4, 4)}
    assert bodies[0]["service_tier"] == "default"


def test_questions_are_asked_in_turn() -> None:
    trace = [TraceRequest(float(index), 1, 50) for index in range(3)]
    first, second = (Question(name, {"messages": QUESTION}, None) for name in "ab")
    requests = question_requests(trace, 1.0, 60, [(first, 20), (second, 5)], None)
    assert [request.question for request in requests] == [first, second, first]
    assert [(r.max_tokens, r.is_capped) for r in requests] == [(40, True), (50, False), (40, True)]
    with pytest.raises(UserError, match="b: messages: the prompt has 60 tokens"):
        question_requests(trace, 1.0, 60, [(first, 20), (second, 60)], None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ":2: not valid JSON"),
        (json.dumps({"messages": QUESTION}), ":2: messages: the last turn"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    good = {"messages": [*QUESTION, {"role": "assistant", "content": "x"}], "answer": 3}
    path.write_text(json.dumps(good) + "\n" + row + "\n")
    assert [question.answer for question in read_questions(path, 1, "--data")] == ["3"]
    with pytest.raises(UserError, match=message):
        read_questions(path, 5, "--data")


@pytest.mark.parametrize(
    "url", ["http://localhost:8000", "http://[::1]:8000/v1", "https://127.1.2.3"]
)
def test_addresses_of_this_machine_are_accepted(url: str) -> None:
    assert checked_url(url, allow_remote=False) == url.removesuffix("/v1")


@pytest.mark.parametrize(
    "url", ["http://example.com", "https://10.0.0.1:8000", "http://127.0.0.1.x"]
)
def test_other_machines_need_an_option(url: str) -> None:
    with pytest.raises(UserError, match="--allow-remote"):
        checked_url(url, allow_remote=False)
    assert checked_url(url, allow_remote=True) == url


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://a:b"])
def test_other_schemes_and_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="--url"):
        checked_url(url, allow_remote=True)


async def test_the_client_sends_the_key_without_redirect_or_proxy() -> None:
    async with open_client("http://127.0.0.1:8000", "secret") as client:
        assert client.headers["authorization"] == "Bearer secret"
        assert not client.follow_redirects
        assert not client.trust_env
