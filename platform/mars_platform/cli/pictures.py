"""The house style of all diagrams, and pages that show a command's whole result.

Lines differ in brightness and in dashes, so that they can be told apart in greyscale.
"""

import html
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure
from rich.console import Console

from mars_platform import __version__
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
_PAGE_WIDTH = 160  # characters of a line of the tables in a page
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 2rem auto; max-width: 75rem; padding: 0 1rem; font: 16px/1.5 sans-serif; }}
body {{ color: #1c1c1c; background: #fff; }}
pre {{ overflow-x: auto; font: 12px/1.35 monospace; }}
svg {{ max-width: 100%; height: auto; }}
footer {{ color: #555; font-size: 13px; }}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
<pre>{text}</pre>
<footer>marsray {version}, {time}</footer>
</body>
</html>
"""


def write_page(path: Path, title: str, figure: Figure, show: Callable[[Console], None]) -> None:
    """Write one HTML page, which loads nothing else, with a figure and the report that ``show``
    prints.

    Raises:
        UserError: the file cannot be written.
    """
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    picture = drawn.getvalue()
    console = Console(file=StringIO(), record=True, width=_PAGE_WIDTH)
    show(console)
    page = _PAGE.format(
        title=html.escape(title),
        picture=picture[picture.index("<svg") :],
        text=html.escape(console.export_text()),
        version=__version__,
        time=time.strftime("%Y-%m-%d %H:%M %Z"),
    )
    with writing(path):
        path.write_text(page, encoding="utf-8")


def write_pictures(
    draw: Callable[[], Figure],
    *,
    title: str,
    show: Callable[[Console], None],
    plot: Path | None,
    page: Path | None,
) -> None:
    """Draw a result into the picture ``plot`` and the HTML page ``page``; either may be None.

    ``draw`` draws the figure, and the picture's suffix names its format. The page also has
    ``title`` and the report that ``show`` prints.

    Raises:
        UserError: a file cannot be written.
    """
    if plot is None and page is None:
        return
    with mpl.rc_context(STYLE):
        figure = draw()
        if plot is not None:
            with writing(plot):
                figure.savefig(plot)
        if page is not None:
            write_page(page, title, figure, show)
