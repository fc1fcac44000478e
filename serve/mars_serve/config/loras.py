"""The LoRA adapters of a model that requests can name.

Imports no Ray or HTTP library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mars_serve.engine.request import LoraReference

MOST_LORAS = 256
"""Most LoRA adapters of a model at a time, if some are loaded on a running server."""


@dataclass(frozen=True)
class LoraChanges:
    """LoRA adapters that were loaded and unloaded on a running server."""

    version: int = 0
    """Number that grows with every change."""
    loras: Mapping[str, LoraReference | None] = field(default_factory=dict)
    """Adapters by name; None for one of the settings that was unloaded."""


class LoraNames:
    """The LoRA adapters of a model, as one ingress replica knows them."""

    def __init__(self, configured: Mapping[str, LoraReference] | None = None) -> None:
        """Start with the adapters of the settings."""
        self._configured = configured or {}
        self.changes = LoraChanges()
        """Latest changes that are known."""

    def take(self, changes: LoraChanges) -> None:
        """Take changes that came from the governor; any thread may call this."""
        if changes.version >= self.changes.version:
            self.changes = changes

    def with_change(self, name: str, lora: LoraReference | None) -> LoraChanges:
        """Return the changes and a further one: an adapter is loaded, or unloaded if None."""
        loras = {**self.changes.loras, name: lora}
        if lora is None and name not in self._configured:
            del loras[name]
        return LoraChanges(self.changes.version + 1, loras)

    @property
    def current(self) -> dict[str, LoraReference]:
        """Adapters that requests can name."""
        found = {**self._configured, **self.changes.loras}
        return {name: lora for name, lora in found.items() if lora is not None}
