"""Measures how long a new live threshold takes to reach every replica while streams run.

    python bench/live_threshold.py http://127.0.0.1:8000 MODEL --streams 32 --changes 50

A change takes from sending ``PUT /admin/threshold`` until an answer shows that the last replica
decodes with the new value. The answer itself needs a round trip to governor and replicas.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Annotated, Any

import httpx
import typer

_PAUSE_S = 0.1


async def _stream(client: httpx.AsyncClient, model: str, index: int) -> None:
    body = {"model": model, "prompt": f"{index} is", "max_tokens": 128, "min_tokens": 128}
    while True:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as events:
            events.raise_for_status()
            async for _ in events.aiter_lines():
                pass


async def _change(client: httpx.AsyncClient, model: str, threshold: float) -> float:
    start = time.perf_counter()
    body = {"model": model, "confidence_threshold": threshold}
    state = await _state(client.put("/admin/threshold", json=body), model)
    wanted = state["version"]
    while any(each["version"] < wanted for each in state["replicas"].values()):
        state = await _state(client.get("/admin/threshold"), model)
    return time.perf_counter() - start


async def _state(call: Any, model: str) -> dict[str, Any]:
    response = await call
    response.raise_for_status()
    state: dict[str, Any] = response.json()["models"][model]
    return state


async def _measure(address: str, model: str, streams: int, changes: int) -> list[float]:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=address, headers=headers, timeout=60, limits=limits
    ) as client:
        running = [asyncio.create_task(_stream(client, model, index)) for index in range(streams)]
        times = []
        for index in range(changes):
            await asyncio.sleep(_PAUSE_S)
            times.append(await _change(client, model, 0.95 - 0.05 * (index % 2)))
        assert not any(task.done() for task in running), "a stream failed"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return times


def main(
    address: Annotated[str, typer.Argument(help="URL of the server, without /v1.")],
    model: Annotated[str, typer.Argument(help="Name of the served model.")],
    streams: Annotated[int, typer.Option(min=0, help="Streams that run meanwhile.")] = 32,
    changes: Annotated[int, typer.Option(min=2, help="Changes of the threshold.")] = 50,
) -> None:
    """Print the median, the 95th percentile and the longest time of a change."""
    times = asyncio.run(_measure(address, model, streams, changes))
    worst = statistics.quantiles(times, n=20)[-1]
    print(
        f"{changes} changes during {streams} streams: median {1e3 * statistics.median(times):.1f} "
        f"ms, 95% {1e3 * worst:.1f} ms, longest {1e3 * max(times):.1f} ms"
    )


if __name__ == "__main__":
    typer.run(main)
