"""Draws the results of the varied bed up as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mars_platform.statistics import Estimate, difference_of_ratios, paired_difference

Result = dict[str, Any]
"""Figures of one variant and seed, as `score_checkpoint` returns them."""


def table(results: dict[str, dict[int, Result]], baseline: str, ar: str) -> str:
    """Return all tables.

    Args:
        results: results by variant and seed, the AR checkpoint's among them.
        baseline: name of the variant with which the others are compared.
        ar: name of the AR checkpoint.
    """
    trained = {name: found for name, found in results.items() if name != ar}
    parts = ["Speed in tokens a pass; mean over the seeds (range).", _speed(trained)]
    parts += ["Quality; mean over the seeds (range).", _quality(results)]
    parts += [_agreement_title("greedy"), _agreement(trained, "exact")]
    parts += [_agreement_title("sampled"), _agreement(trained, "exact-sampled")]
    if baseline in trained:
        parts += [
            f"Differences from {baseline} on the same conversations and seeds, with 95% intervals.",
            _differences(trained, baseline),
        ]
    return "\n\n".join(parts) + "\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table whose columns but the first are aligned to the right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, ruler, *rows])


def tokens_a_pass(found: dict[str, Any], passes: str = "passes") -> float:
    """Return the tokens of all items over their passes."""
    return float(sum(found["tokens"]) / sum(found[passes]))


def closed_gap(ours: float, baseline: float, ideal: float) -> float:
    """Return the share of the gap between the baseline and an ideal drafter that is closed."""
    return (ours - baseline) / (ideal - baseline)


def _spread(found: dict[int, Result], figure: Callable[[Result], float], digits: int) -> str:
    """Return the mean of a figure over the seeds, with its range if there are several."""
    values = [figure(each) for each in found.values()]
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _speed(results: dict[str, dict[int, Result]]) -> str:
    header = ["variant", "exact", "ideal", "exact, sampled", "ideal, sampled", "τ = .95", "τ = .8",
              "training, CPU s"]  # fmt: skip
    rows = []
    for name, found in results.items():
        exact = [
            _spread(found, lambda each, k=key, p=passes: tokens_a_pass(each[k], p), 3)  # type: ignore[misc]
            for key in ("exact", "exact-sampled")
            for passes in ("passes", "ideal_passes")
        ]
        tau = [_spread(found, lambda each, k=key: tokens_a_pass(each["settings"][k]), 3)  # type: ignore[misc]
               for key in ("tau-0.95", "tau-0.8")]  # fmt: skip
        rows.append([name, *exact, *tau, _spread(found, lambda each: each["train"]["cpu_s"], 0)])
    return markdown(header, rows)


def _quality(results: dict[str, dict[int, Result]]) -> str:
    header = ["variant", "one-token, %", "one-token at .7, %", "τ = .95, %", "τ = .8, %",
              "AR loss, nats", "entropy, nats", "KL from the AR checkpoint, nats"]  # fmt: skip
    keys = ("one-token", "one-token-sampled", "tau-0.95", "tau-0.8")
    rows = []
    for name, found in results.items():
        right = [
            _spread(found, lambda each, k=key: _percent(each["settings"][k]), 1)  # type: ignore[misc]
            if all(key in each["settings"] for each in found.values())
            else ""
            for key in keys
        ]
        sums = [_spread(found, lambda each, k=key: _a_label(each, k), 4)  # type: ignore[misc]
                for key in ("loss", "entropy", "divergence")]  # fmt: skip
        rows.append([name, *right, *sums])
    return markdown(header, rows)


def _percent(setting: dict[str, Any]) -> float:
    return float(100 * statistics.mean(setting["correct"]))


def _a_label(result: Result, key: str) -> float:
    found = result["distributions"]
    return float(sum(found[key]) / sum(found["labels"]))


def _agreement_title(kind: str) -> str:
    return f"Agreement by depth over every position of {kind} outputs, in percent."


def _agreement(results: dict[str, dict[int, Result]], key: str) -> str:
    sizes = {name: len(next(iter(found.values()))[key]["right"]) for name, found in results.items()}
    most = max(sizes.values())
    rows = []
    for name, found in results.items():
        agreed = [
            _spread(found, lambda each, d=depth: _agreed(each[key], d), 1)  # type: ignore[misc]
            for depth in range(sizes[name])
        ]
        rows.append([name, *agreed, *[""] * (most - len(agreed))])
    return markdown(["variant", *(str(depth + 1) for depth in range(most))], rows)


def _agreed(found: dict[str, Any], depth: int) -> float:
    return float(100 * found["right"][depth] / found["drafts"][depth])


def _differences(results: dict[str, dict[int, Result]], baseline: str) -> str:
    header = ["variant", "exact", "gap closed, %", "exact, sampled", "gap closed, sampled, %",
              "one-token, points", "τ = .95", "τ = .95, points", "τ = .8", "τ = .8, points",
              "AR loss, nats"]  # fmt: skip
    rows = []
    for name, found in results.items():
        seeds = sorted(found.keys() & results[baseline].keys())
        if name == baseline or not seeds:
            continue
        pairs = [(found[seed], results[baseline][seed]) for seed in seeds]
        row = [name]
        for key in ("exact", "exact-sampled"):
            row += [_faster(pairs, lambda each, k=key: each[k]), _closed(pairs, key)]  # type: ignore[misc]
        row.append(_better(pairs, "one-token"))
        for key in ("tau-0.95", "tau-0.8"):
            row += [_faster(pairs, lambda each, k=key: each["settings"][k]), _better(pairs, key)]  # type: ignore[misc]
        rows.append([*row, _loss(pairs)])
    return markdown(header, rows)


Pairs = list[tuple[Result, Result]]
"""Results of a variant and of the baseline with the same seed."""


def _joined(pairs: Pairs, side: int, pick: Callable[[Result], list[Any]]) -> list[Any]:
    """Return a list of figures over the items of all seeds."""
    return [value for pair in pairs for value in pick(pair[side])]


def _faster(pairs: Pairs, pick: Callable[[Result], dict[str, list[int]]]) -> str:
    ours, theirs = (
        (
            _joined(pairs, side, lambda each: pick(each)["tokens"]),
            _joined(pairs, side, lambda each: pick(each)["passes"]),
        )
        for side in (0, 1)
    )
    return _interval(difference_of_ratios(ours, theirs), 3)


def _closed(pairs: Pairs, key: str) -> str:
    """Return by how much the gap is closed, the mean over seeds and its range.

    The ideal drafter is the baseline's: the lengths of its own outputs decide what it could reach.
    """
    shares = [
        100
        * closed_gap(
            tokens_a_pass(ours[key]),
            tokens_a_pass(theirs[key]),
            tokens_a_pass(theirs[key], "ideal_passes"),
        )
        for ours, theirs in pairs
    ]
    mean = f"{statistics.mean(shares):.1f}"
    return mean if len(shares) == 1 else f"{mean} ({min(shares):.1f} to {max(shares):.1f})"


def _better(pairs: Pairs, key: str) -> str:
    ours, theirs = (
        _joined(pairs, side, lambda each: each["settings"][key]["correct"]) for side in (0, 1)
    )
    found = paired_difference(ours, theirs)
    return _interval(Estimate(*(100 * value for value in found)), 1)


def _loss(pairs: Pairs) -> str:
    ours, theirs = (
        tuple(
            _joined(pairs, side, lambda each, k=key: each["distributions"][k])  # type: ignore[misc]
            for key in ("loss", "labels")
        )
        for side in (0, 1)
    )
    return _interval(difference_of_ratios(ours, theirs), 4)  # type: ignore[arg-type]


def _interval(found: Estimate, digits: int) -> str:
    return f"{found.value:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"
