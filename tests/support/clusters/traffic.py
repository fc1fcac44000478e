"""Clients that send requests without pause, each on one connection that it keeps."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mars_platform.method.mode import Mode
from mars_serve.cli.completion import generate_once
from mars_serve.cli.options import GenerateOptions
from rest.rest_requests import CHAT, text_of

NUM_CLIENTS = 8
_THINK_S, _IDLE_S = 0.2, (3.0, 7.0)
"""Seconds between two requests of a client, and of the clients with long idle connections."""
_WAIT_S = 240


class _Failed(Exception):
    """A request did not get a whole answer."""


@dataclass(frozen=True)
class Ask:
    """A greedy request in mode ar, whose answer depends on the model alone."""

    path: str
    prompt: str
    num_tokens: int
    min_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        message = {"role": "user", "content": self.prompt}
        prompt = {"messages": [message]} if self.path == CHAT else {"prompt": self.prompt}
        sizes = {"max_tokens": self.num_tokens, "min_tokens": self.min_tokens}
        return {"model": "mine", "mode": "ar", "temperature": 0, **sizes, **prompt}

    def of(self, model: Path) -> str:
        """Return the answer of a model that runs nothing else."""
        options = GenerateOptions(
            model=str(model),
            prompt=self.prompt,
            mode=Mode.AR,
            max_tokens=self.num_tokens,
            raw=self.path != CHAT,
        )
        return "".join(generate_once(options).passes)


@dataclass(frozen=True)
class Answer:
    """Answer to a request, or its failure."""

    ask: Ask
    begun_s: float
    """Value of ``time.monotonic`` when the request was sent."""
    ended_s: float
    text: str
    failure: str | None = None


class Traffic:
    """Clients with their requests, and the answers so far."""

    def __init__(
        self,
        address: str,
        headers: dict[str, str],
        asks: Sequence[Ask],
        streams: Sequence[Ask] = (),
    ) -> None:
        """Prepare the clients.

        Args:
            address: URL of the service.
            headers: Headers of every request.
            asks: Requests that all clients send in turn, streamed and unstreamed.
            streams: Requests that one client each streams again and again, without pause.
        """
        self.answers = list[Answer]()
        self.statuses = Counter[tuple[str, int]]()
        """Numbers of answers by path and status, for paths that describe the service."""
        self._address, self._headers = address, headers
        self._asks, self._streams = asks, streams
        self._is_over = threading.Event()

    def end(self) -> None:
        """Let each client end after its current answer."""
        self._is_over.set()

    async def run(self) -> None:
        turns = list(itertools.product((False, True), self._asks))
        clients = [self._ask(turns[k:] + turns[:k], _THINK_S) for k in range(NUM_CLIENTS)]
        clients += [self._ask(turns, pause_s) for pause_s in _IDLE_S]
        clients += [self._ask([(True, ask)], 0) for ask in self._streams]
        await asyncio.gather(*clients, self._look("/ready"), self._look("/v1/models"))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._address,
            headers=self._headers,
            timeout=_WAIT_S,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
        )

    async def _ask(self, turns: list[tuple[bool, Ask]], pause_s: float) -> None:
        async with self._client() as client:
            for is_stream, ask in itertools.cycle(turns):
                if self._is_over.is_set():
                    return
                self.answers.append(await _answer(client, ask, is_stream=is_stream))
                await self._rest(pause_s)

    async def _rest(self, pause_s: float) -> None:
        end_s = time.monotonic() + pause_s
        while time.monotonic() < end_s and not self._is_over.is_set():
            await asyncio.sleep(min(pause_s, 0.5))

    async def _look(self, path: str) -> None:
        async with self._client() as client:
            while not self._is_over.is_set():
                self.statuses[path, (await client.get(path)).status_code] += 1
                await asyncio.sleep(_THINK_S)


@contextmanager
def running(traffic: Traffic) -> Iterator[None]:
    """Let the clients run for the length of the block."""
    with ThreadPoolExecutor(1) as executor:
        done = executor.submit(asyncio.run, traffic.run())
        try:
            yield
        finally:
            traffic.end()
        done.result()


async def _answer(client: httpx.AsyncClient, ask: Ask, *, is_stream: bool) -> Answer:
    begun_s = time.monotonic()
    try:
        text = await (_streamed if is_stream else _whole)(client, ask)
    except (httpx.HTTPError, _Failed) as error:
        return Answer(ask, begun_s, time.monotonic(), "", repr(error))
    return Answer(ask, begun_s, time.monotonic(), text)


async def _whole(client: httpx.AsyncClient, ask: Ask) -> str:
    response = await client.post(ask.path, json=ask.body)
    if response.status_code != httpx.codes.OK:
        raise _Failed(f"{response.status_code}: {response.text}")
    return str(text_of(response.json()["choices"][0]))


async def _streamed(client: httpx.AsyncClient, ask: Ask) -> str:
    text, is_done = "", False
    async with client.stream("POST", ask.path, json={**ask.body, "stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            raise _Failed(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            is_done = is_done or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _Failed(line)
                text += text_of(event["choices"][0]) or ""
    if not is_done:
        raise _Failed(f"the stream ends without [DONE], after {text!r}")
    return text
