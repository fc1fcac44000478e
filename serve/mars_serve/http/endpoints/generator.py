"""Answers requests to generate text with a model's `Backend`, whatever dialect they come in."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from hashlib import blake2b

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from mars_serve.api.bounds import check_copies, check_reported, most_reported
from mars_serve.api.errors import ApiError, invalid_value, renaming
from mars_serve.api.incoming.options import decoding_options, stop_rules, tier_of, with_seed_of
from mars_serve.api.incoming.prompts import (
    BadWords,
    Prompt,
    PromptReader,
    check_num_choices,
    checked_max_tokens,
    echoed_message,
    size_of,
)
from mars_serve.api.incoming.spans import spans_of, thinking_of
from mars_serve.api.incoming.structure import Structure, structure_of
from mars_serve.api.keys import Caller
from mars_serve.api.limits import Places
from mars_serve.api.outgoing.answer import Answer, Writer
from mars_serve.api.outgoing.choices import Choice, Delta, run_all, stream_all
from mars_serve.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DecodingRequest,
    GenerationRequest,
)
from mars_serve.api.text import OutputText, TokenBytes, special_tokens
from mars_serve.api.text_threads import Load, TextThreads
from mars_serve.api.tools import RequestTools, prepare_tools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings
from mars_serve.engine.decoding_options import DecodingOptions, Spans
from mars_serve.engine.ipc.client import QueueFull
from mars_serve.engine.request import Request as EngineRequest
from mars_serve.http.endpoints.event_stream import EventStream
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.middleware.errors import as_api_error, cause_of
from mars_serve.http.middleware.records import RequestRecord, UnknownFields

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True)
class Dialect:
    """How the client of a request names its fields, and how its answer is written."""

    source: DecodingRequest
    """Body as the client sent it."""
    writer: Callable[[Answer], Writer]
    names: Mapping[str, str] = field(default_factory=dict)
    """Client's names of fields of the translated body, where they differ, for error messages."""
    most_tokens: int | None = None
    """Largest number of output tokens; unlike that of a chat it is lowered to what fits."""
    keep: Callable[[], Awaitable[None]] | None = None
    """Called when all is generated, before the client learns that it is."""
    is_whole: bool = False
    """Whether the writer holds all of an answer that is streamed, too."""


@dataclass(frozen=True)
class Generator:
    """Answers requests over some models."""

    models: Mapping[str, ServedModel]
    limits: LimitSettings
    threads: TextThreads
    places: Mapping[str, Places]
    """Places in the queue of each model."""
    unknown: UnknownFields = field(default_factory=UnknownFields)

    async def complete(
        self, body: CompletionRequest, request: Request, dialect: Dialect
    ) -> Response:
        """Continue prompts."""
        call = self._begin(body, request, dialect, body.num_prompts or 1)
        reader = PromptReader(call.model, self.limits, call.caller)

        def read() -> Answer:
            truncation = reader.truncation(body, _DEFAULT_COMPLETION_TOKENS)
            prompts = reader.completion(body, truncation)
            return call.prepare(prompts, _DEFAULT_COMPLETION_TOKENS, reader.bad_words(body))

        return await self._respond(call, read)

    async def chat(
        self, body: ChatCompletionRequest, request: Request, dialect: Dialect
    ) -> Response:
        """Answer a conversation, to which the bodies of all other dialects are translated."""
        with renaming(dialect.names):
            call = self._begin(body, request, dialect)
            return await self._respond(call, lambda: call.read_chat(body))

    async def count(
        self, body: ChatCompletionRequest, request: Request, dialect: Dialect
    ) -> Response:
        """Return the number of tokens of a conversation, which may be too long to answer."""
        record, load = request.state.record, request.state.load
        record.model = body.model
        with renaming(dialect.names):
            reader = PromptReader(
                find_model(self.models, body.model), self.limits, request.state.caller
            )
            dialect.source.refuse_unsupported()
            tokens, _ = await self.threads.read(
                load, load.size, lambda: _prompt_of(reader, body, is_cut=True)
            )
        record.prompt_tokens = len(tokens)
        headers = self.unknown.report(dialect.source.unknown_fields, record)
        return JSONResponse({"input_tokens": len(tokens)}, headers=headers)

    async def check(
        self, body: ChatCompletionRequest, request: Request, dialect: Dialect
    ) -> dict[str, str]:
        """Return the headers of the answer to a conversation, or the `ApiError` that `chat` would.

        Raises:
            ApiError: the request cannot be served.
        """
        with renaming(dialect.names):
            call = self._begin(body, request, dialect)
            size = size_of(body, call.load.size)
            await self.threads.read(call.load, size, lambda: call.read_chat(body))
        call.record.prompt_tokens = None  # they are charged when they are read to be answered
        return self.unknown.report(call.ignored_fields, call.record)

    def _begin(
        self, body: GenerationRequest, request: Request, dialect: Dialect, num_prompts: int = 1
    ) -> _Call:
        """Find the request's model, refuse fields that no model supports, and take its places.

        The places of its outputs take the one that it has had since its arrival.
        """
        record: RequestRecord = request.state.record
        record.model, record.stream = body.model, bool(body.stream)
        model = find_model(self.models, body.model)
        record.model, record.lora = model.settings.name, model.lora and model.lora.name
        dialect.source.refuse_unsupported()
        num_choices = check_num_choices(body, num_prompts, self.limits)
        caller, held = request.state.caller, request.state.places
        of_model = self.places[record.model]
        held.close()
        held.enter_context(of_model.take(caller, num_choices))
        load = request.state.load
        return _Call(body, dialect, model, caller, self.limits, record, of_model, held, load)

    async def _respond(self, call: _Call, read: Callable[[], Answer]) -> Response:
        """Read the body's texts, generate, and return the answer whole or as a stream."""
        size = size_of(call.body, call.load.size)
        answer = await self.threads.read(call.load, size, read)
        writer = call.dialect.writer(answer)
        headers = self.unknown.report(call.ignored_fields, call.record)
        if call.body.stream:
            events = _events(call, answer, writer)
            first = await anext(events)  # an error before the first event gets its own status
            return EventStream(first, events, headers)
        try:
            with call.places.generating(len(answer.choices)):
                deltas = await run_all(answer.choices, answer.model.backend)
        except Exception as error:
            raise call.problem(error, answer) from error
        finally:
            call.record_end(answer)
        call.record.finish_reason = deltas[-1][-1].finish_reason
        size = answer.size_of(deltas)
        body = await self.threads.write(call.caller, size, lambda: writer.whole(deltas))
        if call.dialect.keep:
            await call.dialect.keep()
        return Response(body, media_type="application/json", headers=headers)


@dataclass(frozen=True)
class _Call:
    body: GenerationRequest
    dialect: Dialect
    model: ServedModel
    caller: Caller
    limits: LimitSettings
    record: RequestRecord
    places: Places
    held: ExitStack
    """Holds its places."""
    load: Load
    start_s: float = field(default_factory=time.perf_counter)
    """Time of arrival by ``time.perf_counter``, in seconds."""

    def read_chat(self, body: ChatCompletionRequest) -> Answer:
        reader = PromptReader(self.model, self.limits, self.caller)
        tokens, tools = _prompt_of(reader, body)
        num_choices = body.n or 1
        check_copies("messages", len(tokens) * num_choices, num_choices)
        room = max(self.model.max_length - len(tokens), 1)
        room = min(room, self.dialect.most_tokens or room)
        if self.is_held and body.num_logprobs is not None:
            num_likely = max(body.num_logprobs, body.prompt_logprobs or 0)
            num_scored = 0 if body.prompt_logprobs is None else len(tokens)
            room = max(1, min(room, most_reported(num_choices, num_likely) - num_scored))
        prompt = Prompt(tokens, "messages", echoed_message(body))
        return self.prepare([prompt], room, reader.bad_words(body), tools)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        default_tokens: int,
        bad_words: BadWords,
        tools: RequestTools | None = None,
    ) -> Answer:
        structure = _structure(self.body, tools)
        own_id = uuid.uuid4().hex  # an engine's ids are unique, which a client's may not be
        choices = list[Choice]()
        for prompt in prompts:
            max_tokens = checked_max_tokens(
                self.model, self.limits, prompt, self.body.limit, default_tokens
            )
            spans = spans_of(self.body, self.model, prompt.tokens, tools)
            options = decoding_options(
                self.body,
                self.model,
                self.caller,
                self.limits,
                spans=spans,
                thinking=thinking_of(self.body, self.model, prompt.tokens, structure),
                max_tokens=max_tokens,
                grammar=structure.grammar if structure else None,
                bad_words=bad_words,
            )
            self._check_reported(prompt, options, len(prompts))
            choices += self._choices(own_id, prompt, options, tools, spans, len(choices))
        self.record.mode = choices[0].request.options.mode
        self.record.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.record.completion_tokens = 0
        checkpoint, names_ids = self.model.checkpoint, bool(self.body.return_tokens_as_token_ids)
        return Answer(
            id=self.body.request_id or own_id,
            model=self.model,
            choices=choices,
            names=TokenBytes(checkpoint.tokenizer, names_ids),
            tier=tier_of(self.body, self.caller),
            grammar_field=structure.field if structure else None,
        )

    def _check_reported(self, prompt: Prompt, options: DecodingOptions, num_prompts: int) -> None:
        """Refuse a response that would hold too many log-probabilities at once."""
        held = len(prompt.tokens) if options.num_prompt_logprobs is not None else 0
        if self.is_held and options.num_logprobs is not None:
            held += options.max_tokens
        num_likely = max(options.num_logprobs or 0, options.num_prompt_logprobs or 0)
        num_outputs = num_prompts * (self.body.n or 1)
        check_reported(self.body.limit[0], num_outputs, held, num_likely)

    def _choices(
        self,
        own_id: str,
        prompt: Prompt,
        options: DecodingOptions,
        tools: RequestTools | None,
        spans: Spans | None,
        num_before: int,
    ) -> list[Choice]:
        """Return the choices of one prompt, seeded as if it were the request's only prompt."""
        checkpoint, hidden = self.model.checkpoint, self._hidden(tools)
        shows_ends = self.body.skip_special_tokens is False
        ends = checkpoint.special.eos if shows_ends else frozenset[int]()
        rules = stop_rules(self.body, self.limits, ends)
        choices = []
        chat = self.body if isinstance(self.body, ChatCompletionRequest) else None
        for number in range(self.body.n or 1):
            index = num_before + number
            request = EngineRequest(
                f"{own_id}-{index}",
                list(prompt.tokens),
                with_seed_of(options, number),
                tenant=self.caller.tenant,
                cache_salt=self.body.cache_salt or "",
                lora=self.model.lora,
                key=self.caller.name,
                session=self._session,
                deadline_s=self._deadline_s,
                may_be_audited=self.caller.may_be_audited and self.body.audit is not False,
            )
            choice = Choice(
                index=index,
                request=request,
                prompt=prompt,
                text=OutputText(checkpoint.tokenizer, rules, hidden, prompt.tokens),
                may_stop=bool(rules.strings),
                parser=tools.parser() if tools else None,
                spans=spans,
                divides=chat is not None and spans is not None,
                includes_reasoning=chat is None or chat.include_reasoning is not False,
            )
            choices.append(choice)
        return choices

    def _hidden(self, tools: RequestTools | None) -> frozenset[int] | None:
        """Return the tokens whose text is left out; None for all special ones."""
        kept = tools.kept_special if tools else frozenset[int]()
        if self.body.skip_special_tokens is False:
            if tools:
                reason = "the calls of tools are read from a text without other special tokens"
                raise invalid_value(
                    "skip_special_tokens", f"{reason}; leave it out, or set tool_choice to none"
                )
            return frozenset()
        return special_tokens(self.model.checkpoint.tokenizer) - kept if kept else None

    @property
    def is_held(self) -> bool:
        """Whether the answer is in memory as a whole when it ends."""
        return not self.body.stream or self.dialect.is_whole

    @property
    def _session(self) -> str | None:
        """Digest of the conversation's or user's name, apart from those of other tenants."""
        given = self.body.session_id or self.body.user
        if not given:
            return None
        name = f"{self.caller.tenant}\n{given}"
        return blake2b(name.encode(), digest_size=16).hexdigest()

    @property
    def _deadline_s(self) -> float | None:
        return None if self.body.deadline_ms is None else self.body.deadline_ms / 1000

    @property
    def ignored_fields(self) -> Sequence[str]:
        """Names of the body's fields that nobody knows, or that the model's template has not."""
        unknown, body = self.dialect.source.unknown_fields, self.body
        if not isinstance(body, ChatCompletionRequest) or body.reasoning_effort is None:
            return unknown
        return (
            unknown
            if self.model.switches
            else (*unknown, self.dialect.names.get("reasoning_effort", "reasoning_effort"))
        )

    def problem(self, error: Exception, answer: Answer) -> ApiError:
        cause = cause_of(error)
        self.held.close()
        if isinstance(cause, QueueFull) and cause.wait_s is None:
            self.places.note_full(len(answer.choices))
        problem = as_api_error(error, answer.grammar_field, self.places.wait_s())
        return problem.renamed(self.dialect.names)

    def record_delta(self, delta: Delta) -> None:
        """Add generated tokens to the record, from which the key is charged."""
        if self.record.ttft_s is None:
            self.record.ttft_s = time.perf_counter() - self.start_s
        self.record.completion_tokens = (self.record.completion_tokens or 0) + delta.num_tokens

    def record_end(self, answer: Answer) -> None:
        """Complete the record of a request that has ended or failed."""
        record, passes = self.record, answer.passes
        record.completion_tokens = sum(choice.num_charged for choice in answer.choices)
        record.cached_tokens = answer.counts.cached
        record.forward_passes = passes.num_passes
        record.queue_s = passes.queue_s
        record.moves = sum(choice.request.num_moves for choice in answer.choices) or None
        if passes.num_passes:
            record.threshold_mean = passes.mean_threshold
            record.threshold_min = passes.min_threshold


def _prompt_of(
    reader: PromptReader, body: ChatCompletionRequest, *, is_cut: bool = False
) -> tuple[list[int], RequestTools | None]:
    """Return a conversation's tokens and tools; with ``is_cut`` it may have more than fit."""
    reader.check_chat(body, body.messages)
    truncation = reader.truncation(body, default_tokens=1)
    is_cut = is_cut or truncation.num_kept is not None
    tools = prepare_tools(
        body.tools, body.tool_choice, body.parallel_tool_calls, reader.model.checkpoint
    )
    tokens = reader.chat(body, body.messages, tools, is_cut=is_cut)
    return truncation.cut(tokens), tools


def _structure(body: GenerationRequest, tools: RequestTools | None) -> Structure | None:
    """Return the grammar of the output, given by the body or needed for its tools."""
    structure = structure_of(body)
    if tools is None or tools.grammar is None:
        return structure
    if structure is not None:
        reason = f"{structure.field} already gives a grammar; leave it out"
        raise invalid_value("tools", f"{reason}, or set tool_choice to auto without strict tools")
    return Structure("tools", tools.grammar)


async def _events(call: _Call, answer: Answer, writer: Writer) -> AsyncGenerator[bytes]:
    """Yield events per forward pass; an error after the first becomes an event, too."""
    has_begun = False
    try:
        with call.places.generating(len(answer.choices)):
            async with aclosing(stream_all(answer.choices, answer.model.backend)) as deltas:
                async for delta in deltas:
                    call.record_delta(delta)
                    call.record.finish_reason = delta.finish_reason
                    begun = b"" if has_begun else writer.begin()
                    yield begun + writer.events(delta)
                    has_begun = True
        if call.dialect.keep:
            await call.dialect.keep()
    except Exception as error:
        problem = call.problem(error, answer)
        if not has_begun:
            raise problem from error
        call.record.error_code = problem.code
        yield writer.failed(problem)
        return
    finally:
        call.record_end(answer)
    yield writer.end()
