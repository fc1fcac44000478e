"""Endpoints that report health, readiness, the version and the models."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from mars_autoscale.policy.reports import Phase, ReplicaReport
from mars_platform import __version__
from mars_platform.method.mode import Mode
from mars_serve.api.errors import ApiError, clipped
from mars_serve.api.incoming.options import modes_of
from mars_serve.api.schema import Shape, errors_described
from mars_serve.config.served import ServedModel
from mars_serve.http.recent import Recent

_MAX_NAME = 128  # longest model name that an error message quotes
_MAX_AGE_S = 1.0
"""Seconds for which an answer without figures is kept, since anybody may ask for it."""


class Alive(Shape):
    """Response of a running server."""

    status: Literal["ok"]


class ReplicaState(Shape):
    """The state of one replica."""

    replica: str
    status: dict[str, int | float | None]
    """Load of the replica's engine, and its counters since its start."""
    confidence_threshold: float
    """τ of requests that set none."""
    version: int
    """Version of that τ."""
    overdue: bool
    """Whether the replica's engine does not answer. It gets no further requests, and is ended if it
    does not come back."""


class Readiness(Shape):
    """Whether every model can serve requests."""

    status: Literal["ready", "not_ready"]
    message: str | None = None
    """Says which parts the server still waits for; null if all are ready."""
    models: dict[str, list[ReplicaState]] | None = None
    """Replicas of each model, for administrators only."""


class Version(Shape):
    """The server's version."""

    version: str


class ModelAbilities(Shape):
    """Decoding modes and block size that a model supports."""

    modes: list[Mode]
    block_size: int | None
    """Tokens per block; null for a plain AR model."""
    adapter: str | None
    """Name of the directory of the adapter that proposes tokens; null for a whole model."""


class ModelEntry(Shape):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    """Unix time in seconds."""
    owned_by: str
    root: str
    """Hub id, from which vLLM's load generator takes the tokenizer; for a directory, the model's
    name."""
    max_model_len: int
    """Largest number of prompt and output tokens together."""
    parent: str | None
    """Name of the model that a LoRA adapter acts on; null for a model."""
    mars: ModelAbilities


class ModelList(Shape):
    """All served models."""

    object: Literal["list"]
    data: list[ModelEntry]


def information_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """Return the router of the endpoints that describe the server."""
    router = APIRouter()
    recent = [_recent_reports(model) for model in models.values()]

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Alive:
        """Report that the server runs."""
        return Alive(status="ok")

    @router.get("/ready", responses={503: {"model": Readiness}}, response_model_exclude_unset=True)
    async def ready(request: Request, response: Response) -> Readiness:
        """Report whether every model has a replica that can serve.

        Administrators are also told each replica's load.
        """
        is_admin = request.state.caller.is_admin
        max_age_s = 0.0 if is_admin else _MAX_AGE_S
        found = await asyncio.gather(*(of_model(max_age_s) for of_model in recent))
        if all(any(each.phase is not Phase.OVERDUE for each in reports) for reports in found):
            readiness = Readiness(status="ready")
        else:
            readiness = Readiness(status="not_ready", message=_wait_of(found))
            response.status_code = 503
        if is_admin:
            readiness.models = {
                name: [_replica_state(each) for each in reports]
                for name, reports in zip(models, found, strict=True)
            }
        return readiness

    @router.get("/version", responses=errors_described())
    async def version() -> Version:
        """Return the server's version."""
        return Version(version=__version__)

    @router.get("/v1/models", responses=errors_described())
    async def list_models() -> ModelList:
        """List the models that requests can name."""
        found = [
            each
            for model in models.values()
            for each in (model, *map(model.with_lora, model.loras.current.values()))
        ]
        return ModelList(object="list", data=[_model_entry(model) for model in found])

    # a name may contain slashes
    @router.get("/v1/models/{model:path}", responses=errors_described())
    async def retrieve_model(model: str) -> ModelEntry:
        """Return one model."""
        return _model_entry(find_model(models, model))

    _answer_head(router)
    return router


def _wait_of(found: list[list[ReplicaReport]]) -> str:
    if any(not reports for reports in found):
        return (
            "no replica of a model has started: it loads the model and measures the times of its "
            "steps, which may take minutes; requests wait in the queue"
        )
    return "the replicas of a model do not answer; they are replaced if that lasts"


def _answer_head(router: APIRouter) -> None:
    """Let each path answer HEAD, by which some load balancers probe; the server cuts the bodies."""
    for route in [each for each in router.routes if isinstance(each, APIRoute)]:
        router.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """Return the model with a name, which may be that of a LoRA adapter."""
    if name not in models:
        for model in models.values():
            if (lora := model.loras.current.get(name)) is not None:
                return model.with_lora(lora)
        names = ", ".join(
            [*models, *(lora for each in models.values() for lora in each.loras.current)]
        )
        message = f"model: there is no {clipped(name, _MAX_NAME)!r} here; this server has {names}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]


def _recent_reports(model: ServedModel) -> Recent[list[ReplicaReport]]:
    return Recent(lambda: model.backend.replicas())


def _replica_state(report: ReplicaReport) -> ReplicaState:
    status = asdict(report.engine)
    status["num_reused_tokens"] = status.pop("num_prefix_hit_tokens")  # the field's public name
    return ReplicaState(
        replica=report.replica,
        status=status,
        confidence_threshold=report.decoding.live.threshold,
        version=report.live_version,
        overdue=report.phase is Phase.OVERDUE,
    )


def _model_entry(model: ServedModel) -> ModelEntry:
    metadata = model.checkpoint.metadata
    return ModelEntry(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="marsray",
        root=model.root,
        max_model_len=model.max_length,
        parent=model.settings.name if model.lora else None,
        mars=ModelAbilities(
            modes=modes_of(model),
            block_size=metadata.block_size if metadata else None,
            adapter=model.adapter_name,
        ),
    )
