"""Addresses and keys of servers, for commands that ask one. Imports no Ray or torch."""

from __future__ import annotations

import os

from mars_platform.cli.addresses import parsed_address, without_version
from mars_platform.errors import UserError


def is_url(text: str) -> bool:
    """Return whether an argument is an address and no checkpoint."""
    return "://" in text


def server_url(text: str) -> str:
    """Return a server's address as a base for paths, without the ``/v1`` of OpenAI clients.

    Raises:
        UserError: it is no HTTP address, or holds a password.
    """
    if parsed_address(text, "URL").userinfo:
        raise UserError(
            "URL: it holds a name or password, which other users of this machine could read; put a "
            "key into an environment variable and name it with --key-env"
        )
    return without_version(text)


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
