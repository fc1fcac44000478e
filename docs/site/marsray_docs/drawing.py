"""Draws diagrams as SVG that is legible on light and dark pages and on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

_STYLE = """
:root { --ink: #1c1c1c; --soft: #5f6368; --fill: #f3f0ec; --accent: #b5482f; --glow: #fbe3da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ecebe9; --soft: #b3b7bd; --fill: #31343d; --accent: #ff9d7a; --glow: #5a3427; }
}
text { font: 13px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.left { text-anchor: start; }
.right { text-anchor: end; }
.bold { font-weight: 600; }
.soft { fill: var(--soft); font-size: 12px; }
.code { font-family: ui-monospace, monospace; font-size: 12px; }
text.accent { fill: var(--accent); }
rect, path { stroke: var(--ink); stroke-width: 1.2; fill: none; }
rect.box { fill: var(--fill); }
rect.glow { fill: var(--glow); stroke: var(--accent); }
rect.area, path.dashed { stroke: var(--soft); stroke-dasharray: 4 3; }
path.accent { stroke: var(--accent); stroke-width: 2; }
path.curve { stroke-width: 2.2; }
path.grid { stroke: var(--soft); stroke-width: .4; }
#head { fill: var(--ink); stroke: none; }
"""
_LINE = 17
"""Height of a line of text, in the drawing's units, of which a phone shows about 400 in a row."""


@dataclass
class Drawing:
    """A diagram under construction."""

    width: int
    height: int
    title: str
    """Words that say what the diagram shows to readers who do not see it."""
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write a line; ``y`` is its baseline, ``kind`` the classes of the style above."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], kind: str = "box"
    ) -> None:  # fmt: skip
        """Draw a box whose first line is its name."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'
        )
        first = y + (height - _LINE * (len(lines) - 1)) / 2 + 5
        for number, line in enumerate(lines):
            style = "soft" if number else "bold"
            if line.startswith("$ "):
                style, line = "code", line.removeprefix("$ ")
            self.text(x + width / 2, first + number * _LINE, line, style)

    def area(self, x: float, y: float, width: float, height: float, words: str) -> None:
        """Draw a dashed frame with a name in its upper left corner."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="area"/>'
        )
        self.text(x + 9, y + 17, words, "left soft")

    def line(self, points: Sequence[tuple[float, float]], kind: str = "", *, head: bool = True) -> None:  # fmt: skip
        """Draw a line through points, with an arrow's head at its end."""
        way = " L".join(f"{x:g} {y:g}" for x, y in points)
        marker = ' marker-end="url(#arrow)"' if head else ""
        self.parts.append(f'<path d="M{way}" class="{kind}"{marker}/>')

    def svg(self) -> str:
        """Return the diagram."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width * 1.3:g}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{_STYLE}</style>\n"
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
            '<path id="head" d="M0 0 L8 4 L0 8 z"/></marker>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )
