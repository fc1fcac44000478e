"""The house style of diagrams, and pages that need nothing else."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rich.console import Console

from mars_platform.cli.pictures import COLOURS, STYLE, write_pictures
from mars_platform.errors import UserError


def draw() -> Figure:
    figure = Figure()
    figure.subplots().plot([0, 1], [0, 2], label="a < b")
    return figure


def show(console: Console) -> None:
    console.print("a table of 3 < 4", markup=False)


def test_neighbouring_lines_differ_in_greyscale() -> None:
    def brightness(colour: str) -> float:
        red, green, blue = to_rgb(colour)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    assert all(abs(brightness(a) - brightness(b)) > 0.1 for a, b in pairwise(COLOURS))
    cycle = list(STYLE["axes.prop_cycle"])
    assert len({str(each["linestyle"]) for each in cycle}) == len(cycle) == len(COLOURS)
    with rc_context(STYLE):
        [line] = draw().axes[0].lines
    assert line.get_color() == COLOURS[0]


def test_a_page_holds_picture_and_report_and_loads_nothing(tmp_path: Path) -> None:
    plot, page = tmp_path / "x.png", tmp_path / "x.html"
    write_pictures(draw, title="t <x>", show=show, plot=plot, page=page)
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "<title>t &lt;x&gt;</title>" in text
    assert "<svg" in text
    assert "a table of 3 &lt; 4" in text
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', text) == []
    assert "<script" not in text


def test_nothing_is_drawn_that_nobody_wants(tmp_path: Path) -> None:
    def never() -> Figure:
        raise AssertionError("not wanted")

    write_pictures(never, title="", show=show, plot=None, page=None)
    with pytest.raises(UserError, match="cannot be written"):
        write_pictures(draw, title="", show=show, plot=None, page=tmp_path / "no" / "x.html")
