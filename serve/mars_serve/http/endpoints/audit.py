"""The response of ``/admin/audit``: how much of what was served differs from lossless decoding."""

import asyncio
from collections.abc import Mapping
from typing import Literal

from mars_autoscale.audit.counts import AuditCounts, AuditKey
from mars_autoscale.audit.drift import Drift
from mars_autoscale.model.expectations import expectation_of
from mars_platform.statistics import proportion
from mars_platform.tier import Tier
from mars_serve.api.schema import Shape
from mars_serve.config.served import Explanation, ServedModel

_PER_TOKENS = 1000


class MeasuredRate(Shape):
    """A measured figure with its 95% interval."""

    value: float
    low: float
    high: float


class AuditedOutputs(Shape):
    """Audited outputs of one tier that were served at one τ."""

    tier: Tier
    confidence_threshold: float
    """τ, rounded down to hundredths."""
    sampling: Literal["plain", "other"]
    """Whether each token was simply the likeliest one, as in the outputs that frontier.json was
    measured with, or chosen with a temperature, penalties, biases, limits or a grammar."""
    num_outputs: int
    num_tokens: int
    """Number of tokens compared: all up to an output's first difference."""
    num_diverged: int
    """Outputs whose first difference was served at this τ."""
    divergence: MeasuredRate | None
    """First differences per 1,000 tokens; null if no token was compared."""
    expected_divergence: float | None
    """The most that frontier.json lets expect; null for other sampling and for a τ below all that
    were measured."""


class ModelAudit(Shape):
    """The audit of one model since its frontier.json came into use."""

    share: float
    """Share of the outputs that is audited, of those that may be."""
    is_refuted: bool
    """Whether audits contradict frontier.json, so that the autoscaler lowers τ no more."""
    refuted_s: float | None
    """Unix time in seconds at which they did; null if they do not."""
    evidence: float
    """Evidence against frontier.json on a logarithmic scale, without the one key that has most of
    it: 0 at the start, 1 at the alarm."""
    loss_factor: float
    """Factor by which the quality budget counts more than frontier.json says, by recent audits and
    again without any one key's."""
    audited: list[AuditedOutputs]


class Audits(Shape):
    """Audits by model name; null for a model whose τ is not autoscaled."""

    models: dict[str, ModelAudit | None]


async def audits(models: Mapping[str, ServedModel]) -> Audits:
    """Return the response."""
    found = await asyncio.gather(*(_audit(model) for model in models.values()))
    return Audits(models=dict(zip(models, found, strict=True)))


async def _audit(model: ServedModel) -> ModelAudit | None:
    if model.settings.autoscaling is None:
        return None
    explanation = await model.backend.autoscaler() or Explanation(None, [])
    drift = explanation.drift
    return ModelAudit(
        share=model.settings.audit.share,
        is_refuted=drift.is_refuted,
        refuted_s=drift.refuted_s,
        evidence=drift.evidence,
        loss_factor=drift.loss_factor,
        audited=[_outputs(drift, key, drift.tally[key]) for key in sorted(drift.tally)],
    )


def _outputs(drift: Drift, key: AuditKey, counts: AuditCounts) -> AuditedOutputs:
    known = expectation_of(drift.expectations, key.threshold) if key.is_plain else None
    return AuditedOutputs(
        tier=key.tier,
        confidence_threshold=key.threshold,
        sampling="plain" if key.is_plain else "other",
        num_outputs=counts.num_outputs,
        num_tokens=counts.num_tokens,
        num_diverged=counts.num_diverged,
        divergence=_rate(counts.num_diverged, counts.num_tokens),
        expected_divergence=known and _PER_TOKENS * known.divergence,
    )


def _rate(num: int, total: int) -> MeasuredRate | None:
    if not total:
        return None
    ends = proportion(num, total)._asdict().items()
    return MeasuredRate(**{name: _PER_TOKENS * end for name, end in ends})
