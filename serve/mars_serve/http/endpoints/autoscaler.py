"""The response of ``/admin/autoscaler``: each model's scaling plan and latest decisions."""

import asyncio
from collections.abc import Mapping

from mars_autoscale.model.capacity import Capacity, Rung
from mars_autoscale.policy.decision import AutoscalerDecision
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_platform.method.mode import Mode
from mars_serve.api.schema import Shape
from mars_serve.config.served import Explanation, ServedModel


class LadderRung(Shape):
    """A way to decode that the autoscaler may choose, with its speed and quality loss."""

    mode: Mode
    confidence_threshold: float
    tokens_per_forward: float
    loss: float
    """Loss of quality compared with plain AR decoding, in percentage points, at the pessimistic end
    of its measured interval."""
    gain: float
    """Speed with a full batch as a multiple of the base's, the fastest decoding without loss."""
    break_even_batch: int
    """Largest batch, in requests, at which this rung is faster than the others without loss."""


class AutoscalerPlan(Shape):
    """The figures that decisions are based on."""

    min_replicas: int
    max_replicas: int
    cold_start_s: float
    num_slots: int
    """Number of requests that a replica runs at once at most."""
    tokens_per_s: float
    """Output tokens per second of a replica with a full batch that loses no quality."""
    prefill_tokens_per_s: float
    ladder: list[LadderRung]
    """The base with a full batch, and the rungs below the target τ that are worth their loss."""
    frontier_refused: str | None
    """Reason why frontier.json is not used, if it is not; the only rung is then τ = 1."""
    frontier_mismatch: str | None
    """The hardware or number type that frontier.json was measured on, if the replicas' differs; the
    speeds given here then do not apply."""


class ModelAutoscaler(Shape):
    """The autoscaling of one model."""

    plan: AutoscalerPlan | None
    """Null until a replica has reported its figures."""
    decisions: list[AutoscalerDecision]
    """The latest hundred decisions, oldest first."""


class Autoscalers(Shape):
    """Autoscaling by model name; null for a model without it."""

    models: dict[str, ModelAutoscaler | None]


async def explanations(models: Mapping[str, ServedModel]) -> Autoscalers:
    """Return the response."""
    found = await asyncio.gather(*(_explanation(model) for model in models.values()))
    return Autoscalers(models=dict(zip(models, found, strict=True)))


async def _explanation(model: ServedModel) -> ModelAutoscaler | None:
    autoscaling = model.settings.autoscaling
    if autoscaling is None:
        return None
    explanation = await model.backend.autoscaler() or Explanation(None, [])
    plan = explanation.basis
    return ModelAutoscaler(
        plan=None if plan is None else _plan(plan, autoscaling.inner.min_gain),
        decisions=explanation.records,
    )


def _plan(plan: AutoscalingBasis, min_gain: float) -> AutoscalerPlan:
    capacity, settings = plan.capacity, plan.settings
    return AutoscalerPlan(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        cold_start_s=settings.cold_start_s,
        num_slots=capacity.max_num_seqs,
        tokens_per_s=capacity.tokens_per_s(capacity.base()),
        prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        ladder=[_rung(capacity, rung) for rung in capacity.ladder(min_gain)],
        frontier_refused=plan.refused,
        frontier_mismatch=plan.mismatch,
    )


def _rung(capacity: Capacity, rung: Rung) -> LadderRung:
    return LadderRung(
        mode=rung.mode,
        confidence_threshold=rung.threshold,
        tokens_per_forward=capacity.window(rung).tokens_per_forward,
        loss=rung.loss,
        gain=capacity.gain(rung),
        break_even_batch=capacity.break_even_batch(rung),
    )
