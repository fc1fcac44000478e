"""The one rule by which the server sends its own requests again."""

from __future__ import annotations

import httpx
import pytest

from mars_serve.http import in_process
from mars_serve.http.in_process import post_until_served

FULL = {"error": {"code": "storage_full"}}


@pytest.mark.parametrize(
    ("statuses", "content", "within_s", "expected"),
    [
        ([429, 503, 200], None, 60, 200),
        ([503, 500, 200], None, 60, 500),
        ([429, 200], FULL, 60, 429),
        ([503, 200], None, 0, 503),
    ],
)
async def test_a_request_is_sent_again_while_there_is_no_room(
    monkeypatch, statuses, content, within_s, expected
):
    monkeypatch.setattr(in_process, "_RETRY_S", (0.001, 0.002))
    answers = [
        httpx.Response(each, json=content, headers={"retry-after": "9"}) for each in statuses
    ]

    async def post() -> httpx.Response:
        return answers.pop(0)

    assert (await post_until_served(post, within_s)).status_code == expected
    assert len(answers) == len(statuses) - statuses.index(expected) - 1
