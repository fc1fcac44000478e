"""Asks a running server held-out questions in several modes and scores the answers."""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

from mars_platform.cli.progress import ProgressDisplay
from mars_platform.data.conversations import is_correct
from mars_platform.method.mode import Mode

ONE_USER, MANY_USERS = 1, 16
"""Numbers of users that ask at once. A user asks the next question when one is answered."""
_MOST_ITEMS_OF_ONE_USER = 18
_ROUNDS = 3
_MAX_TOKENS = 160
_WARM_UP_ITEMS = 16


@dataclass(frozen=True)
class Item:
    """A held-out question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class DemoSetting:
    """One way to ask the server: a model, a mode and a threshold."""

    model: str
    mode: Mode
    threshold: float

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.threshold:g}"

    @property
    def extra_body(self) -> dict[str, Any]:
        """Fields of a request that the client library does not know."""
        return {"mode": self.mode, "confidence_threshold": self.threshold}


@dataclass
class DemoResult:
    """The answers given in one setting."""

    setting: DemoSetting
    correct: list[bool] = field(default_factory=list)
    """Whether the answer is right, for each item that many users asked."""
    num_tokens: int = 0
    num_passes: int = 0
    round_tokens_per_s: dict[int, list[float]] = field(default_factory=dict)
    """Output tokens a second of all users together, for each round, by the number of users."""

    @property
    def accuracy(self) -> float:
        """Share of the items that were answered correctly."""
        return sum(self.correct) / len(self.correct)

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of output tokens of a forward pass."""
        return self.num_tokens / self.num_passes

    def tokens_per_s(self, num_users: int) -> float:
        """Return the output tokens a second of all users together, the median of the rounds."""
        return statistics.median(self.round_tokens_per_s[num_users])


def read_items(path: Path, count: int) -> list[Item]:
    """Read the first ``count`` items of an evaluation file."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [Item(row["messages"][0]["content"], row["answer"]) for row in rows]


async def measure(
    base_url: str, settings: list[DemoSetting], items: list[Item], display: ProgressDisplay
) -> list[DemoResult]:
    """Ask in every setting: `MANY_USERS` ask all items, and `ONE_USER` asks the first ones again.

    The items are split into rounds, and each round runs all settings: a machine whose speed drifts
    then slows all of them alike.
    """
    results = [DemoResult(setting) for setting in settings]
    asked_by = {MANY_USERS: items, ONE_USER: items[:_MOST_ITEMS_OF_ONE_USER]}
    total = len(results) * sum(map(len, asked_by.values()))
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for setting in settings:
            await _ask_all(client, setting, items[:_WARM_UP_ITEMS], MANY_USERS)
        done = 0
        for num_users, asked in asked_by.items():
            size = -(-len(asked) // _ROUNDS)
            for start in range(0, len(asked), size):
                part = asked[start : start + size]
                for result in results:
                    await _add_round(client, result, part, num_users)
                    done += len(part)
                    display.update("asking over REST", done, total, str(result.setting))
    return results


async def _add_round(
    client: AsyncOpenAI, result: DemoResult, items: list[Item], num_users: int
) -> None:
    started = time.monotonic()
    responses = await _ask_all(client, result.setting, items, num_users)
    seconds = time.monotonic() - started
    num_tokens = sum(response.usage.completion_tokens for response in responses)
    result.round_tokens_per_s.setdefault(num_users, []).append(num_tokens / seconds)
    if num_users == ONE_USER:
        return  # these items have been scored
    result.num_tokens += num_tokens
    result.num_passes += sum(
        response.model_extra["mars"]["forward_passes"] for response in responses
    )
    result.correct += [
        is_correct(response.choices[0].message.content, item.answer)
        for item, response in zip(items, responses, strict=True)
    ]


async def _ask_all(
    client: AsyncOpenAI, setting: DemoSetting, items: list[Item], num_users: int
) -> list[Any]:
    limit = asyncio.Semaphore(num_users)

    async def ask(item: Item) -> Any:
        async with limit:
            return await client.chat.completions.create(
                model=setting.model,
                messages=[{"role": "user", "content": item.question}],
                max_tokens=_MAX_TOKENS,
                extra_body=setting.extra_body,
            )

    return await asyncio.gather(*(ask(item) for item in items))


def stream_passes(base_url: str, setting: DemoSetting, item: Item) -> list[str]:
    """Stream one answer and return the text that each forward pass added."""
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=setting.model,
            messages=[{"role": "user", "content": item.question}],
            max_tokens=_MAX_TOKENS,
            stream=True,
            extra_body=setting.extra_body,
        )
        return [chunk.choices[0].delta.content or "" for chunk in chunks]
