"""Keys of the server as they are written down: by hash, with what each may do.

Knows neither where the text comes from nor how a request gives its key.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter

import yaml
from pydantic import Field, ValidationError, model_validator

from mars_platform.config import Settings
from mars_platform.errors import UserError
from mars_platform.tier import Tier

_PREFIX = "mars-"
_NUM_RANDOM_BYTES = 32
_MAX_SHOWN = 32  # characters of an unknown field's name


class KeyEntry(Settings):
    """One key, and what requests that give it may do."""

    name: str = Field(min_length=1, max_length=64)
    """Who it belongs to, as logs and metrics call it."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the key, in lower-case hexadecimal; ``marsray key`` makes both."""
    tiers: list[Tier] = Field(default=[Tier.DEFAULT, Tier.FLEX], min_length=1)
    """Values of ``service_tier`` that its requests may have."""
    min_confidence_threshold: float = Field(default=0, ge=0, le=1)
    """Lowest τ that any of its requests is decoded with."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Requests that it may have running or waiting at once; by default any number."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and output tokens together; by default any number."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that generate text; by default any number."""
    tenant: str | None = Field(default=None, max_length=128)
    """Keys of one tenant share stored prefixes of prompts; by default a key shares with none."""
    admin: bool = False
    """Whether it may use the paths below /admin."""


class KeyFile(Settings):
    """What a file or variable of keys holds."""

    keys: list[KeyEntry]
    """No two with the same name or hash. An empty list keeps everybody out."""

    @model_validator(mode="after")
    def _consistent(self) -> KeyFile:
        refuse_duplicates(self.keys)
        return self


def refuse_duplicates(entries: list[KeyEntry]) -> None:
    """Check that no two keys share a name or a hash.

    Raises:
        ValueError: two do; the message names them.
    """
    names = Counter(entry.name for entry in entries)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ValueError(f"two keys have the name {repeated[0]!r}; names must differ")
    by_hash: dict[str, str] = {}
    for entry in entries:
        other = by_hash.setdefault(entry.sha256, entry.name)
        if other != entry.name:
            raise ValueError(f"{other!r} and {entry.name!r} have the same hash; make one anew")


def parse_keys(text: str, source: str) -> list[KeyEntry]:
    """Keys from YAML or JSON.

    Raises:
        UserError: naming ``source`` and the field, but no value: somebody may have written a key
            where its hash belongs, and messages end up in logs.
    """
    try:
        content = yaml.load(text, Loader=yaml.CSafeLoader)  # the safe one's fast twin
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"{source}: not valid YAML{line}") from None
    if not isinstance(content, dict):
        raise UserError(f"{source}: the top level must be a mapping with the list 'keys'")
    try:
        return KeyFile.model_validate(content).keys
    except ValidationError as error:
        raise UserError(f"{source}: {_describe(error)}") from None


def _describe(error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        *parents, last = [*item["loc"], ""] if item["type"] == "value_error" else item["loc"]
        if item["type"] == "extra_forbidden" and not _is_plain(last):
            last = "a field"
        where = ".".join(str(part) for part in (*parents, last) if part != "")
        reason = item["msg"].removeprefix("Value error, ")
        problems.append(f"{where}: {reason}" if where else reason)
    return "; ".join(problems)


def _is_plain(name: object) -> bool:
    """Whether it reads like a field's name, and not like a key."""
    return isinstance(name, str) and name.isidentifier() and len(name) <= _MAX_SHOWN


def new_key() -> str:
    """A random key; only its hash is ever stored."""
    return _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)


def hash_key(key: bytes) -> str:
    """SHA-256 of a key, in hexadecimal.

    A slow hash as for passwords would gain nothing: a key is 256 random bits, which nobody can
    guess however fast he tries, and it would cost every request.
    """
    return hashlib.sha256(key).hexdigest()
