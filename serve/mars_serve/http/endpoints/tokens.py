"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: a model's tokenizer over HTTP.

The ingress answers these without a replica.

Source: vLLM's OpenAI-compatible server, which has the same endpoints.
"""

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from mars_serve.api.bounds import check_num_ids
from mars_serve.api.errors import check_token_ids, invalid_value
from mars_serve.api.incoming.prompts import PromptReader
from mars_serve.api.protocol import DetokenizeRequest, TokenizeRequest
from mars_serve.api.schema import Shape, errors_described
from mars_serve.api.text import decode
from mars_serve.api.text_threads import Load, TextThreads
from mars_serve.api.tools import prepare_tools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.endpoints.json_route import JsonRoute
from mars_serve.http.middleware.records import RequestRecord

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizeResponse(Shape):
    """Token ids of a text."""

    count: int
    max_model_len: int
    """Largest number of prompt and output tokens together that the model supports."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokenizer's names of the same tokens, if requested."""


class DetokenizeResponse(Shape):
    """Text of token ids, special tokens included."""

    prompt: str


class TokenizerInfo(Shape):
    """Facts about a tokenizer with which a client can build prompts."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    """Number of tokens, added ones included."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


def tokens_router(
    models: Mapping[str, ServedModel], limits: LimitSettings, threads: TextThreads
) -> APIRouter:
    """Return the router of the endpoints that convert between text and token ids."""
    router = APIRouter(responses=errors_described(), route_class=JsonRoute)

    @router.post("/tokenize", responses={200: {"model": TokenizeResponse}})
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids of a prompt, or of a conversation rendered as a prompt."""
        model = _model_of(models, body.model, request)
        reader = PromptReader(model, limits, request.state.caller)

        def answer() -> bytes:
            tokens = _encode(body, reader)
            _charge(request, len(tokens))
            tokenizer = model.checkpoint.tokenizer
            names = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
            return to_json(
                {
                    "count": len(tokens),
                    "max_model_len": model.max_length,
                    "tokens": tokens,
                    "token_strs": names,
                }
            )

        load: Load = request.state.load
        return _json(await threads.read(load, load.size, answer))

    @router.post("/detokenize", responses={200: {"model": DetokenizeResponse}})
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        model = _model_of(models, body.model, request)
        tokenizer, ids = model.checkpoint.tokenizer, body.tokens
        check_num_ids("tokens", len(ids), model, limits)
        check_token_ids("tokens", ids, len(tokenizer))
        _charge(request, len(ids))

        def answer() -> bytes:
            return to_json({"prompt": decode(tokenizer, ids, skip_special_tokens=False)})

        load: Load = request.state.load
        return _json(await threads.read(load, load.size, answer))

    @router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}})
    async def tokenizer_info(request: Request, model: str | None = None) -> JSONResponse:
        """Return the tokenizer's special tokens and chat template."""
        found = _model_of(models, model, request)
        tokenizer = found.checkpoint.tokenizer
        special = {name: getattr(tokenizer, name) for name in _SPECIAL}
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "model_max_length": found.max_length,
                "vocab_size": len(tokenizer),
                **special,
                # of several templates, the one for conversations without tools
                "chat_template": tokenizer.chat_template and tokenizer.get_chat_template(),
            }
        )

    return router


def _model_of(models: Mapping[str, ServedModel], name: str | None, request: Request) -> ServedModel:
    if name is None:
        if len(models) > 1:
            raise invalid_value("model", f"it is missing; give one of {', '.join(models)}")
        name = next(iter(models))
    record: RequestRecord = request.state.record
    record.model = name
    return find_model(models, name)


def _charge(request: Request, num_tokens: int) -> None:
    record: RequestRecord = request.state.record
    record.prompt_tokens = num_tokens


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _encode(body: TokenizeRequest, reader: PromptReader) -> list[int]:
    if body.prompt is not None and body.messages is None:
        if body.tools:
            raise invalid_value(
                "tools", "a prompt has none; give messages instead, or leave it out"
            )
        return reader.text(body, body.prompt).ids
    if body.messages is None or body.prompt is not None:
        raise invalid_value("prompt", "give either prompt or messages, and not both")
    reader.check_chat(body, body.messages)
    tools = prepare_tools(body.tools, None, None, reader.model.checkpoint)
    return reader.chat(body, body.messages, tools)
