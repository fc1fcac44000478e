"""Shows measured results: rows as a table, figures as JSON, and files written with one clear error.

A report describes each column once, as a `Column`, and hands over its rows. A row is a mapping or
an object with attributes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from mars_platform.errors import UserError
from mars_platform.statistics import Estimate

if TYPE_CHECKING:  # loading matplotlib takes long, and most reports draw nothing
    from matplotlib.axes import Axes

STANDARD_OUTPUT = Path("-")
"""Path that stands for standard output where a file of figures is named."""


@dataclass(frozen=True)
class Column:
    """One column of a table: its header, the value that each row has in it, and the format."""

    header: str
    value: str | Callable[[Any], Any]
    """Key or dotted attribute of the row, or a function of the row."""
    spec: str = ""
    """Format specification of the value, as in an f-string."""
    justify: Literal["left", "right"] = "left"
    overflow: Literal["ellipsis", "fold"] = "ellipsis"
    no_wrap: bool = False

    def value_of(self, row: Any) -> Any:
        """Return the row's value; None if a mapping lacks the key."""
        if callable(self.value):
            return self.value(row)
        return row.get(self.value) if isinstance(row, Mapping) else attrgetter(self.value)(row)


figure_column = partial(Column, justify="right", overflow="fold")
"""Returns a column of numbers or intervals, which stays whole in a narrow terminal."""


def table_of(
    columns: Iterable[Column],
    *sections: Iterable[Any],
    infinite: str = "inf",
    **options: Any,
) -> Table:
    """Lay rows out in a table, in sections that a line separates.

    A value that is None leaves its cell empty, and ``infinite`` is the text of an infinite one.
    Further arguments, such as ``title``, are those of `rich.table.Table`.
    """
    columns = list(columns)
    table = Table(**options)
    for column in columns:
        table.add_column(
            column.header,
            justify=column.justify,
            overflow=column.overflow,
            no_wrap=column.no_wrap,
        )
    for rows in sections:
        for row in rows:
            table.add_row(
                *(_text(column.value_of(row), column.spec, infinite) for column in columns)
            )
        table.add_section()
    return table


def _text(value: float | str | None, spec: str, infinite: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return infinite if math.isinf(value) else format(value, spec)


def interval(estimate: Estimate | None, spec: str, *, scale: float = 1.0, unit: str = "") -> str:
    """Return an estimate as ``value [low, high]``, without the brackets if the ends are infinite.

    An ``estimate`` of None gives an empty text. Each number is multiplied by ``scale``, 100 to make
    percent of shares, and formatted by ``spec``; ``unit`` is the text behind the value.
    """
    if estimate is None:
        return ""
    value, low, high = (format(scale * part, spec) for part in estimate)
    return f"{value}{unit} [{low}, {high}]" if math.isfinite(estimate.low) else f"{value}{unit}"


def say(console: Console, text: str, style: str = "") -> None:
    """Print a text exactly as it is, in lines that are not broken, so that they can be copied."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_notes(console: Console, notes: Iterable[str], style: str = "dim") -> None:
    """Print notes below a table, one paragraph each, exactly as they are."""
    for note in notes:
        console.print(note, style=style, highlight=False, markup=False)


def output_console(file_width: int) -> Console:
    """Return a console on standard output, ``file_width`` columns wide in a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = file_width
    return console


def jsonable(value: Any) -> Any:
    """Return a value in terms that JSON has.

    Dataclasses and named tuples become objects, paths become strings, and numbers that are not
    finite become null.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(part) for key, part in value.items()}
    if is_dataclass(value):
        return {each.name: jsonable(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return jsonable(value._asdict())
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def print_json(console: Console, content: Any) -> None:
    """Print a value as JSON; see `jsonable`."""
    console.print_json(data=jsonable(content))


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Write a value to a JSON file, or to `STANDARD_OUTPUT`; see `jsonable`."""
    text = json.dumps(jsonable(content), indent=indent, allow_nan=False)
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text + "\n")
        return
    with writing(path):
        path.write_text(text + "\n", encoding="utf-8")


def finish_axes(
    axes: Axes,
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    legend: Literal["best", "upper right", "lower right"] | None = None,
) -> None:
    """Give a drawn diagram a grid, and a title, axis labels and a legend unless they are empty."""
    if title:
        axes.set_title(title, fontsize="small")
    if x:
        axes.set_xlabel(x)
    if y:
        axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize="small", loc=legend)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write a file within the block into one clear error."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def check_output_files(files: Mapping[str, Path | None]) -> None:
    """Refuse files that could not be written in the end, before anything is measured.

    ``files`` has paths by option: ``--plot`` names a picture, and an unused option has None.

    Raises:
        UserError: a directory is missing, a path is itself one, or the picture's suffix names no
            format.
    """
    for option, path in files.items():
        if path is None or (option == "--json" and path == STANDARD_OUTPUT):
            continue
        if option == "--plot":
            from matplotlib.backend_bases import FigureCanvasBase  # slow to load

            if path.suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
                raise UserError(
                    f"--plot: {path} names no format of pictures; end it in .png or .svg"
                )
        if not path.parent.is_dir():
            raise UserError(f"{option}: there is no directory {path.parent}; make it first")
        if path.is_dir():
            raise UserError(f"{option}: {path} is a directory; name a file in it")
