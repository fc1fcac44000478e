"""What the server is and has: health, readiness, version and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from mars_platform import __version__
from mars_platform.mode import Mode
from mars_serve.served import ServedModel


def information_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """The endpoints that tell about the server."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """Whether the server is alive."""
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Whether every model has a replica that can serve, and how full each replica is."""
        found = {name: await model.backend.replicas() for name, model in models.items()}
        is_ready = all(found.values())
        body = {
            "status": "ready" if is_ready else "not_ready",
            "models": {name: [asdict(each) for each in reports] for name, reports in found.items()},
        }
        return JSONResponse(body, status_code=200 if is_ready else 503)

    @router.get("/version")
    async def version() -> JSONResponse:
        """The server's version."""
        return JSONResponse({"version": __version__})

    @router.get("/v1/models")
    async def list_models() -> JSONResponse:
        """The models that requests can name."""
        entries = [_model_entry(model) for model in models.values()]
        return JSONResponse({"object": "list", "data": entries})

    return router


def _model_entry(model: ServedModel) -> dict[str, Any]:
    metadata = model.checkpoint.metadata
    return {
        "id": model.settings.name,
        "object": "model",
        "created": model.created,
        "owned_by": "marsray",
        "max_model_len": model.max_length,
        "mars": {
            "modes": list(Mode) if metadata or model.settings.draft else [Mode.AR],
            "block_size": metadata.block_size if metadata else None,
        },
    }
