"""The outputs of one request, run side by side. Knows nothing of response shapes or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from mars_serve.api.incoming.prompts import Prompt
from mars_serve.api.text import OutputText
from mars_serve.api.tools import ContentDelta, ToolEvent, ToolParser, ToolStart
from mars_serve.config.served import Backend
from mars_serve.engine.request import FinishReason, Request, StepOutput, TokenLogprob

TOOL_CALLS = "tool_calls"
"""Why an output ended that calls tools."""


@dataclass(frozen=True)
class ReportedToken:
    """A token whose log-probability was asked for."""

    token: int
    offset: int
    """Characters of the text before it."""
    logprob: TokenLogprob | None
    """None of a prompt's first token, which nothing predicts."""


@dataclass
class CallPart:
    """What of one tool call came in one forward pass."""

    index: int
    """Of the call in its turn."""
    id: str | None = None
    """Where the call begins, as its name."""
    name: str | None = None
    arguments: str = ""
    """Further JSON text."""


@dataclass(frozen=True)
class Delta:
    """What one forward pass gave of a choice."""

    choice: Choice
    text: str
    """Text that is settled; see `OutputText` for what is held back."""
    num_tokens: int
    reported: list[ReportedToken]
    """Of each of those tokens, where asked for; before those of the prompt, where it is echoed."""
    finish_reason: str | None
    is_first: bool
    calls: list[CallPart] = field(default_factory=list)


@dataclass
class Passes:
    """What the forward passes of some choices had in common."""

    num_passes: int = 0
    num_tokens: int = 0
    """Output tokens, up to the one that completed a stop string."""
    sum_threshold: float = 0.0
    min_threshold: float = 1.0
    max_threshold: float = 0.0
    num_cached: int = 0
    """Prompt tokens that were found stored."""
    queue_s: float = 0.0
    """Seconds before the first of them."""

    def count(self, output: StepOutput, num_tokens: int) -> None:
        """Add a pass that gave tokens or was the last one."""
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.sum_threshold += output.threshold
        self.min_threshold = min(self.min_threshold, output.threshold)
        self.max_threshold = max(self.max_threshold, output.threshold)

    def add(self, other: Passes) -> None:
        """Add those of another choice."""
        self.num_passes += other.num_passes
        self.num_tokens += other.num_tokens
        self.sum_threshold += other.sum_threshold
        self.min_threshold = min(self.min_threshold, other.min_threshold)
        self.max_threshold = max(self.max_threshold, other.max_threshold)
        self.num_cached += other.num_cached
        self.queue_s = max(self.queue_s, other.queue_s)

    @property
    def mean_threshold(self) -> float:
        """Mean τ of the passes, exactly τ where it did not move; 1.0 before the first."""
        if self.min_threshold >= self.max_threshold:
            return self.min_threshold
        return self.sum_threshold / self.num_passes


@dataclass
class Choice:
    """One output of a request: an engine request of its own, cut where a stop string is found."""

    index: int
    request: Request
    prompt: Prompt
    text: OutputText
    may_stop: bool
    """Whether a string may end it before the engine does."""
    parser: ToolParser | None = None
    """Takes tool calls out of the text, where the request offers tools."""
    passes: Passes = field(default_factory=Passes)
    _scored: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt, from its second token on."""

    async def stream(self, backend: Backend) -> AsyncGenerator[Delta]:
        """Run the request; ends at a stop string, which cancels the request."""
        async with aclosing(backend.stream(self.request)) as outputs:
            async for output in outputs:
                delta = self._take(output)
                if delta is not None:
                    yield delta
                    if delta.finish_reason is not None and output.finish_reason is None:
                        break  # closing the backend's generator is what cancels

    async def run(self, backend: Backend) -> list[Delta]:
        """Run the request to its end."""
        if self.may_stop:
            return [delta async for delta in self.stream(backend)]
        taken = [self._take(output) for output in await backend.complete(self.request)]
        return [delta for delta in taken if delta is not None]

    def _take(self, output: StepOutput) -> Delta | None:
        """What a pass gave; None where it fed but a part of the prompt."""
        self.passes.num_cached += output.num_prefix_hit_tokens
        self.passes.queue_s += output.queue_s
        self._scored += output.prompt_logprobs
        if not output.tokens and output.finish_reason is None:
            return None
        part = self.text.push(output.tokens, last=output.finish_reason is not None)
        is_first = self.passes.num_passes == 0
        self.passes.count(output, part.num_tokens)
        text, reported, echo = part.text, list[ReportedToken](), self.prompt.echo
        start = len(echo.text) if echo else 0
        if echo and is_first:
            text = echo.text + text
            reported = self._of_prompt(echo.offsets)
        if self.request.options.num_logprobs is not None:
            shown = slice(part.num_tokens)
            places = zip(output.tokens[shown], part.offsets, output.logprobs[shown], strict=True)
            reported += [ReportedToken(token, start + at, value) for token, at, value in places]
        reason: str | None = FinishReason.STOP if part.is_stopped else output.finish_reason
        calls = list[CallPart]()
        if self.parser is not None:
            text, calls = _parts_of(self.parser.push(text, last=reason is not None))
            if reason == FinishReason.STOP and self.parser.num_calls:
                reason = TOOL_CALLS
        return Delta(self, text, part.num_tokens, reported, reason, is_first, calls)

    def _of_prompt(self, offsets: Sequence[int]) -> list[ReportedToken]:
        if self.request.options.num_logprobs is None:
            return []
        values = [None, *self._scored]
        tokens = self.prompt.tokens
        return [ReportedToken(*each) for each in zip(tokens, offsets, values, strict=True)]


def _parts_of(events: Sequence[ToolEvent]) -> tuple[str, list[CallPart]]:
    """Content, and one part for each call that events are about."""
    content, calls = "", dict[int, CallPart]()
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
            continue
        part = calls.setdefault(event.index, CallPart(event.index))
        if isinstance(event, ToolStart):
            part.id, part.name = event.id, event.name
        else:
            part.arguments += event.text
    return content, list(calls.values())


def passes_of(choices: Sequence[Choice]) -> Passes:
    """The passes of some choices, all together."""
    total = Passes()
    for choice in choices:
        total.add(choice.passes)
    return total


async def run_all(choices: Sequence[Choice], backend: Backend) -> list[list[Delta]]:
    """Run all choices at once; an error of one cancels the others."""
    if len(choices) == 1:  # spares a task
        return [await choices[0].run(backend)]
    tasks = [asyncio.create_task(choice.run(backend)) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def stream_all(choices: Sequence[Choice], backend: Backend) -> AsyncGenerator[Delta]:
    """Run all choices at once and yield what they give as it comes.

    An error of one cancels the others, and so does closing the generator.
    """
    if len(choices) == 1:  # spares a task and a queue
        async with aclosing(choices[0].stream(backend)) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue = asyncio.Queue[Delta | None]()

    async def feed(choice: Choice) -> None:
        async with aclosing(choice.stream(backend)) as deltas:
            async for delta in deltas:
                queue.put_nowait(delta)

    tasks = [asyncio.create_task(feed(choice)) for choice in choices]
    feeding = asyncio.gather(*tasks)
    feeding.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            yield item
        await feeding
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel what still runs, and wait for it: its request is cancelled then, too."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
