"""The outputs of one request, run side by side. Knows nothing of response shapes or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mars_serve.engine.request import FinishReason, Request, StepOutput, TokenLogprob
from mars_serve.served import Backend
from mars_serve.text import OutputText, StopRules


@dataclass(frozen=True)
class ReportedToken:
    """An output token whose log-probability was asked for."""

    token: int
    offset: int
    """Characters of the output before it."""
    logprob: TokenLogprob


@dataclass(frozen=True)
class Delta:
    """What one forward pass gave of a choice."""

    choice: Choice
    text: str
    """Text that is settled; see `OutputText` for what is held back."""
    num_tokens: int
    reported: list[ReportedToken]
    """Of each of those tokens, where asked for."""
    finish_reason: FinishReason | None
    is_first: bool


class Choice:
    """One output of a request: an engine request of its own, cut where a stop string is found."""

    def __init__(
        self, index: int, request: Request, tokenizer: PreTrainedTokenizerBase, rules: StopRules
    ) -> None:
        self.index = index
        self.request = request
        self.num_passes = 0
        self.num_tokens = 0
        """Output tokens, up to the one that completed a stop string."""
        self._rules = rules
        self._text = OutputText(tokenizer, rules)

    async def stream(self, backend: Backend) -> AsyncIterator[Delta]:
        """Run the request; ends at a stop string, which cancels the request."""
        async for output in backend.stream(self.request):
            delta = self._take(output)
            yield delta
            if delta.finish_reason is not None and output.finish_reason is None:
                break  # leaving the backend's iteration is what cancels

    async def run(self, backend: Backend) -> list[Delta]:
        """Run the request to its end."""
        if self._rules.strings:
            return [delta async for delta in self.stream(backend)]
        return [self._take(output) for output in await backend.complete(self.request)]

    def _take(self, output: StepOutput) -> Delta:
        part = self._text.push(output.tokens, last=output.finish_reason is not None)
        self.num_passes += 1
        self.num_tokens += part.num_tokens
        reason = FinishReason.STOP if part.is_stopped else output.finish_reason
        reported = []
        if self.request.options.num_logprobs is not None:
            tokens = list(zip(output.tokens, output.logprobs, strict=True))[: part.num_tokens]
            pairs = zip(tokens, part.offsets, strict=True)
            reported = [ReportedToken(token, offset, each) for (token, each), offset in pairs]
        return Delta(
            self, part.text, part.num_tokens, reported, reason, is_first=self.num_passes == 1
        )


async def run_all(choices: Sequence[Choice], backend: Backend) -> list[list[Delta]]:
    """Run all choices at once; an error of one cancels the others."""
    tasks = [asyncio.create_task(choice.run(backend)) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def stream_all(choices: Sequence[Choice], backend: Backend) -> AsyncIterator[Delta]:
    """Run all choices at once and yield what they give as it comes.

    An error of one cancels the others, and so does leaving the iteration.
    """
    if len(choices) == 1:  # spares a task and a queue
        async for delta in choices[0].stream(backend):
            yield delta
        return
    queue = asyncio.Queue[Delta | None]()

    async def feed(choice: Choice) -> None:
        async for delta in choice.stream(backend):
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
