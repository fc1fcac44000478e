"""Turns of a conversation, and the tools that it offers, as requests give them.

Source: OpenAI API reference, "Chat": message roles, content parts, tools and tool calls.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, StringConstraints


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, StringConstraints(min_length=1)]
