"""The command ``marsray key``."""

from __future__ import annotations

from typing import Annotated

import typer

from mars_serve.cli.options import AsJson


def key(
    name: Annotated[str, typer.Argument(help="Owner of the key, as logs name it.")],
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="Allowed service_tier: default, flex or priority. May be repeated; by default "
            "default and flex."
        ),
    ] = None,
    min_confidence_threshold: Annotated[
        float | None, typer.Option(help="Lowest threshold of the key's requests, in [0, 1].")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Largest number of concurrent requests.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Limit of prompt and output tokens together.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Limit of generating requests.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Share cached prefixes with keys of the same tenant.")
    ] = None,
    no_audit: Annotated[
        bool, typer.Option("--no-audit", help="Never decode the key's outputs again to audit them.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="Allow the paths below /admin.")] = False,
    control_tokens: Annotated[
        bool,
        typer.Option(
            "--control-tokens",
            help="Allow control tokens, such as <|im_start|>, in prompts of /v1/completions.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an API key for a server.

    Prints the key and its entry for the key file. The entry contains only the key's hash, so the
    key cannot be shown again.
    """
    import json

    import yaml

    from mars_platform.config import build_settings
    from mars_serve.config.key_file import KeyEntry, hash_key, new_key

    secret = new_key()
    given = {
        "name": name,
        "sha256": hash_key(secret.encode()),
        "tiers": tier,
        "min_confidence_threshold": min_confidence_threshold,
        "max_concurrent": max_concurrent,
        "tokens_per_minute": tokens_per_minute,
        "requests_per_minute": requests_per_minute,
        "tenant": tenant,
        "control_tokens": control_tokens or None,
        "audit": False if no_audit else None,
        "admin": admin or None,
    }
    content = {field: value for field, value in given.items() if value is not None}
    build_settings(content, KeyEntry, source="options")
    if as_json:
        typer.echo(json.dumps({"key": secret, "entry": content}))
    else:
        entry = yaml.safe_dump([content], sort_keys=False, allow_unicode=True)
        typer.echo(
            f"{secret}\n\nIts entry below 'keys:' in the file that keys.file names:\n\n{entry}"
        )
