"""The command ``marsray key``."""

import json
from typing import Annotated

import typer
import yaml
from pydantic import Field

from mars_platform.cli.options import AsJson, with_options
from mars_platform.config import build_settings
from mars_platform.tier import Tier
from mars_serve.config.key_file import KeyEntry, KeyRights, hash_key, new_key


class _KeyOptions(KeyRights):
    tiers: Annotated[list[Tier], typer.Option("--tier")] = Field(
        default=[Tier.DEFAULT, Tier.FLEX], min_length=1
    )
    """Allowed service_tier. May be repeated."""


@with_options
def key(
    name: Annotated[str, typer.Argument(help="Owner of the key, as logs name it.")],
    rights: _KeyOptions,
    as_json: AsJson = False,
) -> None:
    """Make an API key for a server.

    Prints the key and its entry for the key file. The entry contains only the key's hash, so the
    key cannot be shown again.
    """
    secret = new_key()
    content = {"name": name, "sha256": hash_key(secret.encode())}
    content |= rights.model_dump(mode="json", exclude_defaults=True)
    build_settings(content, KeyEntry, source="options")
    if as_json:
        typer.echo(json.dumps({"key": secret, "entry": content}))
    else:
        entry = yaml.safe_dump([content], sort_keys=False, allow_unicode=True)
        typer.echo(
            f"{secret}\n\nIts entry below 'keys:' in the file that keys.file names:\n\n{entry}"
        )
