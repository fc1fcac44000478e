"""Models of the server's answers that a load test reads; their other fields are ignored."""

from __future__ import annotations

from pydantic import BaseModel


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    """A choice of either endpoint: completions have ``text``, chat completions ``delta``."""

    text: str = ""
    delta: _Delta = _Delta()

    @property
    def said(self) -> str:
        return self.text or self.delta.content or ""


class _Mars(BaseModel):
    tokens: int = 0
    confidence_threshold: float | None = None
    min_confidence_threshold: float | None = None
    forward_passes: int | None = None


class _Usage(BaseModel):
    completion_tokens: int


class _Error(BaseModel):
    message: str = ""
    code: str | None = None


class StreamEvent(BaseModel):
    """One event of a stream, or the body of an error response."""

    choices: list[_Choice] = []
    mars: _Mars = _Mars()
    usage: _Usage | None = None
    error: _Error | None = None
