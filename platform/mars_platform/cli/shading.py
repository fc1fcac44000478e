"""Shows which tokens of an output came from the same forward pass."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

_SHADES = ("black on light_sky_blue1", "black on light_goldenrod1")
_COLOURLESS = ("", "underline")
_CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROL |= {0x7F: "\u2421", **dict.fromkeys(range(128, 160), "�")}


def printable(text: str) -> str:
    """Return a text in which control characters have become visible ones.

    A model, or a server, could otherwise move the cursor or write over what stands on the terminal.
    """
    return text.translate(_CONTROL)


def print_shaded(console: Console, passes: Sequence[str], *, wrap: bool = False) -> None:
    """Print an output, shaded by forward pass.

    ``passes`` has the text that each pass added. Neighbours alternate in shade on a terminal and
    are separated by bars elsewhere. With ``wrap``, lines break between words; without, they can be
    copied as they are.
    """
    if not console.is_terminal:
        console.print("|".join(passes), markup=False, highlight=False, soft_wrap=not wrap)
        return
    text = Text()
    for index, part in enumerate(passes):
        text.append(printable(part), style=_shade(console, index))
    console.print(text, soft_wrap=not wrap)


class ShadedStream:
    """Prints an output while it comes, shaded by forward pass as by `print_shaded`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_passes = 0

    def add(self, text: str, *, aside: bool = False) -> None:
        """Print the text that a forward pass added; an empty one counts as a pass, too.

        A text ``aside``, such as thinking, is no part of the answer and is printed in italics.
        """
        index, self._num_passes = self._num_passes, self._num_passes + 1
        console = self._console
        if not console.is_terminal:
            console.print("|" * (index > 0) + text, end="", markup=False, highlight=False,
                          soft_wrap=True)  # fmt: skip
            return
        style = f"{_shade(console, index)} {'italic' if aside else ''}".strip()
        console.print(Text(printable(text), style=style), end="", soft_wrap=True)
        console.file.flush()

    def end(self) -> None:
        """End the output's last line."""
        self._console.print()


def _shade(console: Console, index: int) -> str:
    shades = _COLOURLESS if console.no_color else _SHADES
    return shades[index % len(shades)]
