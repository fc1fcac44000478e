"""The house style of diagrams, and the files that they are drawn into."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mars_platform.cli.pictures import COLOURS, STYLE, write_picture
from mars_platform.errors import UserError


def draw() -> Figure:
    figure = Figure()
    figure.subplots().plot([0, 1], [0, 2], label="a < b")
    return figure


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


def test_a_picture_is_written_where_one_is_wanted(tmp_path: Path) -> None:
    write_picture(draw, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        write_picture(draw, tmp_path / "no" / "x.png")

    def never() -> Figure:
        raise AssertionError("not wanted")

    write_picture(never, None)
