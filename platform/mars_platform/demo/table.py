"""Shows the demo's results: a table, a sentence on what to choose, and figures for JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from mars_platform.cli.report import Column, interval, table_of
from mars_platform.demo.measure import MANY_USERS, ONE_USER, DemoResult, DemoSetting
from mars_platform.method.mode import Mode
from mars_platform.statistics import paired_difference

AR_MODEL, MARS_MODEL = "ar-sft", "mars"
"""Names under which the two models are served."""
AR_SFT = DemoSetting(AR_MODEL, Mode.AR, 1.0)
SHOWN = DemoSetting(MARS_MODEL, Mode.THRESHOLD, 0.95)
"""Setting of the one answer that is printed pass by pass."""
_ONE_TOKEN = DemoSetting(MARS_MODEL, Mode.AR, 1.0)
_EXACT = DemoSetting(MARS_MODEL, Mode.EXACT, 1.0)
_THRESHOLDS = (0.95, 0.8, 0.5)
SETTINGS = [
    AR_SFT,
    _ONE_TOKEN,
    _EXACT,
    *(DemoSetting(MARS_MODEL, Mode.THRESHOLD, threshold) for threshold in _THRESHOLDS),
]
_NUMS_USERS = (ONE_USER, MANY_USERS)
_SMALL_LOSS = 0.02
"""Share of right answers that the advice takes as a fair price for speed."""


def results_table(results: Sequence[DemoResult]) -> Table:
    """Return the results as a table; differences and ratios are to mode ar of the same model."""
    base = _result_of(results, _ONE_TOKEN)

    def difference(result: DemoResult) -> str:
        if result is base:
            return ""
        return interval(paired_difference(result.correct, base.correct), "+.1f", scale=100)

    def speed(num_users: int) -> Column:
        def cell(result: DemoResult) -> str:
            ratio = _speed(result, base, num_users)
            return f"{result.tokens_per_s(num_users):,.0f} {ratio:.2f}x"

        header = "1 user\ntok/s" if num_users == 1 else f"{num_users} users\ntok/s"
        return Column(header, cell, justify="right", no_wrap=True)

    columns = [
        Column("mode", _mode, no_wrap=True),
        Column("right", "accuracy", ".1%", "right", no_wrap=True),
        Column("difference", difference, justify="right", no_wrap=True),
        Column("tok /\npass", "tokens_per_forward", ".2f", "right", no_wrap=True),
        speed(ONE_USER),
        speed(MANY_USERS),
    ]
    caption = (
        f"{len(base.correct)} held-out questions. AR model: before training with MARS; all other "
        "rows: the one model after it. Differences are paired with mode ar, with 95% intervals. "
        "Tokens/s are of all users together, through HTTP, medians of 3 rounds."
    )
    return table_of(
        columns,
        results,
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _mode(result: DemoResult) -> str:
    setting = result.setting
    if setting == AR_SFT:
        return "AR model"
    return f"τ = {setting.threshold:g}" if setting.mode is Mode.THRESHOLD else setting.mode


def advice(results: Sequence[DemoResult]) -> str:
    """Return one sentence on which mode these results speak for."""
    base, exact = _result_of(results, _ONE_TOKEN), _result_of(results, _EXACT)
    own, speeds = "the AR model's own answers", _speeds(exact, base)
    if any(_speed(exact, base, num_users) > 1 for num_users in _NUMS_USERS):
        same = f"Choose exact for {own} ({speeds})"
    else:
        same = f"Choose ar for {own}: exact gains nothing ({speeds})"
    fair = [
        result
        for result in results
        if result.setting.mode is Mode.THRESHOLD
        and result.accuracy >= base.accuracy - _SMALL_LOSS
        and min(_speed(result, lossless, MANY_USERS) for lossless in (base, exact)) > 1
    ]
    if not fair:
        return f"{same}; here, no τ is faster under load for {100 * _SMALL_LOSS:g} points or less."
    best = max(fair, key=lambda result: result.tokens_per_s(MANY_USERS))
    lost = 100 * (base.accuracy - best.accuracy)
    price = f"for {lost:.1f} points" if lost > 0 else "at no measured loss"
    return f"{same}, and {_mode(best)} under load ({_speeds(best, base)}, {price})."


def _speeds(result: DemoResult, base: DemoResult) -> str:
    one, many = (_speed(result, base, num_users) for num_users in _NUMS_USERS)
    return f"{one:.1f}x ar for one user, {many:.1f}x for {MANY_USERS}"


def _speed(result: DemoResult, base: DemoResult, num_users: int) -> float:
    return result.tokens_per_s(num_users) / base.tokens_per_s(num_users)


def figures(results: Sequence[DemoResult], seconds: dict[str, float]) -> dict[str, Any]:
    """Return the results of `SETTINGS`, and the seconds of each part of the demo, for the JSON
    file.
    """
    return {
        "rows": [
            {
                "mode": result.setting.mode,
                "threshold": result.setting.threshold,
                "accuracy": result.accuracy,
                "tokens_per_forward": result.tokens_per_forward,
                "tokens_per_s": result.tokens_per_s(MANY_USERS),
                **{f"tokens_per_s_{num}": result.tokens_per_s(num) for num in _NUMS_USERS},
                "items": len(result.correct),
            }
            for result in results
            if result.setting != AR_SFT
        ],
        "ar_sft_accuracy": _result_of(results, AR_SFT).accuracy,
        "seconds": seconds,
    }


def _result_of(results: Sequence[DemoResult], setting: DemoSetting) -> DemoResult:
    return next(result for result in results if result.setting == setting)
