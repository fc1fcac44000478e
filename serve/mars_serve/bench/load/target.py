"""Checks the server that a load test is for, and asks it what the test has to know."""

import resource
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from mars_platform.cli.addresses import parsed_address, without_version
from mars_platform.errors import UserError
from mars_serve.config.settings import is_loopback

_TIMEOUT_S = 30.0
"""Most seconds that a request before the test may take."""
_KEEP_ALIVE_S = 1.0
"""Seconds after which an idle connection is not used again.

A server closes its idle connections after some seconds, and a request sent just then fails."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member"
)


def checked_url(url: str, *, allow_remote: bool) -> str:
    """Return the server's address as a base for paths, without the ``/v1`` of OpenAI clients.

    Raises:
        UserError: it is not an HTTP address, or it is another machine's without ``allow_remote``.
    """
    parsed = parsed_address(url, "--url")
    if not (allow_remote or is_loopback(parsed.host)):
        raise UserError(
            f"--url: {parsed.host} is not this machine, and a load test may take a server down; "
            "add --allow-remote if it is yours to test"
        )
    return without_version(url)


def allow_connections() -> None:
    """Raise the process's limit of open files, one for each connection, to the system's maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS reports an infinite maximum and refuses to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_client(url: str, key: str | None) -> httpx.AsyncClient:
    """Return a client without a limit of connections that follows no redirect."""
    return httpx.AsyncClient(
        base_url=url,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S
        ),
        timeout=None,  # noqa: S113  # the sender limits each request as a whole
        trust_env=False,  # a proxy would be measured with the server
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
    """Return the number of tokens, prompt and output together, that a model takes.

    Raises:
        UserError: the server cannot be reached, is not a marsray server or lacks the model.
    """
    models = await _ask(client, _Models, "GET", "/v1/models")
    lengths = {each.id: each.max_model_len for each in models.data}
    if model not in lengths:
        raise UserError(f"--model: the server has no {model}; it has {', '.join(lengths)}")
    return lengths[model]


async def vocabulary_of(client: httpx.AsyncClient, model: str) -> list[int]:
    """Return distinct token ids of ordinary text, in rising order, for made-up prompts."""
    body = {"model": model, "prompt": _WORDS, "add_special_tokens": False}
    tokens = await _ask(client, _Tokens, "POST", "/tokenize", body)
    return sorted(set(tokens.tokens))


async def prompt_length_of(client: httpx.AsyncClient, model: str, request: dict[str, Any]) -> int:
    """Return the number of tokens of the prompt that a conversation becomes."""
    body = {"model": model, **request}
    return len((await _ask(client, _Tokens, "POST", "/tokenize", body)).tokens)


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
            f"--key-env: {where} gives {response.status_code}; name a variable with a valid key"
        )
    if response.status_code != httpx.codes.OK:
        raise UserError(f"--url: {where} gives {response.status_code}: {response.text[:300]}")
    try:
        return shape.model_validate_json(response.content)
    except ValidationError as error:
        raise UserError(
            f"--url: {where} does not answer as marsray does; give a marsray server's address"
        ) from error
