"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: a model's tokenizer over HTTP.

The ingress answers these without a replica.

Source: vLLM's OpenAI-compatible server, which has the same endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict
from pydantic_core import to_json

from mars_serve.api.errors import check_token_ids, invalid_value
from mars_serve.api.incoming.prompts import encode_chat, encode_text
from mars_serve.api.incoming.sizes import (
    check_num_ids,
    checked_size_of_chat,
)
from mars_serve.api.incoming.threads import TextThreads
from mars_serve.api.keys import Caller
from mars_serve.api.messages import Flag, Messages, TemplateKwargs, Tools
from mars_serve.api.schema import Shape, errors_described
from mars_serve.api.text import decode
from mars_serve.api.tools import prepare_tools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.middleware.records import RequestRecord

MAX_IDS = 2**20
"""Largest number of token ids in one request."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_ABSENT: JsonDict = {"type": "null"}
_NONE: JsonDict = {"type": ["array", "null"], "maxItems": 0}
_ONE_OF: JsonDict = {  # a constraint across fields, which no single field can express
    "oneOf": [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, "messages": _ABSENT, "tools": _NONE},
        },
        {
            "required": ["messages"],
            "properties": {"messages": {"type": "array"}, "prompt": _ABSENT},
        },
    ]
}


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(
        extra="ignore", use_attribute_docstrings=True, json_schema_extra=_ONE_OF
    )

    model: str | None = None
    """Name of the model; optional if the server has only one."""
    prompt: Annotated[str, StringConstraints(max_length=2**24)] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    """Tools that the conversation offers."""
    add_generation_prompt: Flag | None = None
    """End a conversation's text with the beginning of the assistant's message, as by default unless
    ``continue_final_message`` is set."""
    continue_final_message: Flag | None = None
    """Leave the end of the last message open."""
    add_special_tokens: Flag | None = None
    """Let the tokenizer add its special tokens; by default only to a prompt, since a conversation's
    template contains them."""
    parse_special_tokens: Flag | None = None
    """Let control tokens in a prompt's text act, as in ``/v1/completions``."""
    return_token_strs: Flag | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    chat_template: None = None
    """Only the model's own template is supported."""


class TokenizeResponse(Shape):
    """Token ids of a text."""

    count: int
    max_model_len: int
    """Largest number of prompt and output tokens together that the model supports."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokenizer's names of the same tokens, if requested."""


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str | None = None
    """Name of the model; optional if the server has only one."""
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]],
        Field(max_length=MAX_IDS, fail_fast=True),
    ]


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
    router = APIRouter(responses=errors_described())

    @router.post("/tokenize", responses={200: {"model": TokenizeResponse}})
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids of a prompt, or of a conversation rendered as a prompt."""
        model = _model_of(models, body.model, request)
        tokens = await _encode(body, model, limits, request.state.caller, threads)
        _charge(request, len(tokens))

        def answer() -> bytes:
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

        return _json(await threads.run(len(tokens), answer))

    @router.post("/detokenize", responses={200: {"model": DetokenizeResponse}})
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        model = _model_of(models, body.model, request)
        tokenizer, ids = model.checkpoint.tokenizer, body.tokens
        check_num_ids("tokens", len(ids), model, limits)
        check_token_ids("tokens", ids, len(tokenizer))
        _charge(request, len(ids))
        text = await threads.run(
            len(ids), lambda: decode(tokenizer, ids, skip_special_tokens=False)
        )
        return _json(to_json({"prompt": text}))

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
    """Count tokens against the key's limit, as those of a prompt."""
    record: RequestRecord = request.state.record
    record.prompt_tokens = num_tokens


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _encode(
    body: TokenizeRequest,
    model: ServedModel,
    limits: LimitSettings,
    caller: Caller,
    threads: TextThreads,
) -> list[int]:
    """Return the token ids of a body's prompt or conversation."""
    if body.prompt is not None and body.messages is None:
        if body.tools:
            raise invalid_value(
                "tools", "a prompt has none; give messages instead, or leave it out"
            )
        found = await encode_text(
            model,
            body.prompt,
            caller,
            limits,
            threads,
            add_special_tokens=body.add_special_tokens is not False,
            parses_special=bool(body.parse_special_tokens),
        )
        return found.ids
    if body.messages is None or body.prompt is not None:
        raise invalid_value("prompt", "give either prompt or messages, and not both")
    size = checked_size_of_chat(body.messages, body.tools, body.chat_template_kwargs, model, limits)
    return await encode_chat(
        model,
        body.messages,
        prepare_tools(body.tools, None, None, model.checkpoint),
        body.chat_template_kwargs,
        limits,
        threads,
        size=size,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
    )
