"""Computes the points of a frontier from the decoded items."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import Estimate, proportion, ratio_of_totals
from mars_serve.measure.evaluation.decoding import ONE_TOKEN, DecodedItem, DecodingSetting
from mars_serve.measure.evaluation.items import EvalItem
from mars_serve.measure.evaluation.scoring import score
from mars_serve.measure.frontier.working_file import KeptMeasurements


def name_of(setting: DecodingSetting) -> str:
    """Return the name of a setting in messages and in the working file."""
    return _name(setting.mode, setting.threshold)


def point_of(kept: KeptMeasurements, setting: DecodingSetting) -> dict[str, Any]:
    """Return the fields of a `FrontierPoint`; without answers, its quality is agreement.

    Args:
        kept: at least two items decoded in this setting and in mode ar, with log-likelihoods.
        setting: setting of the point.
    """
    name = name_of(setting)
    decoded = kept.outcomes[name]
    result = score(decoded)
    quality = result.accuracy or _agreement(decoded, kept.outcomes[name_of(ONE_TOKEN)])
    likelihood = ratio_of_totals(kept.log_likelihoods[name], [each.num_tokens for each in decoded])
    return {
        "mode": setting.mode.value,
        "threshold": setting.threshold,
        "quality": 100 * quality.value,
        "quality_low": 100 * quality.low,
        "quality_high": 100 * quality.high,
        "tokens_per_forward": result.tokens_per_forward.value,
        "positions_per_row": result.positions_per_forward.value,
        "log_likelihood": dict(zip(("mean", "low", "high"), likelihood, strict=True)),
    }


def _agreement(decoded: Sequence[DecodedItem], baseline: Sequence[DecodedItem]) -> Estimate:
    """Return the share of the outputs that equal the baseline's token for token."""
    pairs = zip(decoded, baseline, strict=True)
    return proportion(sum(ours.tokens == theirs.tokens for ours, theirs in pairs), len(decoded))


def mean_cached_tokens(items: Sequence[EvalItem], decoded: Sequence[DecodedItem]) -> float:
    """Return the mean number of cached tokens that a row reads over the passes of mode ar.

    A row reads its prompt and, on average over its passes, half of its output.
    """
    pairs = list(zip(items, decoded, strict=True))
    total = sum(out.num_tokens * (len(item.prompt) + out.num_tokens / 2) for item, out in pairs)
    return total / sum(out.num_tokens for _, out in pairs)


def contradiction(message: str, points: Sequence[Mapping[str, Any]], kept: Path) -> UserError:
    """Return the error for points that `Frontier` refuses, with their names and values.

    Args:
        message: message of the validators, which numbers the points.
        points: the points.
        kept: file that keeps what was measured.
    """

    def named(match: re.Match[str]) -> str:
        point, field = points[int(match[1])], match[2]
        name = _name(point["mode"], point["threshold"])
        return f"{field} of {name}, {point[field]:.4g}"

    return UserError(
        f"{re.sub(r'points[.]([0-9]+)[.]([a-z_]+)', named, message)}; measure more conversations "
        "(--data, --max-items), or leave a threshold out (--threshold) and go on from what is kept "
        f"in {kept}"
    )


def _name(mode: str, threshold: float) -> str:
    return f"τ {threshold:g}" if mode == Mode.THRESHOLD else f"mode {mode}"
