from io import StringIO

import pytest
from rich.console import Console

from mars_platform.demo.measure import DemoResult
from mars_platform.demo.table import SETTINGS, advice, figures, results_table

AR_SFT, AR, EXACT, CAREFUL, *_, HASTY = range(len(SETTINGS))


def made_up(**changes):
    """One result for each setting; ``changes`` maps ``right``, ``one`` and ``many`` to values."""
    right = changes.get("right", [97, 98, 98, 97, 90, 70])
    one = changes.get("one", [100, 100, 200, 210, 230, 240])
    many = changes.get("many", [1000, 1000, 1100, 1300, 1500, 1600])
    return [
        DemoResult(
            setting,
            correct=[True] * right[at] + [False] * (100 - right[at]),
            num_tokens=400,
            num_passes=400 if at < EXACT else 100,
            round_tokens_per_s={1: [one[at]], 16: [many[at] - 50, many[at], 3 * many[at]]},
        )
        for at, setting in enumerate(SETTINGS)
    ]


def shown(results, width=80):
    file = StringIO()
    Console(file=file, width=width).print(results_table(results))
    return file.getvalue()


def test_the_table_compares_each_row_with_mode_ar_and_fits_a_terminal():
    lines = [line.rstrip() for line in shown(made_up()).splitlines()]
    rows = {line[:9].strip(): line[9:].split() for line in lines if "x" in line[9:]}
    assert list(rows) == ["AR model", "ar", "exact", "τ = 0.95", "τ = 0.8", "τ = 0.5"]
    assert rows["ar"] == ["98.0%", "1.00", "100", "1.00x", "1,000", "1.00x"]
    assert rows["τ = 0.5"] == [
        *("70.0%", "-28.0", "[-36.5,", "-18.4]", "4.00"),
        *("240", "2.40x", "1,600", "1.60x"),
    ]
    assert max(map(len, lines)) <= 80
    assert "…" not in shown(made_up())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ", and τ = 0.95 under load (2.1x ar for one user, 1.3x for 16, for 1.0 points)."),
        ({"right": [98] * 6}, "τ = 0.5 under load (2.4x ar for one user, 1.6x for 16, at no meas"),
        ({"right": [98, 98, 98, 90, 70, 60]}, "no τ is faster under load for 2 points or less"),
        ({"many": [1000, 2000, 1700, 1300, 1500, 1600]}, "no τ is faster under load"),
        ({"many": [1000, 1000, 1700, 1300, 1500, 1600]}, "no τ is faster under load"),
    ],
)
def test_the_advice_is_the_fastest_threshold_that_costs_little(changes, said):
    sentence = advice(made_up(**changes))
    assert sentence.startswith("Choose exact for the AR model's own answers (2.0x ar for one user,")
    assert said in sentence


def test_the_advice_does_not_name_exact_where_it_gains_nothing():
    slow = [100, 100, 90, 210, 230, 240], [1000, 1000, 800, 1300, 1500, 1600]
    sentence = advice(made_up(one=slow[0], many=slow[1]))
    assert sentence.startswith("Choose ar for the AR model's own answers: exact gains nothing (0.9")
    assert "and τ = 0.95 under load (2.1x" in sentence


def test_the_figures_keep_one_key_for_each_number_of_users():
    content = figures(made_up(), {"total": 1.0})
    assert content["ar_sft_accuracy"] == 0.97
    assert [row["mode"] for row in content["rows"]] == ["ar", "exact", *["threshold"] * 3]
    row = content["rows"][-1]
    assert row == {
        "mode": "threshold",
        "threshold": 0.5,
        "accuracy": 0.7,
        "tokens_per_forward": 4.0,
        "tokens_per_s": 1600,
        "tokens_per_s_1": 240,
        "tokens_per_s_16": 1600,
        "items": 100,
    }
