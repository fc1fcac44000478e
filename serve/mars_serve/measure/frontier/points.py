"""Makes the points of a frontier of what decoding the items gave. Knows no engine and no file."""

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
from mars_serve.measure.frontier.working_file import Found


def name_of(setting: DecodingSetting) -> str:
    """What a setting is called in messages and in the working file."""
    return _name(setting.mode, setting.threshold)


def point_of(found: Found, setting: DecodingSetting) -> dict[str, Any]:
    """The fields of a `FrontierPoint`: accuracy where some item has an answer, else agreement.

    Args:
        found: holds outcomes of at least two items, and their log-likelihoods, in this setting and
            in mode ar.
        setting: of the point.
    """
    name = name_of(setting)
    outcomes = found.outcomes[name]
    result = score(outcomes)
    quality = result.accuracy or _agreement(outcomes, found.outcomes[name_of(ONE_TOKEN)])
    likelihood = ratio_of_totals(
        found.log_likelihoods[name], [outcome.num_tokens for outcome in outcomes]
    )
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


def _agreement(outcomes: Sequence[DecodedItem], baseline: Sequence[DecodedItem]) -> Estimate:
    """Share of the outputs that are the baseline's, token for token."""
    pairs = zip(outcomes, baseline, strict=True)
    return proportion(sum(ours.tokens == theirs.tokens for ours, theirs in pairs), len(outcomes))


def stored_tokens(items: Sequence[EvalItem], outcomes: Sequence[DecodedItem]) -> float:
    """Mean tokens that a row reads over the passes of mode ar: its prompt and, on average, half of
    its output.
    """
    pairs = list(zip(items, outcomes, strict=True))
    total = sum(out.num_tokens * (len(item.prompt) + out.num_tokens / 2) for item, out in pairs)
    return total / sum(out.num_tokens for _, out in pairs)


def contradiction(message: str, points: Sequence[Mapping[str, Any]], kept: Path) -> UserError:
    """What `Frontier` says of figures, with the point's name and value, and what to do.

    Args:
        message: the validators'.
        points: that it numbers.
        kept: file that holds what was measured.
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
