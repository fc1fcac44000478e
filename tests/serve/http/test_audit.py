"""Requests and keys opt out of audits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.config.key_file import hash_key
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from rest.rest_requests import BODIES
from rest.rest_server import LoopBackend, app_of, client_of, served


class Recording(LoopBackend):  # type: ignore[misc]
    """A backend that keeps the requests that it runs."""

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self.requests = list[Request]()

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        self.requests.append(request)
        async for output in super().stream(request):
            yield output

    async def complete(self, request: Request) -> list[StepOutput]:
        self.requests.append(request)
        return [output async for output in super().stream(request)]


@pytest.fixture
def backend(loops: dict[str, Any]) -> Recording:
    return Recording(loops["mars"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "may_be_audited"),
    [({}, True), ({"audit": None}, True), ({"audit": True}, True), ({"audit": False}, False)],
)
async def test_a_request_may_opt_out(
    mars: Checkpoint, backend: Recording, path: str, fields: dict[str, Any], may_be_audited: bool
) -> None:
    async with client_of(app_of(served("mars", mars, backend))) as client:
        for stream in (False, True):
            body = {**BODIES[path], "max_tokens": 4, "stream": stream, **fields}
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
    assert [each.may_be_audited for each in backend.requests] == [may_be_audited] * 2


@pytest.mark.parametrize("allows", [True, False])
async def test_a_key_may_opt_out_and_its_requests_not_back_in(
    mars: Checkpoint, backend: Recording, allows: bool
) -> None:
    entry = {"name": "one", "sha256": hash_key(b"secret"), "audit": allows}
    app = app_of(served("mars", mars, backend), keys={"entries": [entry]})
    async with client_of(app) as client:
        client.headers["Authorization"] = "Bearer secret"
        for fields in ({}, {"audit": True}):
            path, body = next(iter(BODIES.items()))
            response = await client.post(path, json={**body, "max_tokens": 4, **fields})
            assert response.status_code == 200, response.text
    assert [each.may_be_audited for each in backend.requests] == [allows] * 2
