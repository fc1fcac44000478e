"""``/admin/threshold`` reads and changes models' live τ; ``/admin/autoscaler`` explains it, and
``/admin/audit`` tells what it costs.

The authentication middleware has already checked that the caller is an administrator.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from mars_serve.api.bodies import at_most
from mars_serve.api.errors import invalid_value
from mars_serve.api.protocol import Threshold
from mars_serve.api.schema import Shape, errors_described
from mars_serve.config.served import ServedModel
from mars_serve.http.endpoints.audit import Audits, audits
from mars_serve.http.endpoints.autoscaler import Autoscalers, explanations
from mars_serve.http.endpoints.information import find_model


class ThresholdChange(BaseModel):
    """A change of the live τ."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    confidence_threshold: Threshold | None
    """New live τ in (0, 1], in force until the next change; null returns control to the autoscaler.
    A request keeps a higher floor of its own, its key or its tier."""
    model: str | None = None
    """Model to change; by default all models."""


class Live(Shape):
    """A live τ."""

    confidence_threshold: Threshold
    version: int
    """Number that grows with every change."""


class ModelLive(Live):
    """The live τ that was set last for a model, and the one of each replica."""

    is_automatic: bool
    """Whether the autoscaler controls τ; ``confidence_threshold`` is then the replicas' mean."""
    replicas: dict[str, Live]


class LiveThresholds(Shape):
    """The live τ of models by name."""

    models: dict[str, ModelLive]


def admin_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """Return the router of the endpoints below ``/admin``."""
    router = APIRouter(responses=errors_described())

    @router.get("/admin/threshold")
    async def read_threshold() -> LiveThresholds:
        """Return the live τ that was set last and the one of every replica."""
        return await _states(models)

    @router.put("/admin/threshold")
    async def change_threshold(body: Annotated[ThresholdChange, at_most(16)]) -> LiveThresholds:
        """Change the live τ of requests in mode threshold, running or not, that set none.

        The response may arrive before all replicas have the change; compare their ``version``.
        """
        changed = models if body.model is None else {body.model: find_model(models, body.model)}
        threshold = body.confidence_threshold
        if threshold is None:
            _check_governed(changed)
        backends = [model.backend for model in changed.values()]
        await asyncio.gather(*(each.set_live_threshold(threshold) for each in backends))
        return await _states(changed)

    @router.get("/admin/autoscaler")
    async def explain_autoscaler() -> Autoscalers:
        """Return the latest decisions with their reasons and figures."""
        return await explanations(models)

    @router.get("/admin/audit")
    async def read_audit() -> Audits:
        """Return how much of what was served differs from lossless decoding."""
        return await audits(models)

    @router.delete("/admin/audit")
    async def forget_audit(model: str | None = None) -> Audits:
        """Forget what audits have said, so that τ may be lowered again after an alarm.

        ``model`` is the one to change; by default all are. A new frontier.json has the same effect.
        """
        changed = models if model is None else {model: find_model(models, model)}
        await asyncio.gather(*(each.backend.trust_frontier() for each in changed.values()))
        return await audits(changed)

    return router


def _check_governed(models: Mapping[str, ServedModel]) -> None:
    for name, model in models.items():
        if model.settings.autoscaling is None:
            reason = f"model {name!r} has no autoscaler to give it back to; give a number"
            raise invalid_value("confidence_threshold", f"null, but {reason}")


async def _states(models: Mapping[str, ServedModel]) -> LiveThresholds:
    states = await asyncio.gather(*(_state(model) for model in models.values()))
    return LiveThresholds(models=dict(zip(models, states, strict=True)))


async def _state(model: ServedModel) -> ModelLive:
    live, reports = await asyncio.gather(model.backend.live_threshold(), model.backend.replicas())
    return ModelLive(
        confidence_threshold=live.threshold,
        version=live.version,
        is_automatic=model.settings.autoscaling is not None and not live.is_pinned,
        replicas={
            each.replica: Live(
                confidence_threshold=each.decoding.live.threshold, version=each.live_version
            )
            for each in reports
        },
    )
