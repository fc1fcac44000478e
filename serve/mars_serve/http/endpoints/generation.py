"""``/v1/completions`` and ``/v1/chat/completions``. Reaches models through `Backend` only."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json  # several times faster than json, once for each pass
from starlette.types import Receive, Scope, Send

from mars_platform.data.conversations import render_prompt
from mars_platform.errors import UserError
from mars_serve.api.errors import invalid_value
from mars_serve.api.incoming.options import decoding_options, stop_rules, tier_of, with_seed_of
from mars_serve.api.incoming.prompts import (
    Prompt,
    check_num_choices,
    checked_max_tokens,
    completion_prompts,
    encode_prompt,
)
from mars_serve.api.incoming.structure import Structure, structure_of
from mars_serve.api.keys import Caller
from mars_serve.api.messages import messages_for_template
from mars_serve.api.outgoing.choices import Choice, Delta, run_all, stream_all
from mars_serve.api.outgoing.responses import Generation, UsageEvents
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mars_serve.api.schema import ChatCompletionResponse, CompletionResponse, generation_described
from mars_serve.api.text import OutputText, TokenBytes, special_tokens
from mars_serve.api.tools import ToolPlan, plan_tools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings
from mars_serve.engine.request import DecodingOptions
from mars_serve.engine.request import Request as EngineRequest
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.middleware.errors import as_api_error
from mars_serve.http.middleware.records import RequestRecord

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def generation_router(models: Mapping[str, ServedModel], limits: LimitSettings) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        response_model=None,
        responses=generation_described(CompletionResponse),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts given as text or token ids."""
        call = _begin(models, body, request, limits)
        prompts = await completion_prompts(body, call.model, limits)
        return await _respond(call, call.generation(prompts, _DEFAULT_COMPLETION_TOKENS))

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses=generation_described(ChatCompletionResponse),
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = _begin(models, body, request, limits)
        check_num_choices(body, 1, limits)
        tokenizer = call.model.checkpoint.tokenizer
        messages = messages_for_template(body.messages)
        plan = plan_tools(
            body.tools, body.tool_choice, body.parallel_tool_calls, call.model.checkpoint
        )
        tools = plan.template_tools if plan else None
        variables = body.chat_template_kwargs
        try:
            text = render_prompt(tokenizer, messages, tools, template_kwargs=variables)
        except UserError as error:
            param, _, reason = str(error).partition(": ")
            raise invalid_value(param, reason) from error
        tokens = await encode_prompt(tokenizer, text, add_special_tokens=False)
        rest = max(call.model.max_length - len(tokens), 1)
        return await _respond(call, call.generation([Prompt(tokens, "messages")], rest, plan))

    return router


@dataclass(frozen=True)
class _Call:
    """A request whose model is known."""

    body: GenerationRequest
    model: ServedModel
    caller: Caller
    limits: LimitSettings
    record: RequestRecord
    start_s: float
    """By ``time.perf_counter``."""

    def generation(
        self, prompts: Sequence[Prompt], default_tokens: int, plan: ToolPlan | None = None
    ) -> Generation:
        """The checked request; ``default_tokens`` limits an output where the body does not."""
        body, model = self.body, self.model
        is_chat = isinstance(body, ChatCompletionRequest)
        structure = _structure(body, plan)
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        choices = list[Choice]()
        for prompt in prompts:
            options = self._options(prompt, default_tokens, structure)
            choices += self._choices(request_id, prompt, options, plan, len(choices))
        self.record.mode = choices[0].request.options.mode
        self.record.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.record.completion_tokens = 0
        return Generation(
            request_id,
            is_chat,
            model,
            choices,
            TokenBytes(model.checkpoint.tokenizer),
            tier=tier_of(body, self.caller) if body.service_tier else None,
            usage_events=UsageEvents.of(body.stream_options),
            grammar_field=structure.field if structure else None,
        )

    def _options(
        self, prompt: Prompt, default_tokens: int, structure: Structure | None
    ) -> DecodingOptions:
        body, model, limits = self.body, self.model, self.limits
        return decoding_options(
            body,
            model.settings,
            model.checkpoint,
            self.caller,
            limits,
            max_tokens=checked_max_tokens(model, limits, prompt, body.limit, default_tokens),
            grammar=structure.grammar if structure else None,
        )

    def _choices(
        self,
        request_id: str,
        prompt: Prompt,
        options: DecodingOptions,
        plan: ToolPlan | None,
        num_before: int,
    ) -> list[Choice]:
        """The outputs of one prompt, which are those it would have in a request of its own."""
        tokenizer, rules = self.model.checkpoint.tokenizer, stop_rules(self.body, self.limits)
        kept = plan.kept_special if plan else frozenset[int]()
        hidden = special_tokens(tokenizer) - kept if kept else None
        choices = []
        for place in range(self.body.n or 1):
            index = num_before + place
            request = EngineRequest(
                f"{request_id}-{index}",
                list(prompt.tokens),
                with_seed_of(options, place),
                tenant=self.caller.tenant,
            )
            text = OutputText(tokenizer, rules, hidden)
            parser = plan.parser() if plan else None
            choices.append(Choice(index, request, prompt, text, bool(rules.strings), parser))
        return choices

    def took(self, delta: Delta) -> None:
        """Keep the record up with what has been generated; the key pays by it."""
        if self.record.ttft_s is None:
            self.record.ttft_s = time.perf_counter() - self.start_s
        self.record.completion_tokens = (self.record.completion_tokens or 0) + delta.num_tokens

    def ended(self, generation: Generation) -> None:
        """Write down how the request went, as far as it got."""
        record, passes, usage = self.record, generation.passes, generation.usage()
        record.completion_tokens = usage["completion_tokens"]
        record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        record.forward_passes = passes.num_passes
        record.queue_s = passes.queue_s
        if passes.num_passes:
            record.threshold_mean = passes.mean_threshold
            record.threshold_min = passes.min_threshold


def _structure(body: GenerationRequest, plan: ToolPlan | None) -> Structure | None:
    """What the whole output has to match, by the body's own wish or for its tools."""
    structure = structure_of(body)
    if plan is None or plan.grammar is None:
        return structure
    if structure is not None:
        reason = f"{structure.field} asks for a structure already; leave it out"
        raise invalid_value("tools", f"{reason}, or set tool_choice to auto without strict tools")
    return Structure("tools", plan.grammar)


def _begin(
    models: Mapping[str, ServedModel],
    body: GenerationRequest,
    request: Request,
    limits: LimitSettings,
) -> _Call:
    """Find the model and refuse what no model does."""
    record: RequestRecord = request.state.record
    record.model, record.stream = body.model, bool(body.stream)
    model = find_model(models, body.model)
    body.refuse_unsupported()
    return _Call(body, model, request.state.caller, limits, record, time.perf_counter())


async def _respond(call: _Call, generation: Generation) -> Response:
    if call.body.stream:
        events = _events(call, generation)
        first = await anext(events)  # what fails at once gets a status of its own
        return EventStream(first, events)
    try:
        deltas = await run_all(generation.choices, generation.model.backend)
    except Exception as error:
        raise as_api_error(error, generation.grammar_field) from error
    finally:
        call.ended(generation)
    call.record.finish_reason = deltas[-1][-1].finish_reason
    body = to_json(generation.response(deltas))
    return Response(body, media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events; however the response ends, what makes the events is closed with it."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(_joined(first, rest), media_type="text/event-stream", headers=_SSE_HEADERS)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)


async def _joined(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for event in rest:
        yield event


async def _events(call: _Call, generation: Generation) -> AsyncGenerator[bytes]:
    """Server-sent events, one a forward pass; an error after the first is an event, too."""
    has_begun = False
    try:
        async with aclosing(stream_all(generation.choices, generation.model.backend)) as deltas:
            async for delta in deltas:
                call.took(delta)
                call.record.finish_reason = delta.finish_reason
                yield _sse(generation.event(delta))
                has_begun = True
    except Exception as error:
        problem = as_api_error(error, generation.grammar_field)
        if not has_begun:
            raise problem from error
        call.record.error_code = problem.code
        yield _sse(problem.body())
        return
    finally:
        call.ended(generation)
    if generation.usage_events.at_end:
        yield _sse(generation.usage_event())
    yield b"data: [DONE]\n\n"


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + to_json(event) + b"\n\n"
