"""Builds the settings of ``marsray serve`` from its config file and command-line options."""

from pathlib import Path
from typing import Any

from mars_platform.config import apply_overrides, build_settings, read_yaml
from mars_platform.errors import UserError
from mars_serve.cli.options import ServeOptions
from mars_serve.config.settings import ServeSettings


def serve_settings(options: ServeOptions) -> ServeSettings:
    """Merge the sources: options override the file, ``--set`` overrides both.

    Raises:
        UserError: neither a file nor a model is given, an adapter names none of the models, a model
            gets several, or a value is invalid.
    """
    config = options.config
    if config is None and not options.models:
        raise UserError("give a config file, or a model with --model DIR")
    content: dict[str, Any] = read_yaml(config) if config else {}
    if options.models:
        content["models"] = [_model_entry(model) for model in options.models]
    named = [_add_adapter(content.get("models"), adapter) for adapter in options.adapters]
    if twice := [name for name in named if named.count(name) > 1]:
        raise UserError(f"--adapter: model {twice[0]!r} gets several; a model has one adapter")
    if options.replicas is not None and isinstance(content.get("models"), list):
        entries = [entry for entry in content["models"] if isinstance(entry, dict)]
        for entry in entries:
            entry["num_replicas"] = options.replicas
    content |= options.model_dump(include={"host", "port", "insecure"}, exclude_defaults=True)
    apply_overrides(content, options.overrides)
    return build_settings(content, ServeSettings, source=str(config or "options"))


def _model_entry(text: str) -> dict[str, Any]:
    """Parse ``NAME=DIR``, or a directory or hub id whose last part becomes the name."""
    name, separator, path = text.partition("=")
    if not separator:
        name, path = Path(text).resolve().name if Path(text).exists() else text, text
    return {"name": name, "path": path}


def _add_adapter(models: Any, text: str) -> str:
    """Give the adapter ``NAME=DIR`` to the model of that name, or ``DIR`` to the only model.

    Returns:
        The model's name.
    """
    listed = models if isinstance(models, list) else []
    entries = {str(entry.get("name")): entry for entry in listed if isinstance(entry, dict)}
    name, separator, path = text.partition("=")
    if not separator:
        if len(entries) != 1:
            raise UserError(
                f"--adapter: {text} belongs to one model of {len(entries)}; give it as NAME=DIR"
            )
        name, path = next(iter(entries)), text
    elif name not in entries:
        known = ", ".join(entries) or "none"
        raise UserError(f"--adapter: there is no model {name!r}; the models are {known}")
    entries[name]["adapter"] = path
    return name
