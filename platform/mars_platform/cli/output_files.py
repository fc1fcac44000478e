"""Checks, before anything is measured, that output files can be written."""

from __future__ import annotations

from pathlib import Path

from mars_platform.errors import UserError


def check_output_file(path: Path, option: str) -> None:
    """Refuse an output file whose directory is missing.

    Args:
        path: the file.
        option: name of the option that gave the path, for the error.

    Raises:
        UserError: the directory is missing.
    """
    if not path.parent.is_dir():
        raise UserError(f"{option}: there is no directory {path.parent}; make it first")


def check_plot_file(path: Path) -> None:
    """Refuse a path for ``--plot`` whose suffix names no image format or whose directory is absent.

    Raises:
        UserError: the path is unusable; the message says why.
    """
    from matplotlib.backend_bases import FigureCanvasBase  # slow to load

    if path.suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"--plot: {path} names no format of pictures; end it in .png or .svg")
    check_output_file(path, "--plot")
