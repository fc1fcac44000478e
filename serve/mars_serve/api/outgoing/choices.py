"""Runs the choices of a request concurrently, each as an engine request of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from mars_serve.api.incoming.prompts import Prompt
from mars_serve.api.text import OutputPart, OutputText
from mars_serve.api.tools import ContentDelta, ToolEvent, ToolParser, ToolStart
from mars_serve.config.served import Backend
from mars_serve.engine.decoding_options import FinishReason, Span, Spans
from mars_serve.engine.outputs import StepOutput, TokenLogprob
from mars_serve.engine.request import Request

TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that calls tools."""
_OUTPUTS_AT_ONCE = 8


@dataclass(frozen=True)
class ReportedToken:
    """A token whose log-probability is reported."""

    token: int
    offset: int
    """Number of characters of the text before the token."""
    logprob: TokenLogprob | None
    """The token's log-probability; None for a prompt's first token, which nothing predicts."""
    span: Span = Span.ANSWER


@dataclass
class CallPart:
    """The piece of one tool call that a forward pass produced."""

    index: int
    id: str | None = None
    """Id of the call; like the name, only in the call's first part."""
    name: str | None = None
    arguments: str = ""
    """The next piece of the arguments' JSON text."""


@dataclass(frozen=True)
class Thought:
    """A piece of the model's thinking."""

    text: str


Piece = Thought | str | CallPart
"""A piece of thinking, of the text, or of a call."""


@dataclass(frozen=True)
class PassDetails:
    """Proposals of a forward pass, each with its confidence by the request's measure."""

    threshold: float
    """τ that the confidences were compared with; 1.0 where they were not."""
    accepted: list[tuple[int, float]]
    """Accepted tokens. The first is the model's own choice, whatever its confidence."""
    rejected: list[tuple[int, float]]


@dataclass(frozen=True)
class Delta:
    """The part of a choice that one forward pass produced."""

    choice: Choice
    pieces: list[Piece]
    """Thinking, text and calls in the order in which they were written, as far as they are final;
    `OutputText` holds back the rest. Thinking is there only if it is to be returned."""
    tokens: list[int]
    """Tokens up to the one that completed a stop string."""
    reported: list[ReportedToken]
    """One entry per token if log-probabilities are requested; an echoed prompt's tokens come first.
    """
    finish_reason: str | None
    is_first: bool
    details: PassDetails | None = None
    """Proposals of the pass, if the request asks for them."""
    stop_reason: str | int | None = None
    """The stop string or the request's stop token that ended the output."""

    @property
    def text(self) -> str:
        """Text of the answer."""
        return "".join(each for each in self.pieces if isinstance(each, str))

    @property
    def reasoning(self) -> str:
        """Text of the model's thinking."""
        return "".join(each.text for each in self.pieces if isinstance(each, Thought))

    @property
    def calls(self) -> list[CallPart]:
        """Parts of tool calls."""
        return [each for each in self.pieces if isinstance(each, CallPart)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass
class Passes:
    """Totals over the forward passes of one or more choices."""

    num_passes: int = 0
    num_tokens: int = 0
    sum_threshold: float = 0.0
    min_threshold: float = 1.0
    max_threshold: float = 0.0
    num_thinking: int = 0
    """Number of output tokens of the model's thinking."""
    num_cached: int = 0
    queue_s: float = 0.0
    """Seconds in the queue before the first forward pass; the longest of several choices."""
    by_span: dict[Span, Passes] = field(default_factory=dict)
    """Passes that began in each span, and all tokens of the span, if thresholds differ by span."""

    def count(self, num_tokens: int, threshold: float) -> None:
        """Add one pass, which gave some tokens at a τ."""
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.sum_threshold += threshold
        self.min_threshold = min(self.min_threshold, threshold)
        self.max_threshold = max(self.max_threshold, threshold)

    def count_spans(self, spans: Sequence[Span], threshold: float) -> None:
        """Add one pass at a τ; ``spans`` holds the span of each token and of the next one."""
        self.by_span.setdefault(spans[0], Passes()).count(0, threshold)
        for span in spans[:-1]:
            self.by_span.setdefault(span, Passes()).num_tokens += 1

    def add(self, other: Passes) -> None:
        """Add further passes, of this choice or another one."""
        self.num_passes += other.num_passes
        self.num_tokens += other.num_tokens
        self.sum_threshold += other.sum_threshold
        self.min_threshold = min(self.min_threshold, other.min_threshold)
        self.max_threshold = max(self.max_threshold, other.max_threshold)
        self.num_thinking += other.num_thinking
        self.num_cached += other.num_cached
        self.queue_s = max(self.queue_s, other.queue_s)
        for span, passes in other.by_span.items():
            self.by_span.setdefault(span, Passes()).add(passes)

    @property
    def mean_threshold(self) -> float:
        """Mean τ of the passes, exact if τ did not move; 1.0 before the first pass."""
        if self.min_threshold >= self.max_threshold:
            return self.min_threshold
        return self.sum_threshold / self.num_passes


@dataclass
class Choice:
    """One output of a request, cut at the first stop string."""

    index: int
    request: Request
    prompt: Prompt
    text: OutputText
    may_stop: bool
    """Whether a stop string may end the choice before the engine does."""
    parser: ToolParser | None = None
    """Parser that takes tool calls out of the text; None if the request offers no tools."""
    spans: Spans | None = None
    """Spans of the output, with the thresholds that were asked for; None if it is not divided."""
    divides: bool = False
    """Whether the thinking is taken out of the text by the spans."""
    includes_reasoning: bool = True
    """Whether the thinking is returned."""
    passes: Passes = field(default_factory=Passes)
    scored: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second one on."""
    has_ended: bool = False
    """Whether the last of it was taken."""
    _span: Span = field(init=False)

    def __post_init__(self) -> None:
        self._span = self.spans.start if self.spans else Span.ANSWER

    @property
    def is_forced(self) -> bool:
        """Whether the output consists of tool calls alone, so that it has no content."""
        return self.parser is not None and self.parser.is_forced

    @property
    def num_charged(self) -> int:
        """Number of output tokens to pay for: of a choice that did not end, all that were made."""
        made = 0 if self.has_ended else self.request.num_generated
        return max(self.passes.num_tokens, made)

    async def stream(self, backend: Backend) -> AsyncGenerator[Delta]:
        """Run the engine request and yield its parts; a stop string cancels the rest."""
        async with aclosing(backend.stream(self.request)) as outputs:
            async for output in outputs:
                delta = self._take(output)
                if delta is not None:
                    yield delta
                    if delta.finish_reason is not None and output.finish_reason is None:
                        break  # closing the backend's generator cancels the request

    async def run(self, backend: Backend) -> list[Delta]:
        """Run the engine request to its end."""
        if self.may_stop:
            return [delta async for delta in self.stream(backend)]
        outputs = await backend.complete(self.request)
        outputs.reverse()
        joined, taken = list[Delta](), list[Delta]()
        while outputs:
            delta = self._take(outputs.pop())
            if delta is not None:
                taken.append(delta)
            if len(taken) == _OUTPUTS_AT_ONCE:
                joined.append(_joined(taken))
                taken = []
                await asyncio.sleep(0)  # all of a long output at once would hold up other requests
        return [*joined, *taken]

    def _take(self, output: StepOutput) -> Delta | None:
        """Return the part that a forward pass adds, or None if it only processed prompt tokens."""
        self.passes.num_cached += output.num_prefix_hit_tokens
        self.passes.queue_s += output.queue_s
        self.scored += output.prompt_logprobs
        if not output.tokens and output.finish_reason is None:
            return None
        last = output.finish_reason is not None
        spans = self.spans.of_tokens(self._span, output.tokens) if self.spans else []
        part = self.text.push(output.tokens, last=last, spans=spans if self.divides else None)
        is_first = self.passes.num_passes == 0
        self.passes.count(part.num_tokens, output.threshold)
        spans = spans[: part.num_tokens + 1]
        self._follow(spans, output.threshold)
        echoed, reported = self._echoed() if is_first else ("", [])
        reported += self._reported(output, part, spans)
        pieces: list[Piece] = [part.text] if part.text else []
        reason: str | None = FinishReason.STOP if part.is_stopped else output.finish_reason
        self.has_ended = reason is not None
        stop_reason = part.stop if part.is_stopped else self._stop_token(output)
        if self.parser is not None:
            pieces = _pieces_of(self.parser.push(part.text, last=reason is not None))
            if reason == FinishReason.STOP and 0 < self.parser.num_calls == self.parser.num_whole:
                reason = TOOL_CALLS
        pieces = [echoed, *pieces] if echoed else pieces
        reasoning = part.reasoning if self.includes_reasoning else ""
        return Delta(
            choice=self,
            pieces=[Thought(reasoning), *pieces] if part.reasoning else pieces,
            tokens=output.tokens[: part.num_tokens],
            reported=reported,
            finish_reason=reason,
            is_first=is_first,
            details=self._details(output, part),
            stop_reason=stop_reason,
        )

    def _details(self, output: StepOutput, part: OutputPart) -> PassDetails | None:
        """Return what a pass proposed, without anything behind a stop string."""
        if not self.request.options.reports_rejected:
            return None
        accepted = zip(output.tokens, output.confidences, strict=True)
        rejected = [] if part.is_stopped else output.rejected
        return PassDetails(output.threshold, list(accepted)[: part.num_tokens], rejected)

    def _stop_token(self, output: StepOutput) -> int | None:
        if output.finish_reason is not FinishReason.STOP:
            return None
        stops = self.request.options.stop_ids
        return next((token for token in output.tokens[-1:] if token in stops), None)

    def _follow(self, spans: Sequence[Span], threshold: float) -> None:
        """Count a pass by spans, of each of its tokens and of the next one, and enter the last."""
        if self.spans is None:
            return
        self._span = spans[-1]
        self.passes.num_thinking += spans[:-1].count(Span.THINKING)
        if self.spans.thresholds:
            self.passes.count_spans(spans, threshold)

    def _echoed(self) -> tuple[str, list[ReportedToken]]:
        """Return the text and log-probabilities of the prompt, both empty without ``echo``."""
        echo = self.prompt.echo
        if echo is None:
            return "", []
        num_top = self.request.options.num_logprobs
        if num_top is None or not echo.offsets:
            return echo.text, []
        values = [None, *(_with_top(each, num_top) for each in self.scored)]
        rows = zip(self.prompt.tokens, echo.offsets, values, strict=True)
        return echo.text, [ReportedToken(*row) for row in rows]

    def _reported(
        self, output: StepOutput, part: OutputPart, spans: Sequence[Span]
    ) -> list[ReportedToken]:
        """Return the log-probabilities of the output's tokens up to a stop string.

        Thinking that is not returned is not to be read from its log-probabilities, either.
        """
        if self.request.options.num_logprobs is None:
            return []
        start = len(self.prompt.echo.text) if self.prompt.echo else 0
        shown = slice(part.num_tokens)
        rows = zip(output.tokens[shown], part.offsets, output.logprobs[shown], strict=True)
        reported = [ReportedToken(token, start + offset, value) for token, offset, value in rows]
        if not spans:
            return reported
        pairs = zip(reported, spans, strict=False)
        marked = [replace(each, span=span) for each, span in pairs]
        return [
            each for each in marked if self.includes_reasoning or each.span is not Span.THINKING
        ]


def _with_top(value: TokenLogprob, num_top: int) -> TokenLogprob:
    return value if len(value.top) <= num_top else replace(value, top=value.top[:num_top])


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Return the part of a choice that several consecutive parts make together."""
    last = deltas[-1]
    return Delta(
        choice=last.choice,
        pieces=[piece for delta in deltas for piece in delta.pieces],
        tokens=[token for delta in deltas for token in delta.tokens],
        reported=[each for delta in deltas for each in delta.reported],
        finish_reason=last.finish_reason,
        is_first=deltas[0].is_first,
        stop_reason=last.stop_reason,
    )


def _pieces_of(events: Sequence[ToolEvent]) -> list[Piece]:
    """Return the texts and one part for each tool call that the events belong to, in order."""
    pieces, calls = list[Piece](), dict[int, CallPart]()
    for event in events:
        if isinstance(event, ContentDelta):
            pieces.append(event.text)
            continue
        if event.index not in calls:
            calls[event.index] = CallPart(event.index)
            pieces.append(calls[event.index])
        if isinstance(event, ToolStart):
            calls[event.index].id, calls[event.index].name = event.id, event.name
        else:
            calls[event.index].arguments += event.text
    return pieces


async def run_all(choices: Sequence[Choice], backend: Backend) -> list[list[Delta]]:
    """Run all choices concurrently; if one fails, the others are cancelled."""
    if len(choices) == 1:  # saves a task
        return [await choices[0].run(backend)]
    tasks = [asyncio.create_task(choice.run(backend)) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def stream_all(choices: Sequence[Choice], backend: Backend) -> AsyncGenerator[Delta]:
    """Run all choices concurrently and yield their parts in order of arrival.

    If one fails or the generator is closed, the others are cancelled.
    """
    if len(choices) == 1:  # saves a task and a queue
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
    """Cancel unfinished tasks and wait for them, which cancels their engine requests."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
