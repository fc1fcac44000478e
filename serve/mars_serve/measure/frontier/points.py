"""Computes the points of a frontier from the decoded items."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import (
    Estimate,
    difference_of_ratios,
    paired_difference,
    proportion,
    ratio_of_totals,
)
from mars_serve.measure.evaluation.decoding import ONE_TOKEN, DecodedItem, DecodingSetting
from mars_serve.measure.evaluation.items import EvalItem
from mars_serve.measure.evaluation.scoring import score
from mars_serve.measure.frontier.working_file import KeptMeasurements


def name_of(setting: DecodingSetting) -> str:
    """Return the name of a setting in messages and in the working file."""
    name = _name(setting.mode, setting.threshold)
    if setting.window is None:
        return name
    return f"{name}, {setting.window} mask{'s' if setting.window > 1 else ''}"


def point_of(
    kept: KeptMeasurements,
    setting: DecodingSetting,
    narrower: Sequence[DecodingSetting],
    num_masks: int,
) -> dict[str, Any]:
    """Return the fields of a `FrontierPoint`.

    Without answers, quality is the likelihood of the outputs under plain AR decoding: other texts
    are no loss as long as the model itself finds them as likely. ``kept`` has at least two items
    decoded in this setting and in mode ar, with log-likelihoods; some were decoded in ``narrower``,
    the same setting with fewer masks, rising.
    """
    name, baseline = name_of(setting), name_of(ONE_TOKEN)
    decoded, plain = kept.outcomes[name], kept.outcomes[baseline]
    lengths = [each.num_tokens for each in decoded]
    likelihood = ratio_of_totals(kept.log_likelihoods[name], lengths)
    point: dict[str, Any] = {
        "mode": setting.mode.value,
        "threshold": setting.threshold,
        "log_likelihood": _interval(likelihood),
        "windows": [
            *(_window_of(kept, each, each.window or 0) for each in narrower),
            _window_of(kept, setting, 0 if setting.mode is Mode.AR else num_masks),
        ],
    }
    if setting.mode is not Mode.AR:
        point["divergence"] = _divergence(decoded, plain)
    right, right_plain = _right(decoded), _right(plain)
    if right:
        quality = proportion(sum(right), len(right))
        loss = paired_difference(right_plain, right)
        point["right"] = "".join("1" if each else "0" for each in right)
    else:
        plain_lengths = [each.num_tokens for each in plain]
        gap = difference_of_ratios(
            (kept.log_likelihoods[baseline], plain_lengths), (kept.log_likelihoods[name], lengths)
        )
        loss = Estimate(*(-math.expm1(-end) for end in gap))
        # outputs may be likelier than those of greedy decoding, but that is no better quality
        quality = Estimate(*(min(1 - end, 1.0) for end in (loss.value, loss.high, loss.low)))
    if setting.mode is not Mode.AR:
        point["loss"] = _interval(Estimate(*(100 * end for end in loss)))
    ends = zip(("quality", "quality_low", "quality_high"), quality, strict=True)
    return point | {field: 100 * max(end, 0.0) for field, end in ends}


def _interval(estimate: Estimate) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), estimate, strict=True))


def _window_of(
    kept: KeptMeasurements, setting: DecodingSetting, num_masks: int
) -> dict[str, float]:
    result = score(kept.outcomes[name_of(setting)])
    return {
        "num_masks": num_masks,
        "tokens_per_forward": result.tokens_per_forward.value,
        "positions_per_row": result.positions_per_forward.value,
    }


def _right(decoded: Sequence[DecodedItem]) -> list[bool]:
    return [each.correct for each in decoded if each.correct is not None]


def _divergence(decoded: Sequence[DecodedItem], plain: Sequence[DecodedItem]) -> dict[str, int]:
    num_diverged = num_tokens = 0
    for ours, theirs in zip(decoded, plain, strict=True):
        is_same = ours.tokens == theirs.tokens
        num_diverged += not is_same
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        num_tokens += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_tokens += not is_same
    return {
        "num_outputs": len(decoded),
        "num_diverged": num_diverged,
        "num_tokens": num_tokens,
    }


def mean_cached_tokens(items: Sequence[EvalItem], decoded: Sequence[DecodedItem]) -> float:
    """Return the mean number of cached tokens that a row reads over the passes of mode ar.

    A row reads its prompt and, on average over its passes, half of its output.
    """
    pairs = list(zip(items, decoded, strict=True))
    total = sum(out.num_tokens * (len(item.prompt) + out.num_tokens / 2) for item, out in pairs)
    return total / sum(out.num_tokens for _, out in pairs)


def contradiction(message: str, points: Sequence[Mapping[str, Any]], kept: Path) -> UserError:
    """Return the error for points that `Frontier` refuses, with their names and values.

    ``message`` is the validators', which numbers the points; ``kept`` keeps what was measured.
    """

    def named(match: re.Match[str]) -> str:
        point, field = points[int(match[1])], match[2]
        name = _name(point["mode"], point["threshold"])
        value = f", {point[field]:.4g}" if isinstance(point[field], float) else ""
        return f"{field} of {name}{value}"

    return UserError(
        f"{re.sub(r'points[.]([0-9]+)[.]([a-z_]+)', named, message)}; measure more conversations "
        "(--data, --max-items), or leave a threshold out (--threshold) and go on from what is kept "
        f"in {kept}"
    )


def _name(mode: str, threshold: float) -> str:
    return f"τ {threshold:g}" if mode == Mode.THRESHOLD else f"mode {mode}"
