"""Reads the addresses and keys of servers that commands are given."""

import os

import httpx

from mars_platform.errors import UserError


def parsed_address(text: str, option: str) -> httpx.URL:
    """Return the server's address in ``text``; errors name ``option``, which it was given for."""
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UserError(
            f"{option}: {text} is no address ({error}); give http://HOST:PORT"
        ) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{option}: {text} is not http or https; give http://HOST:PORT")
    return parsed


def without_version(text: str) -> str:
    """Return an address as a base for paths, without the ``/v1`` of OpenAI clients."""
    return text.rstrip("/").removesuffix("/v1")


def key_in(variable: str | None) -> str | None:
    """Return the key in an environment variable; None if no variable is named.

    Raises:
        UserError: the variable is not set, or holds what no header can.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"--key-env: {variable} is not set; put the server's key into it")
    if not key.isascii():
        raise UserError(f"--key-env: {variable} holds no key: keys are ASCII")
    return key
