"""Asks a running server the held-out questions in several modes and compares the answers."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

from mars_platform.cli.progress import ProgressDisplay
from mars_platform.data.answers import is_correct
from mars_platform.method.mode import Mode

_CONCURRENCY = 16
_ROUNDS = 3
_MAX_TOKENS = 64
_WARM_UP_ITEMS = 32


@dataclass(frozen=True)
class Item:
    """A held-out question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Setting:
    """One way of asking: a model, a mode and a threshold."""

    model: str
    mode: Mode
    threshold: float


@dataclass
class Row:
    """What one setting gave; lists run over the items, or over the rounds."""

    setting: Setting
    correct: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0
    round_tokens_per_s: list[float] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of the items answered correctly."""
        return sum(self.correct) / len(self.correct)

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens a forward pass, over all items."""
        return self.num_tokens / self.num_passes

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second with all clients together; median of the rounds."""
        return statistics.median(self.round_tokens_per_s)


def read_items(path: Path, count: int) -> list[Item]:
    """The first ``count`` items of an evaluation file."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [Item(row["messages"][0]["content"], row["answer"]) for row in rows]


def measure(
    base_url: str, settings: list[Setting], items: list[Item], display: ProgressDisplay
) -> list[Row]:
    """Ask every item in every setting.

    The items are split into rounds, and the settings alternate within each round, so that a
    machine whose speed drifts slows all of them alike.
    """
    return asyncio.run(_measure(base_url, settings, items, display))


async def _measure(
    base_url: str, settings: list[Setting], items: list[Item], display: ProgressDisplay
) -> list[Row]:
    rows = [Row(setting) for setting in settings]
    total, done = len(rows) * len(items), 0
    size = -(-len(items) // _ROUNDS)
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for setting in settings:
            await _ask_all(client, Row(setting), items[:_WARM_UP_ITEMS])
        for start in range(0, len(items), size):
            for row in rows:
                part = items[start : start + size]
                await _ask_all(client, row, part)
                done += len(part)
                display.update("asking over REST", done, total, _describe(row.setting))
    return rows


def _describe(setting: Setting) -> str:
    return f"{setting.model} {setting.mode} {setting.threshold:g}"


async def _ask_all(client: AsyncOpenAI, row: Row, items: list[Item]) -> None:
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def ask(item: Item) -> Any:
        async with limit:
            return await client.chat.completions.create(
                model=row.setting.model,
                messages=[{"role": "user", "content": item.question}],
                max_tokens=_MAX_TOKENS,
                extra_body={
                    "mode": row.setting.mode,
                    "confidence_threshold": row.setting.threshold,
                },
            )

    started = time.monotonic()
    responses = await asyncio.gather(*(ask(item) for item in items))
    seconds = time.monotonic() - started
    num_tokens = sum(response.usage.completion_tokens for response in responses)
    row.round_tokens_per_s.append(num_tokens / seconds)
    row.num_tokens += num_tokens
    row.num_passes += sum(response.model_extra["mars"]["forward_passes"] for response in responses)
    row.correct += [
        is_correct(response.choices[0].message.content, item.answer)
        for item, response in zip(items, responses, strict=True)
    ]


def stream_passes(base_url: str, setting: Setting, item: Item) -> list[str]:
    """Text of each forward pass of one streamed answer."""
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=setting.model,
            messages=[{"role": "user", "content": item.question}],
            max_tokens=_MAX_TOKENS,
            stream=True,
            extra_body={"mode": setting.mode, "confidence_threshold": setting.threshold},
        )
        return [chunk.choices[0].delta.content or "" for chunk in chunks]
