"""The house style of all diagrams.

Lines differ in brightness and in dashes, so that they can be told apart in greyscale.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from mars_platform.cli.report import writing

COLOURS = ("#0b3c5d", "#d9822b", "#7a1f3d", "#3f9e8c", "#5b4b8a", "#8fb8de", "#000000", "#9aa0a6")
"""Colours of lines in order; neighbours differ by a tenth of the range of brightness or more."""
_DASHES: tuple[Any, ...] = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1)),
    (0, (3, 1, 1, 1)),
    (0, (1, 1)),
    (0, (8, 3)),
)
STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=COLOURS) + cycler(linestyle=_DASHES),
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "figure.facecolor": "white",
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.framealpha": 0.8,
    "lines.linewidth": 1.4,
    "savefig.dpi": 110,
    "svg.hashsalt": "marsray",
}
"""Parameters of matplotlib for every diagram."""


def write_picture(draw: Callable[[], Figure], file: Path | None) -> None:
    """Draw a result into a file, whose suffix names the format; draw nothing without a file."""
    if file is None:
        return
    with mpl.rc_context(STYLE), writing(file):
        draw().savefig(file)
