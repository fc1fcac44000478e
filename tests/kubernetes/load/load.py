"""Sends streamed chats until a file appears, and prints a line of JSON for each.

load.py HOST USERS TOKENS STOP_FILE
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path

import httpx

PAUSE_S = 0.2
RETRY_S = (0.5, 1.0)
"""Waits before a refused connection is tried again, as OpenAI's clients do."""


async def chat(client: httpx.AsyncClient, url: str, tokens: int) -> str:
    """Return what went wrong, or an empty text."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Count a box of 12 apples"}],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "stream": True,
    }
    last = ""
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                return f"status {answer.status_code}: {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                last = line or last
    except httpx.TransportError as error:
        return f"{type(error).__name__} after {last[:40]!r}"
    return "" if last == "data: [DONE]" else f"ended after {last[:200]}"


async def user(client: httpx.AsyncClient, url: str, tokens: int, stop: Path) -> None:
    while not stop.exists():
        start = time.time()
        wrong, refused = await chat(client, url, tokens), 0
        while wrong.startswith("ConnectError") and refused < len(RETRY_S):
            await asyncio.sleep(RETRY_S[refused])
            wrong, refused = await chat(client, url, tokens), refused + 1
        ended = {"start": start, "end": time.time(), "wrong": wrong, "refused": refused}
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(PAUSE_S)


def address(host: str) -> str:
    """Return the service's address, which stays: a lost packet of DNS would cost 5 s each time."""
    while True:
        try:
            return socket.gethostbyname(host)
        except socket.gaierror:
            time.sleep(PAUSE_S)


async def main(host: str, users: int, tokens: int, stop: Path) -> None:
    url = f"http://{address(host)}:8000"
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {os.environ['KEY']}"},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        timeout=httpx.Timeout(60, connect=5),
    ) as client:
        await asyncio.gather(*(user(client, url, tokens, stop) for _ in range(users)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
