"""Reads the addresses of servers that commands are given."""

from __future__ import annotations

import httpx

from mars_platform.errors import UserError


def parsed_address(text: str, option: str) -> httpx.URL:
    """Return a server's address.

    Args:
        text: the address as it was given.
        option: name of the option or argument, for errors.

    Raises:
        UserError: it is no HTTP address.
    """
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
