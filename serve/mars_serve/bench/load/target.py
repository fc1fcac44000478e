"""The server that a load test is for: whether it may be one, and what has to be known of it."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from mars_platform.errors import UserError
from mars_serve.bench.load.answers import Autoscalers
from mars_serve.bench.load.costs import Losses
from mars_serve.config.settings import is_loopback

_TIMEOUT_S = 30.0
"""Of a question before the test."""
_KEEP_ALIVE_S = 1.0
"""A connection that idles longer is not used again: servers close theirs after some seconds, and a
request that meets the closing fails."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member"
)


def checked_url(url: str, *, allow_remote: bool) -> str:
    """The server's address, as a base of paths; an OpenAI base address loses its ``/v1``.

    Raises:
        UserError: it is no HTTP address, or one of another machine without ``allow_remote``.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"--url: {url} is no address ({error}); give http://HOST:PORT") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"--url: {url} is not http or https; give http://HOST:PORT")
    if not (allow_remote or is_loopback(parsed.host)):
        raise UserError(
            f"--url: {parsed.host} is not this machine, and a load test may take a server down; "
            "add --allow-remote if it is yours to test"
        )
    return url.rstrip("/").removesuffix("/v1")


def allow_connections() -> None:
    """Let this process have as many open as the system lets it: each is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS names no limit, and then refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_client(url: str, key: str | None) -> httpx.AsyncClient:
    """A client that opens as many connections as there are requests, and follows no redirect.

    Args:
        url: from `checked_url`.
        key: of the server; None sends none.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S
        ),
        timeout=None,  # noqa: S113  # requests have a limit as a whole
        trust_env=False,  # no proxy stands between
    )


_ShapeT = TypeVar("_ShapeT", bound=BaseModel)


class _Model(BaseModel):
    id: str
    max_model_len: int


class _Models(BaseModel):
    data: list[_Model]


class _Tokens(BaseModel):
    tokens: list[int]


async def max_length_of(client: httpx.AsyncClient, model: str) -> int:
    """Tokens of prompt and output together that a model takes.

    Raises:
        UserError: the server cannot be reached, is no marsray server or does not have the model.
    """
    models = await _ask(client, _Models, "GET", "/v1/models")
    lengths = {each.id: each.max_model_len for each in models.data}
    if model not in lengths:
        raise UserError(f"--model: the server has no {model}; it has {', '.join(lengths)}")
    return lengths[model]


async def vocabulary_of(client: httpx.AsyncClient, model: str) -> list[int]:
    """Token ids of ordinary text, distinct and in order, for made-up prompts.

    Raises:
        UserError: the server does not tell.
    """
    body = {"model": model, "prompt": _WORDS, "add_special_tokens": False}
    tokens = await _ask(client, _Tokens, "POST", "/tokenize", body)
    return sorted(set(tokens.tokens))


async def prompt_length_of(
    client: httpx.AsyncClient, model: str, messages: list[dict[str, Any]]
) -> int:
    """Tokens of the prompt that a conversation becomes.

    Raises:
        UserError: the server refuses the conversation.
    """
    body = {"model": model, "messages": messages}
    return len((await _ask(client, _Tokens, "POST", "/tokenize", body)).tokens)


async def losses_of(client: httpx.AsyncClient, model: str) -> Losses:
    """What each τ costs in quality, by the server's own frontier; never fails."""
    path = "/admin/autoscaler"
    try:
        response = await client.get(path, timeout=_TIMEOUT_S)
        if response.status_code != httpx.codes.OK:
            return Losses(refusal=f"{path} gave {response.status_code}")
        autoscaler = Autoscalers.model_validate_json(response.content).models.get(model)
    except (httpx.HTTPError, ValidationError) as error:
        return Losses(refusal=f"{path} gave no answer ({type(error).__name__})")
    if autoscaler is None or autoscaler.plan is None:
        return Losses(refusal=f"{path} shows no frontier of {model}")
    ladder = autoscaler.plan.ladder
    return Losses({rung.confidence_threshold: rung.loss for rung in ladder})


async def _ask(
    client: httpx.AsyncClient,
    shape: type[_ShapeT],
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
) -> _ShapeT:
    where = f"{method} {client.base_url.join(path)}"
    try:
        response = await client.request(method, path, json=body, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"--url: {where} fails ({reason}); is the server running?") from error
    if response.status_code in (401, 403):
        raise UserError(
            f"--key-env: {where} gives {response.status_code}; name a variable with a key of it"
        )
    if response.status_code != httpx.codes.OK:
        raise UserError(f"--url: {where} gives {response.status_code}: {response.text[:300]}")
    try:
        return shape.model_validate_json(response.content)
    except ValidationError as error:
        raise UserError(f"--url: {where} is not as marsray answers; give its address") from error
