"""The FastAPI application. Reaches models through `Backend`; knows neither Ray nor the engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from mars_platform import __version__
from mars_platform.conversations import render_prompt
from mars_platform.errors import UserError
from mars_platform.mode import Mode
from mars_serve.choices import Choice, run_all, stream_all
from mars_serve.engine.loop import EngineDied, QueueFull, RequestFailed
from mars_serve.engine.request import EngineStatus
from mars_serve.engine.request import Request as EngineRequest
from mars_serve.options import decoding_options, stop_rules, structure_of, with_seed_of
from mars_serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from mars_serve.responses import Generation
from mars_serve.served import ServedModel
from mars_serve.text import TokenBytes, encode

__all__ = ["ServedModel", "create_app"]

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_RETRY_AFTER_S = 1
_GRAMMAR = "grammar"  # how the engine calls the field that asks for a structure
_BODY_NOT_PARSED = (400, "There was an error parsing the body")  # FastAPI's, for bad encodings


def create_app(models: Mapping[str, ServedModel]) -> FastAPI:
    """The REST application over some models."""
    app = FastAPI(title="marsray", version=__version__)
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether every model has a replica that can serve."""
        engines = {name: asdict(await _status(model)) for name, model in models.items()}
        return JSONResponse({"status": "ok", "models": engines})

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        """The models that requests can name."""
        entries = [_model_entry(model) for model in models.values()]
        return JSONResponse({"object": "list", "data": entries})

    @app.post("/v1/completions", response_model=None)
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

    @app.post("/v1/chat/completions", response_model=None)
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

    return app


async def _status(model: ServedModel) -> EngineStatus:
    try:
        return await model.backend.status()
    except Exception as error:
        raise ApiError(
            503,
            f"model {model.settings.name}: no replica is ready ({type(error).__name__})",
            code="not_ready",
            retry_after_s=_RETRY_AFTER_S,
        ) from error


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
        raise _as_api_error(error, generation.grammar_field) from error
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
        problem = _as_api_error(error, generation.grammar_field)
        if not has_begun:
            raise problem from error
        yield _sse(problem.body())
        return
    if include_usage:
        yield _sse(generation.usage_event())
    yield "data: [DONE]\n\n"


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _model_entry(model: ServedModel) -> dict[str, Any]:
    metadata = model.checkpoint.metadata
    return {
        "id": model.settings.name,
        "object": "model",
        "created": model.created,
        "owned_by": "marsray",
        "max_model_len": model.max_length,
        "mars": {
            "modes": list(Mode) if metadata or model.settings.draft else [Mode.AR],
            "block_size": metadata.block_size if metadata else None,
        },
    }


def _as_api_error(error: Exception, grammar_field: str | None) -> ApiError:
    """What a backend raised, as an error of the API."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return _refused(error, grammar_field)
    if isinstance(error, QueueFull):
        return ApiError(
            503,
            "the queue is full; try again shortly",
            code="queue_full",
            retry_after_s=_RETRY_AFTER_S,
        )
    if isinstance(error, EngineDied):
        return ApiError(
            503, "the replica has failed", code="not_ready", retry_after_s=_RETRY_AFTER_S
        )
    if isinstance(error, RequestFailed):
        return ApiError(500, "the model failed on this request", code="request_failed")
    return ApiError(500, f"internal error ({type(error).__name__})", code="internal_error")


def _refused(error: UserError, grammar_field: str | None) -> ApiError:
    """What the engine refuses; the field that its message begins with is the request's own."""
    message = str(error.args[0])  # Ray's str() of an error is the remote traceback
    param, _, reason = message.partition(":")
    if param == _GRAMMAR and grammar_field is not None:
        param = grammar_field
    return ApiError(400, f"{param}:{reason}", param=param, code="invalid_value")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return await api_error(request, _describe(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == _BODY_NOT_PARSED[0] and error.detail == _BODY_NOT_PARSED[1]:
            return await api_error(request, _unparsable(error.detail))
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = await api_error(request, ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def _unparsable(reason: str) -> ApiError:
    return ApiError(422, f"body: not a valid JSON object ({reason})", code="unparsable")


def _describe(error: RequestValidationError) -> ApiError:
    """The first problem of a request body: 422 if it cannot be parsed, else 400."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not where:
        return _unparsable(first["msg"])
    param = ".".join(part for part in where if part.replace("_", "").isalnum())
    message = f"{param}: {first['msg']}"
    if first["type"] != "missing":
        message += f" (got {str(first['input'])[:80]!r})"
    return ApiError(400, message, param=where[0], code="invalid_value")
