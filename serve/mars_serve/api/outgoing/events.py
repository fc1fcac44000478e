"""Server-sent events.

Source: HTML living standard, "Server-sent events".
"""

from typing import Any

from pydantic_core import to_json  # several times faster than json, and used for each pass

DONE = b"data: [DONE]\n\n"
"""Last event of a complete stream of OpenAI's completions and chats."""


def sse(content: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event with JSON content, and with a name if one is given."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(content) + b"\n\n"
