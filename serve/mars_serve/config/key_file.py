"""The format of the server's key file: API keys by hash, with their permissions and limits."""

import hashlib
import secrets
from collections import Counter
from typing import Annotated

import yaml
from pydantic import AfterValidator, Field, ValidationError

from mars_platform.config import Settings
from mars_platform.errors import UserError
from mars_platform.tier import Tier

_PREFIX = "mars-"
_NUM_RANDOM_BYTES = 32
_MAX_SHOWN = 32  # longest field name that an error message quotes


class KeyRights(Settings):
    """Permissions and limits of a key."""

    tiers: list[Tier] = Field(default=[Tier.DEFAULT, Tier.FLEX], min_length=1)
    """Values of ``service_tier`` that requests with this key may use."""
    min_confidence_threshold: float = Field(default=0, ge=0, le=1)
    """Lowest τ of requests with this key."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Largest number of requests running or waiting at once; by default unlimited."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and output tokens allowed per minute; by default unlimited."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Generating requests allowed per minute; by default unlimited."""
    tenant: str | None = Field(default=None, max_length=128)
    """Keys with the same tenant share cached prompt prefixes, files, batches and stored responses,
    which each may read and delete; by default a key shares with none."""
    audit: bool = True
    """Whether outputs of this key may be decoded again to measure what faster decoding loses."""
    admin: bool = False
    """Allow the paths below /admin."""
    control_tokens: bool = False
    """Allow control tokens in prompts of /v1/completions: as token ids, and as text with
    ``parse_special_tokens``. For callers that render chat templates themselves."""


class KeyEntry(KeyRights):
    """A key and its permissions and limits."""

    name: str = Field(min_length=1, max_length=64)
    """Owner of the key, as logs and metrics name it."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the key in lower-case hexadecimal; ``marsray key`` prints both."""


def _distinct(entries: list[KeyEntry]) -> list[KeyEntry]:
    names = Counter(entry.name for entry in entries)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ValueError(f"two keys have the name {repeated[0]!r}; names must differ")
    by_hash: dict[str, str] = {}
    for entry in entries:
        other = by_hash.setdefault(entry.sha256, entry.name)
        if other != entry.name:
            raise ValueError(f"{other!r} and {entry.name!r} have the same hash; make one anew")
    return entries


KeyEntries = Annotated[list[KeyEntry], AfterValidator(_distinct)]
"""Keys with distinct names and hashes; an empty list lets nobody in."""


class KeyFile(Settings):
    """Content of a key file or of the environment variable."""

    keys: KeyEntries


def parse_keys(text: str, source: str) -> list[KeyEntry]:
    """Parse keys from YAML or JSON.

    Raises:
        UserError: the message names ``source`` and the field but no value: a key may stand where
            its hash belongs, and messages are logged.
    """
    try:
        content = yaml.load(text, Loader=yaml.CSafeLoader)  # SafeLoader's fast equivalent
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
    return isinstance(name, str) and name.isidentifier() and len(name) <= _MAX_SHOWN


def new_key() -> str:
    """Draw a random key, of which only the hash is ever stored."""
    return _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)


def hash_key(key: bytes) -> str:
    """Return the SHA-256 of a key in hexadecimal.

    A slow password hash would cost every request and gain nothing: a key has 256 random bits, which
    cannot be guessed at any speed.
    """
    return hashlib.sha256(key).hexdigest()
