"""``/v1/completions`` and ``/v1/chat/completions``. Reaches models through `Backend` only."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse

from mars_platform.conversations import render_prompt
from mars_platform.errors import UserError
from mars_serve.choices import Choice, run_all, stream_all
from mars_serve.engine.request import Request as EngineRequest
from mars_serve.errors import ApiError
from mars_serve.options import decoding_options, stop_rules, structure_of, with_seed_of
from mars_serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mars_serve.responses import Generation
from mars_serve.rest.errors import as_api_error
from mars_serve.served import ServedModel
from mars_serve.text import TokenBytes, encode

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


def generation_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """The endpoints that generate text."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest) -> JSONResponse | StreamingResponse:
        """Complete a prompt given as text or token ids."""
        model = _find_model(models, body)
        tokenizer = model.checkpoint.tokenizer
        if isinstance(body.prompt, str):
            prompt = encode(tokenizer, body.prompt, add_special_tokens=True)
        else:
            prompt = _checked_ids(body.prompt, model)
        default = _DEFAULT_COMPLETION_TOKENS
        generation = _generation(model, body, prompt, is_chat=False, default_tokens=default)
        return await _respond(body, generation)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest) -> JSONResponse | StreamingResponse:
        """Answer a conversation."""
        model = _find_model(models, body)
        messages = [message.model_dump() for message in body.messages]
        try:
            text = render_prompt(model.checkpoint.tokenizer, messages)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from error
        prompt = encode(model.checkpoint.tokenizer, text, add_special_tokens=False)
        rest = max(model.max_length - len(prompt), 1)
        generation = _generation(model, body, prompt, is_chat=True, default_tokens=rest)
        return await _respond(body, generation)

    return router


def _find_model(models: Mapping[str, ServedModel], body: GenerationRequest) -> ServedModel:
    body.refuse_unsupported()
    model = models.get(body.model)
    if model is None:
        raise ApiError(
            404,
            f"model: there is no {body.model!r} here; this server has {', '.join(models)}",
            param="model",
            code="model_not_found",
        )
    return model


def _checked_ids(prompt: list[int], model: ServedModel) -> list[int]:
    limit = len(model.checkpoint.tokenizer)
    if max(prompt) >= limit:
        raise ApiError(
            400, f"prompt: token id {max(prompt)} is not below the {limit} known", param="prompt"
        )
    return prompt


def _generation(
    model: ServedModel,
    body: GenerationRequest,
    prompt: list[int],
    *,
    is_chat: bool,
    default_tokens: int,
) -> Generation:
    """A checked request; ``default_tokens`` limits the output where the body does not."""
    max_tokens = _checked_length(model, body, prompt, default_tokens)
    structure = structure_of(body)
    options = decoding_options(
        body,
        model.settings,
        model.checkpoint,
        max_tokens=max_tokens,
        grammar=structure.grammar if structure else None,
    )
    request_id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
    tokenizer, rules = model.checkpoint.tokenizer, stop_rules(body)
    choices = []
    for index in range(body.n or 1):
        request = EngineRequest(f"{request_id}-{index}", list(prompt), with_seed_of(options, index))
        choices.append(Choice(index, request, tokenizer, rules))
    grammar_field = structure.field if structure else None
    return Generation(request_id, is_chat, model, choices, TokenBytes(tokenizer), grammar_field)


def _checked_length(
    model: ServedModel, body: GenerationRequest, prompt: list[int], default_tokens: int
) -> int:
    """Output tokens at the most."""
    field = body.limit_field
    max_tokens: int = getattr(body, field) or default_tokens
    if len(prompt) + max_tokens > model.max_length:
        raise ApiError(
            400,
            f"{field}: {len(prompt)} prompt tokens and {max_tokens} output tokens make "
            f"{len(prompt) + max_tokens}, more than the {model.max_length} that this model takes; "
            f"shorten the prompt or lower {field}",
            param=field,
            code="context_length_exceeded",
        )
    if not prompt:
        raise ApiError(400, "prompt: it has no tokens; give at least one", param="prompt")
    return max_tokens


async def _respond(
    body: GenerationRequest, generation: Generation
) -> JSONResponse | StreamingResponse:
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = _events(generation, include_usage=usage)
        first = await anext(events)  # what fails at once gets a status of its own
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")
    try:
        deltas = await run_all(generation.choices, generation.model.backend)
    except Exception as error:
        raise as_api_error(error, generation.grammar_field) from error
    return JSONResponse(generation.response(deltas))


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


async def _events(generation: Generation, *, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events, one a forward pass; an error after the first is an event, too."""
    has_begun = False
    try:
        async for delta in stream_all(generation.choices, generation.model.backend):
            yield _sse(generation.event(delta))
            has_begun = True
    except Exception as error:
        problem = as_api_error(error, generation.grammar_field)
        if not has_begun:
            raise problem from error
        yield _sse(problem.body())
        return
    if include_usage:
        yield _sse(generation.usage_event())
    yield "data: [DONE]\n\n"


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
