"""Requests that the tests of the REST endpoints start from."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is 3 plus 4?"
MESSAGES = [{"role": "user", "content": PROMPT}]
COMPLETION = {"model": "mars", "prompt": PROMPT, "max_tokens": 24}
CONVERSATION = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
BODIES = {COMPLETIONS: COMPLETION, CHAT: CONVERSATION}


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, whole or streamed, of either endpoint."""
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content", part.get("text"))
