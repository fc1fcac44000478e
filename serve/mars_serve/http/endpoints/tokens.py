"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: a model's tokenizer over HTTP.

No replica is asked. Source: vLLM's OpenAI-compatible server, whose endpoints these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict
from transformers import PreTrainedTokenizerBase

from mars_platform.data.conversations import render_prompt
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.incoming.prompts import encode_prompt
from mars_serve.api.messages import Flag, Messages, TemplateKwargs, Tools, messages_for_template
from mars_serve.api.schema import Shape, errors_described
from mars_serve.api.tools import plan_tools
from mars_serve.config.served import ServedModel
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.middleware.records import RequestRecord

MAX_IDS = 2**20
"""Token ids of one request."""

_ABSENT: JsonDict = {"type": "null"}
_NONE: JsonDict = {"type": ["array", "null"], "maxItems": 0}
_ONE_OF: JsonDict = {  # what no field alone can say
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


def _refuse(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported; leave it out")
    return value


Unset = Annotated[Flag, AfterValidator(_refuse), Field(json_schema_extra={"const": False})]
"""A flag that may only be false; ``Literal[False]`` would take a 0, too."""


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``: a prompt, or a conversation."""

    model_config = ConfigDict(
        extra="ignore", use_attribute_docstrings=True, json_schema_extra=_ONE_OF
    )

    model: str | None = None
    """May be left out where the server has one model."""
    prompt: Annotated[str, StringConstraints(max_length=2**24)] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    """What the conversation offers."""
    add_generation_prompt: Flag = True
    """Whether a conversation's text ends where the model's turn begins."""
    add_special_tokens: Flag | None = None
    """Whether the tokenizer adds its own: by default to a prompt, as templates bring theirs."""
    return_token_strs: Flag | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    chat_template: None = None
    """Templates are the model's own here."""
    continue_final_message: Unset | None = None
    """Not to be had here."""


class TokenizeResponse(Shape):
    """Token ids."""

    count: int
    max_model_len: int
    """Tokens of prompt and output together that the model takes."""
    tokens: list[int]
    token_strs: list[str] | None
    """The same tokens as the tokenizer names them, where asked for."""


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str | None = None
    """May be left out where the server has one model."""
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]], Field(max_length=MAX_IDS)
    ]


class DetokenizeResponse(Shape):
    """Text of token ids, special tokens included."""

    prompt: str


class TokenizerInfo(Shape):
    """What a client needs to make prompts itself."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    """Tokens, added ones included."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


def tokens_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """The endpoints that translate between text and token ids."""
    router = APIRouter()

    @router.post("/tokenize", responses={200: {"model": TokenizeResponse}, **errors_described()})
    async def tokenize(body: TokenizeRequest, request: Request) -> JSONResponse:
        """Token ids of a prompt, or of what a conversation's prompt would be."""
        model = _model_of(models, body.model, request)
        tokenizer = model.checkpoint.tokenizer
        text, adds_special = _text_of(body, model)
        tokens = await encode_prompt(tokenizer, text, add_special_tokens=adds_special)
        names = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": model.max_length,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    @router.post(
        "/detokenize", responses={200: {"model": DetokenizeResponse}, **errors_described()}
    )
    async def detokenize(body: DetokenizeRequest, request: Request) -> JSONResponse:
        """Text of token ids."""
        tokenizer = _model_of(models, body.model, request).checkpoint.tokenizer
        limit = len(tokenizer)
        largest = max(body.tokens, default=0)
        if largest >= limit:
            reason = f"token id {largest} is not below the {limit} known; use the model's own ids"
            raise invalid_value("tokens", reason)
        return JSONResponse({"prompt": await asyncio.to_thread(_decode, tokenizer, body.tokens)})

    @router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}, **errors_described()})
    async def tokenizer_info(request: Request, model: str | None = None) -> JSONResponse:
        """The tokenizer's special tokens and chat template."""
        found = _model_of(models, model, request)
        tokenizer = found.checkpoint.tokenizer
        special = {name: getattr(tokenizer, name) for name in _SPECIAL}
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "model_max_length": found.max_length,
                "vocab_size": len(tokenizer),
                **special,
                "chat_template": _template_of(tokenizer),
            }
        )

    return router


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _model_of(models: Mapping[str, ServedModel], name: str | None, request: Request) -> ServedModel:
    if name is None:
        if len(models) > 1:
            raise invalid_value("model", f"it is missing; give one of {', '.join(models)}")
        name = next(iter(models))
    record: RequestRecord = request.state.record
    record.model = name
    return find_model(models, name)


def _text_of(body: TokenizeRequest, model: ServedModel) -> tuple[str, bool]:
    """The text to tokenise, and whether special tokens are added to it."""
    if body.prompt is not None and body.messages is None:
        if body.tools:
            raise invalid_value(
                "tools", "a prompt has none; give messages instead, or leave it out"
            )
        return body.prompt, body.add_special_tokens is not False
    if body.messages is None or body.prompt is not None:
        raise invalid_value("prompt", "give either prompt or messages, and not both")
    checkpoint = model.checkpoint
    plan = plan_tools(body.tools, None, None, checkpoint)
    try:
        text = render_prompt(
            checkpoint.tokenizer,
            messages_for_template(body.messages),
            plan.template_tools if plan else None,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
    except UserError as error:
        param = str(error).partition(":")[0]
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    return text, bool(body.add_special_tokens)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template of conversations without tools, where there are several."""
    return None if tokenizer.chat_template is None else tokenizer.get_chat_template()
