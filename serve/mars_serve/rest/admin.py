"""``/admin/threshold``: the live τ of models, read and changed while they serve.

Who may come here is decided before, by the keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from mars_serve.rest.information import find_model, live_state
from mars_serve.schema import Shape, errors_described
from mars_serve.served import ServedModel

_Threshold = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class ThresholdChange(BaseModel):
    """A new live τ."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    confidence_threshold: _Threshold
    """In (0, 1]. Requests whose own floor, or whose key's or tier's, is higher keep that."""
    model: str | None = None
    """Which model's; all of them if left out."""


class Live(Shape):
    """A live τ."""

    confidence_threshold: _Threshold
    version: int
    """Grows with every change."""


class ModelLive(Live):
    """What was set last for a model, and what its replicas decode with."""

    replicas: dict[str, Live]


class LiveThresholds(Shape):
    """The live τ of models, by name."""

    models: dict[str, ModelLive]


def admin_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """The endpoints that an administrator's key opens."""
    router = APIRouter()
    described = {200: {"model": LiveThresholds}, **errors_described()}

    @router.get("/admin/threshold", responses=described)
    async def read_threshold() -> JSONResponse:
        """What was set last, and what every replica decodes with."""
        return JSONResponse(await _states(models))

    @router.put("/admin/threshold", responses=described)
    async def change_threshold(body: ThresholdChange) -> JSONResponse:
        """Change the τ of the requests that give none, those that run now included.

        The answer may come before every replica has the change: its version tells.
        """
        changed = models if body.model is None else {body.model: find_model(models, body.model)}
        backends = [model.backend for model in changed.values()]
        threshold = body.confidence_threshold
        await asyncio.gather(*(each.set_live_threshold(threshold) for each in backends))
        return JSONResponse(await _states(changed))

    return router


async def _states(models: Mapping[str, ServedModel]) -> dict[str, Any]:
    states = await asyncio.gather(*(_state(model) for model in models.values()))
    return {"models": dict(zip(models, states, strict=True))}


async def _state(model: ServedModel) -> dict[str, Any]:
    live, reports = await asyncio.gather(model.backend.live_threshold(), model.backend.replicas())
    replicas = {report.replica: live_state(report.live) for report in reports}
    return {**live_state(live), "replicas": replicas}
