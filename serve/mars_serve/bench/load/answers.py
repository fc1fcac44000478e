"""What a load test reads of a server's answers; their other fields are ignored."""

from __future__ import annotations

from pydantic import BaseModel


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    """Of either endpoint."""

    text: str = ""
    delta: _Delta = _Delta()

    @property
    def said(self) -> str:
        """The text of the event."""
        return self.text or self.delta.content or ""


class _Mars(BaseModel):
    tokens: int = 0
    confidence_threshold: float | None = None
    min_confidence_threshold: float | None = None
    forward_passes: int | None = None


class _Error(BaseModel):
    message: str = ""
    code: str | None = None


class StreamEvent(BaseModel):
    """An event of a stream, or the response of an error."""

    choices: list[_Choice] = []
    mars: _Mars = _Mars()
    error: _Error | None = None


class LiveModel(BaseModel):
    """The live τ of a model, or of one of its replicas."""

    confidence_threshold: float
    replicas: dict[str, LiveModel] = {}


class LiveModels(BaseModel):
    """The response of ``GET /admin/threshold``."""

    models: dict[str, LiveModel]


class _Rung(BaseModel):
    confidence_threshold: float
    loss: float


class _Plan(BaseModel):
    ladder: list[_Rung]


class _Autoscaler(BaseModel):
    plan: _Plan | None = None


class Autoscalers(BaseModel):
    """The response of ``GET /admin/autoscaler``."""

    models: dict[str, _Autoscaler | None]
