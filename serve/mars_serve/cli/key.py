"""``marsray key``: a new key for a server, and the entry of its file that lets it in."""

from __future__ import annotations

from typing import Annotated

import typer


def key(
    name: Annotated[str, typer.Argument(help="Who it is for, as logs will call it.")],
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="Allowed service_tier: default, flex or priority; may be repeated. Else default "
            "and flex."
        ),
    ] = None,
    min_confidence_threshold: Annotated[
        float | None, typer.Option(help="Lowest threshold of its requests, in [0, 1].")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests at once.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Prompt and output tokens together.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Shares stored prefixes with keys of the same tenant.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May use the paths below /admin.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Make a key. It is shown this once; the server's file of keys holds only its hash."""
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
