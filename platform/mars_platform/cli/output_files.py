"""Refuses files that could not be written in the end, before anything is measured."""

from __future__ import annotations

from pathlib import Path

from mars_platform.errors import UserError


def check_output_file(path: Path, option: str) -> None:
    """Refuse a file in a directory that is missing.

    Args:
        path: the file.
        option: that named it.

    Raises:
        UserError: so it is.
    """
    if not path.parent.is_dir():
        raise UserError(f"{option}: there is no directory {path.parent}; make it first")


def check_plot_file(path: Path) -> None:
    """Refuse a picture for ``--plot`` whose suffix names no format, or whose directory is missing.

    Raises:
        UserError: so it is.
    """
    from matplotlib.backend_bases import FigureCanvasBase  # only who draws pays for loading it

    if path.suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"--plot: {path} names no format of pictures; end it in .png or .svg")
    check_output_file(path, "--plot")
