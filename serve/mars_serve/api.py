"""The FastAPI application. Reaches models through `Backend`; knows neither Ray nor the engine."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from mars_platform import __version__
from mars_platform.checkpoint import Checkpoint
from mars_platform.conversations import render_prompt
from mars_platform.errors import UserError
from mars_platform.mode import Mode
from mars_serve.engine.loop import EngineDied, QueueFull, RequestFailed
from mars_serve.engine.request import DecodingOptions, EngineStatus, StepOutput
from mars_serve.engine.request import Request as EngineRequest
from mars_serve.engine.settings import CPU_PAGES
from mars_serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    MarsBlock,
    Usage,
)
from mars_serve.settings import ModelSettings
from mars_serve.text import TextStream, decode, encode

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_RETRY_AFTER_S = 1
_BODY_NOT_PARSED = (400, "There was an error parsing the body")  # FastAPI's, for bad encodings


class Backend(Protocol):
    """A model's replicas."""

    async def complete(self, request: EngineRequest) -> list[StepOutput]:
        """Run a request to its end."""

    def stream(self, request: EngineRequest) -> AsyncIterator[StepOutput]:
        """Run a request, one item a forward pass."""

    async def status(self) -> EngineStatus:
        """Of one replica; raises if none can serve."""


@dataclass(frozen=True)
class ServedModel:
    """A model that requests can name."""

    settings: ModelSettings
    checkpoint: Checkpoint
    backend: Backend
    created: int
    """Unix time, in seconds."""

    @property
    def max_length(self) -> int:
        """Tokens of a request, prompt and output together, at the most."""
        sizes = self.settings.engine
        if sizes.num_pages is None and self.settings.num_gpus:
            return self.checkpoint.max_length  # the replica takes what its GPU holds
        page_size = sizes.page_size_on("cuda" if self.settings.num_gpus else "cpu")
        return min(self.checkpoint.max_length, (sizes.num_pages or CPU_PAGES) * page_size)


@dataclass
class _Generation:
    """One request on its way through the server."""

    id: str
    kind: str
    """``object`` field of the response."""
    model: ServedModel
    request: EngineRequest
    num_passes: int = 0
    num_tokens: int = 0

    def count(self, output: StepOutput) -> None:
        self.num_passes += 1
        self.num_tokens += len(output.tokens)

    def mars(self) -> dict[str, Any]:
        options = self.request.options
        return MarsBlock(
            mode=options.mode,
            confidence_threshold=options.threshold,
            forward_passes=self.num_passes,
            tokens_per_forward=round(self.num_tokens / max(self.num_passes, 1), 4),
        ).model_dump()

    def usage(self) -> dict[str, Any]:
        prompt = self.request.num_prompt
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.num_tokens,
            total_tokens=prompt + self.num_tokens,
        ).model_dump()

    def body(self, choice: dict[str, Any], *, kind: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind or self.kind,
            "created": int(time.time()),
            "model": self.model.settings.name,
            "choices": [{"index": 0, "logprobs": None, **choice}],
        }


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
        return await _respond(body, _generation("text_completion", model, body, prompt, default))

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
        return await _respond(body, _generation("chat.completion", model, body, prompt, rest))

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
    kind: str, model: ServedModel, body: GenerationRequest, prompt: list[int], default_tokens: int
) -> _Generation:
    """A checked request; ``default_tokens`` limits the output where the body does not."""
    field = body.limit_field
    max_tokens = getattr(body, field) or default_tokens
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
    prefix = "chatcmpl-" if kind == "chat.completion" else "cmpl-"
    request_id = prefix + uuid.uuid4().hex
    options = _decoding_options(model, body, max_tokens)
    return _Generation(request_id, kind, model, EngineRequest(request_id, prompt, options))


def _decoding_options(
    model: ServedModel, body: GenerationRequest, max_tokens: int
) -> DecodingOptions:
    """Effective mode and τ: the request's own, else the model's setting, never below the floor."""
    plain = model.checkpoint.metadata is None
    mode = body.mode or (Mode.AR if plain else model.settings.mode)
    threshold = body.confidence_threshold or model.settings.confidence_threshold
    threshold = max(threshold, body.min_confidence_threshold or 0.0)
    asked = body.mode is Mode.THRESHOLD or (body.confidence_threshold or 1.0) < 1.0
    if plain and asked and body.mode is not Mode.AR:
        param = "mode" if body.mode else "confidence_threshold"
        raise ApiError(
            400,
            f"{param}: {model.settings.name} is a plain AR checkpoint without mars.json and cannot "
            "decode in threshold mode; use mode 'ar'",
            param=param,
            code="unsupported_value",
        )
    if mode is Mode.AR:
        threshold = 1.0
    return DecodingOptions(max_tokens=max_tokens, mode=mode, threshold=threshold)


async def _respond(
    body: GenerationRequest, generation: _Generation
) -> JSONResponse | StreamingResponse:
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = _events(generation, include_usage=usage)
        first = await anext(events)  # what fails at once gets a status of its own
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")
    try:
        outputs = await generation.model.backend.complete(generation.request)
    except Exception as error:
        raise _as_api_error(error) from error
    for output in outputs:
        generation.count(output)
    tokens = [token for output in outputs for token in output.tokens]
    text = decode(generation.model.checkpoint.tokenizer, tokens)
    choice: dict[str, Any] = {"finish_reason": outputs[-1].finish_reason}
    if generation.kind == "chat.completion":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    response = generation.body(choice)
    return JSONResponse({**response, "usage": generation.usage(), "mars": generation.mars()})


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


async def _events(generation: _Generation, *, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events, one a forward pass; an error after the first is an event, too."""
    stream = TextStream(generation.model.checkpoint.tokenizer)
    try:
        async for output in generation.model.backend.stream(generation.request):
            generation.count(output)
            text = stream.push(output.tokens, last=output.finish_reason is not None)
            yield _sse(_chunk(generation, text, output))
    except Exception as error:
        if generation.num_passes == 0:
            raise _as_api_error(error) from error
        yield _sse(_as_api_error(error).body())
        return
    if include_usage:
        kind = _chunk_kind(generation)
        yield _sse({**generation.body({}, kind=kind), "choices": [], "usage": generation.usage()})
    yield "data: [DONE]\n\n"


def _chunk(generation: _Generation, text: str, output: StepOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": output.finish_reason}
    if generation.kind == "chat.completion":
        role = {"role": "assistant"} if generation.num_passes == 1 else {}
        choice["delta"] = {**role, "content": text}
    else:
        choice["text"] = text
    summary = generation.mars() if output.finish_reason is not None else {}
    chunk = generation.body(choice, kind=_chunk_kind(generation))
    return {**chunk, "mars": {"tokens": len(output.tokens), **summary}}


def _chunk_kind(generation: _Generation) -> str:
    is_chat = generation.kind == "chat.completion"
    return "chat.completion.chunk" if is_chat else generation.kind


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
            "modes": [Mode.AR] if metadata is None else [Mode.THRESHOLD, Mode.AR],
            "block_size": metadata.block_size if metadata else None,
        },
    }


def _as_api_error(error: Exception) -> ApiError:
    """What a backend raised, as an error of the API."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error), param=str(error).partition(":")[0])
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
