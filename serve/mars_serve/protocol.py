"""The REST protocol: OpenAI's request and response shapes with marsray's fields beside them.

Source: OpenAI API reference, "Completions" and "Chat"; extra fields stand at the top level, as
vLLM's do. Unknown fields are ignored, known ones that do nothing here are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from mars_platform.mode import Mode


class ApiError(Exception):
    """An error that a response reports in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The response body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    seed: int | None = None

    mode: Mode | None = None
    confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    min_confidence_threshold: Annotated[float, Field(gt=0, le=1)] | None = None

    # Decoding is greedy: these fields are known, and anything but their neutral value is refused.
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    confidence: str | None = None
    service_tier: str | None = None

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the output."""
        return "max_tokens"

    def refuse_unsupported(self) -> None:
        """Refuse what would otherwise be silently ignored.

        Raises:
            ApiError: status 400, naming the field and the value it may have.
        """
        if self.logprobs is not None and self.logprobs is not False:  # 0 asks for them, too
            raise ApiError(
                400,
                f"logprobs: {self.logprobs!r} is not supported; leave it out",
                param="logprobs",
                code="unsupported_value",
            )
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                allowed = " or ".join(repr(item) for item in neutral)
                raise ApiError(
                    400,
                    f"{name}: {value!r} is not supported; leave it out or set it to {allowed}",
                    param=name,
                    code="unsupported_value",
                )


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "n": (1,),
    "stop": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "confidence": ("probability",),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
    )
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, StringConstraints(min_length=1)]


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the output; OpenAI's newer name wins."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"


class MarsBlock(BaseModel):
    """What was done to serve a request."""

    mode: Mode
    confidence_threshold: float
    forward_passes: int
    tokens_per_forward: float


class Usage(BaseModel):
    """Token counts; an end token counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
