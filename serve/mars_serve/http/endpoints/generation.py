"""``/v1/completions`` and ``/v1/chat/completions``: generate text with a model's `Backend`."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mars_serve.api.outgoing.completions import ChatWriter, CompletionWriter
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest
from mars_serve.api.schema import ChatCompletionResponse, CompletionResponse, generation_described
from mars_serve.http.endpoints.generator import Dialect, Generator
from mars_serve.http.endpoints.json_route import JsonRoute


def generation_router(generator: Generator) -> APIRouter:
    """Return the router of OpenAI's completions and chats."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/v1/completions", response_model=None, responses=generation_described(CompletionResponse)
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts given as text or token ids."""
        dialect = Dialect(body, partial(CompletionWriter, body=body))
        return await generator.complete(body, request, dialect)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses=generation_described(ChatCompletionResponse),
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await generator.chat(body, request, Dialect(body, partial(ChatWriter, body=body)))

    return router
