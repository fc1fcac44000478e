"""Shows which tokens of an output came from the same forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

_SHADES = ("black on light_sky_blue1", "black on light_goldenrod1")


def print_shaded(console: Console, passes: Sequence[str], *, wrap: bool = False) -> None:
    """Print an output, shaded by forward pass.

    Args:
        console: console to print on; the text of neighbouring passes alternates in shade on a
            terminal and is separated by bars elsewhere.
        passes: text that each forward pass added.
        wrap: whether to break lines between words; without it, lines can be copied as they are.
    """
    if not console.is_terminal:
        console.print("|".join(passes), markup=False, highlight=False, soft_wrap=not wrap)
        return
    text = Text()
    for index, part in enumerate(passes):
        text.append(part, style=_SHADES[index % len(_SHADES)])
    console.print(text, soft_wrap=not wrap)
