from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from mars_platform.cli.report import (
    Column,
    check_output_files,
    interval,
    jsonable,
    print_notes,
    table_of,
    write_json,
)
from mars_platform.errors import UserError
from mars_platform.statistics import Estimate


@dataclass
class Speed:
    tokens_per_s: float | None


@dataclass
class Result:
    name: str
    speed: Speed


def test_rows_may_be_mappings_or_objects_and_columns_format_their_values() -> None:
    columns = [
        Column("name", "name"),
        Column("tok/s", "speed.tokens_per_s", ",.1f", justify="right"),
        Column("double", lambda row: None if row.speed is None else "text", ".2f"),
    ]
    results = [Result("a", Speed(1234.5)), Result("b", Speed(None)), Result("c", Speed(math.inf))]
    table = table_of(columns, results[:1], results[1:], infinite="never")
    assert [list(column.cells) for column in table.columns] == [
        ["a", "b", "c"],
        ["1,234.5", "", "never"],
        ["text"] * 3,
    ]
    assert [row.end_section for row in table.rows] == [True, False, True]
    mapping = table_of([Column("x", "x", "d"), Column("y", "y", "d")], [{"x": 3}])
    assert [list(column.cells) for column in mapping.columns] == [["3"], [""]]


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (None, ""),
        (Estimate(0.5, 0.25, 0.75), "50.0% [25.0, 75.0]"),
        (Estimate(0.5, -math.inf, math.inf), "50.0%"),
    ],
)
def test_an_interval_has_brackets_if_its_ends_are_finite(
    estimate: Estimate | None, text: str
) -> None:
    assert interval(estimate, ".1f", scale=100, unit="%") == text


def test_notes_are_printed_as_they_are() -> None:
    console = Console(file=io.StringIO(), record=True, width=80)
    print_notes(console, ["[bold]1[/bold]", "b"])
    assert console.export_text() == "[bold]1[/bold]\nb\n"


def test_json_has_no_infinity_and_objects_for_dataclasses_and_estimates(tmp_path: Path) -> None:
    content = {
        "result": Result("a", Speed(math.nan)),
        "estimate": Estimate(1.0, -math.inf, math.inf),
        "files": (Path("a"), None, True, 3),
    }
    expected = {
        "result": {"name": "a", "speed": {"tokens_per_s": None}},
        "estimate": {"value": 1.0, "low": None, "high": None},
        "files": ["a", None, True, 3],
    }
    assert jsonable(content) == expected
    write_json(tmp_path / "x.json", content)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == expected
    assert text.startswith('{\n "result": {\n  "name": "a"')
    assert text.endswith("}\n")


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match=r"x: cannot be written \(Is a directory\)"):
        write_json(tmp_path / "x", {})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"--json": Path("nowhere/x.json")}, "--json: there is no directory nowhere"),
        ({"--json": Path.cwd()}, "--json: .* is a directory; name a file in it"),
        ({"--json": None, "--plot": Path("x.odd")}, "--plot: x.odd names no format"),
    ],
)
def test_output_files_are_checked_by_option(files: dict[str, Path | None], message: str) -> None:
    check_output_files({"--json": Path("x.json"), "--plot": None})
    with pytest.raises(UserError, match=message):
        check_output_files(files)
