"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API."""

from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mars_serve.api.anthropic.body import ConversationRequest, MessagesRequest
from mars_serve.api.anthropic.errors import COUNT_PATH, PATH
from mars_serve.api.anthropic.schema import MESSAGE_DESCRIBED, TOKENS_DESCRIBED
from mars_serve.api.anthropic.writer import MessageWriter
from mars_serve.http.endpoints.generator import Dialect, Generator
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.endpoints.json_route import JsonRoute


def messages_router(generator: Generator) -> APIRouter:
    """Return the router of the Messages API."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(PATH, response_model=None, responses=MESSAGE_DESCRIBED)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's form."""
        chat = body.to_chat()
        if body.thinking and find_model(generator.models, body.model).thinking is None:
            # clients such as Claude Code ask every model to think
            chat.thinking_token_budget = body.thinking_token_budget
        return await generator.chat(
            chat, request, replace(_dialect(body), most_tokens=body.max_tokens)
        )

    @router.post(COUNT_PATH, response_model=None, responses=TOKENS_DESCRIBED)
    async def count_tokens(body: ConversationRequest, request: Request) -> Response:
        """Count the tokens of a conversation's prompt, with its tools."""
        return await generator.count(body.to_chat(), request, _dialect(body))

    return router


def _dialect(body: ConversationRequest) -> Dialect:
    return Dialect(body, partial(MessageWriter, body=body), body.names)
