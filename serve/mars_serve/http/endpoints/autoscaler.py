"""What ``/admin/autoscaler`` tells: what a model is autoscaled by, and the latest decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mars_autoscale.model.capacity import Capacity, Rung
from mars_autoscale.policy.control import Plan
from mars_autoscale.policy.decide import Reason
from mars_serve.api.schema import Shape
from mars_serve.config.served import Explanation, ServedModel


class LadderRung(Shape):
    """One way to decode."""

    confidence_threshold: float
    tokens_per_forward: float
    loss: float
    """Points of quality below plain AR decoding."""
    gain: float
    """Times as fast as the target with all slots taken."""
    break_even_batch: int
    """Rows up to which it is faster than the target."""


class AutoscalerPlan(Shape):
    """What decisions go by."""

    min_replicas: int
    max_replicas: int
    cold_start_s: float
    num_slots: int
    """Rows of a replica's step at the most."""
    tokens_per_s: float
    """Of a replica at the target, all slots taken."""
    prefill_tokens_per_s: float
    ladder: list[LadderRung]
    """The target first; rungs that are not worth their loss are left out."""
    frontier_refused: str | None
    """Why frontier.json is not used, where it is not; then there is τ = 1 alone."""
    frontier_mismatch: str | None
    """What frontier.json was measured on, where replicas run on other hardware or in another number
    type: then their speed is not what is told here."""


class AutoscalerDecision(Shape):
    """One decision, and the numbers behind it."""

    time_s: float
    """Since 1970."""
    reason: Reason
    num_replicas: int
    """Asked for from then on."""
    replicas_before: int
    num_ready: int
    num_starting: int
    needed: float
    """Replicas for what arrives, before rounding."""
    debt: float
    """Seconds at the lowest τ that no replica has paid yet."""
    requests_per_s: float | None
    """That arrive; null where it is not known."""
    prompt_tokens_per_s: float | None
    mean_output_tokens: float | None
    decode_tokens_per_s: float
    num_running: float
    num_waiting: float
    threshold: float | None
    """Mean τ of tier default over the replicas."""
    flex_threshold: float | None
    floor_threshold: float
    """The lowest τ that replicas may choose for tier default."""
    flex_floor_threshold: float
    feed_forward: float
    """Gain in speed that what arrives needs of the replicas that are ready."""
    is_saturated: bool
    """Whether nothing is left to give, so that what would come too late is refused."""
    is_overspent: bool
    """Whether tier default's budget of quality is spent."""
    problem: str | None
    """What went wrong, where something did."""


class ModelAutoscaler(Shape):
    """Of one model."""

    plan: AutoscalerPlan | None
    """Null until a replica has told it."""
    decisions: list[AutoscalerDecision]
    """The latest hundred, the oldest first."""


class Autoscalers(Shape):
    """Of all models, by name; null where a model is not autoscaled."""

    models: dict[str, ModelAutoscaler | None]


async def explanations(models: Mapping[str, ServedModel]) -> dict[str, Any]:
    """The content of an `Autoscalers`."""
    found = await asyncio.gather(*(_explanation(model) for model in models.values()))
    return {"models": dict(zip(models, found, strict=True))}


async def _explanation(model: ServedModel) -> dict[str, Any] | None:
    autoscaling = model.settings.autoscaling
    if autoscaling is None or not model.settings.is_governed:
        return None
    explanation = await model.backend.autoscaler() or Explanation(None, [])
    plan = explanation.plan
    return {
        "plan": None if plan is None else _plan(plan, autoscaling.inner.min_gain),
        "decisions": [record.as_dict() for record in explanation.records],
    }


def _plan(plan: Plan, min_gain: float) -> dict[str, Any]:
    capacity, settings = plan.capacity, plan.settings
    return {
        "min_replicas": settings.min_replicas,
        "max_replicas": settings.max_replicas,
        "cold_start_s": settings.cold_start_s,
        "num_slots": capacity.max_num_seqs,
        "tokens_per_s": capacity.tokens_per_s(capacity.rungs[0]),
        "prefill_tokens_per_s": capacity.prefill_tokens_per_s,
        "ladder": [_rung(capacity, rung) for rung in capacity.useful(min_gain)],
        "frontier_refused": plan.refused,
        "frontier_mismatch": plan.mismatch,
    }


def _rung(capacity: Capacity, rung: Rung) -> dict[str, Any]:
    return {
        "confidence_threshold": rung.threshold,
        "tokens_per_forward": rung.tokens_per_forward,
        "loss": rung.loss,
        "gain": capacity.gain(rung),
        "break_even_batch": capacity.break_even_batch(rung),
    }
