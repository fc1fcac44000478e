"""Holds a model's answer as it grows, and the figures of how it was decoded.

Imports no Ray, torch or HTTP library.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]
"""A message of a conversation, with its role and content."""


@dataclass(frozen=True)
class DecodingChoice:
    """How answers are decoded; None leaves it to the model, or to the server."""

    mode: str | None = None
    threshold: float | None = None
    max_tokens: int | None = None
    temperature: float = 0.0


@dataclass(frozen=True)
class Part:
    """A part of an answer, added by one forward pass."""

    text: str
    num_tokens: int
    thinking: str = ""
    """Text that the model thinks before it answers."""
    decoded: dict[str, Any] = field(default_factory=dict)
    """On the last part: the mode and τ that were used, and why the answer ended."""


class ChatModel(Protocol):
    """A model that continues conversations."""

    name: str

    def answer(self, messages: Sequence[Message], choice: DecodingChoice) -> Iterator[Part]:
        """Yield the parts of the next answer; closing the iterator ends it.

        Raises:
            UserError: the conversation cannot be continued.
            KeyboardInterrupt: the user has pressed Ctrl-C.
        """


@dataclass
class Figures:
    """Counts and times of an answer."""

    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    """Seconds to the first part; None before it."""
    seconds: float = 0.0
    num_tokens: int = 0
    num_passes: int = 0
    decoded: dict[str, Any] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Count a part that has just come."""
        self.seconds = time.monotonic() - self.began_s
        if self.first_s is None:
            self.first_s = self.seconds
        self.num_tokens += part.num_tokens
        self.num_passes += part.num_tokens > 0
        self.decoded |= part.decoded

    def as_dict(self) -> dict[str, Any]:
        """Return the figures under the names that they have in JSON."""
        return {
            "tokens": self.num_tokens,
            "forward_passes": self.num_passes,
            "tokens_per_forward": self.num_tokens / self.num_passes if self.num_passes else None,
            "seconds": self.seconds,
            "first_token_s": self.first_s,
            "tokens_per_s": self.num_tokens / self.seconds if self.seconds else None,
            **self.decoded,
        }

    @property
    def words(self) -> str:
        """The figures as one line."""
        a_pass = self.num_tokens / max(self.num_passes, 1)
        tokens = _counted(self.num_tokens, "token", "tokens")
        passes = _counted(self.num_passes, "forward pass", "forward passes")
        line = f"{tokens} in {passes} ({a_pass:.2f} a pass)"
        if self.first_s is not None and self.seconds:
            line += f", {self.num_tokens / self.seconds:.0f} tokens/s, first after "
            line += f"{self.first_s:.2f} s"
        mode, threshold = self.decoded.get("mode"), self.decoded.get("confidence_threshold")
        if mode is not None:
            line += f", mode {mode}"
        if mode == "threshold" and threshold is not None:
            line += f", τ {threshold:.3g}"
        if self.decoded.get("finish_reason") == "length":
            line += ", cut off at the largest number of tokens"
        return line


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
