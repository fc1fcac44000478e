"""Writes tables of the log of experiments into the pages of ``docs``: ``make figures`` runs it.

A table of ``bench/log/*.md`` stands between ``<!-- results:NAME YYYY-MM-DD, machine; what -->`` and
``<!-- /results -->``; a page shows it, with the words of its mark, between ``<!-- results:NAME -->`` and the same end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from marsray_docs.repository import DOCS, ROOT

LOGS = ROOT / "bench" / "log"
_MARK = re.compile(r"^<!-- /?results.*$", re.MULTILINE)
_RESULT = re.compile(
    r"^<!-- results:(?P<name>[\w-]+) (?P<caption>\d{4}-\d\d-\d\d, .+) -->\n+(?P<table>(?:\|.*\n)+)\n*<!-- /results -->$",
    re.MULTILINE,
)
_PLACE = re.compile(r"^<!-- results:(.*) -->\n(?:[|*].*\n|\n)*<!-- /results -->$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """A table of the log."""

    caption: str
    """Date, machine and what was measured."""
    table: str
    """The table as Markdown."""

    @property
    def rows(self) -> list[list[str]]:
        """The table's cells by rows, the head first."""
        lines = [line for line in self.table.splitlines() if not re.fullmatch(r"[|\s:-]+", line)]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def results() -> dict[str, Result]:
    """Return the marked tables of all logs by their names.

    Raises:
        ValueError: a mark has no date, table or end, or two have one name.
    """
    return read("\n".join(log.read_text(encoding="utf-8") for log in sorted(LOGS.glob("*.md"))))


def read(text: str) -> dict[str, Result]:
    """Return the marked tables of a text by their names, or raise as :func:`results` does."""
    found = list(_RESULT.finditer(text))
    if wrong := _MARK.findall(_RESULT.sub("", text)):
        raise ValueError(f"needs NAME YYYY-MM-DD, a table and <!-- /results -->: {wrong}")
    names = [each["name"] for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"the log has two results of one name: {sorted(names)}")
    return {each["name"]: Result(each["caption"], each["table"]) for each in found}


def pages() -> dict[Path, str]:
    """Return the pages of ``docs`` with today's tables, or raise as :func:`with_results` does."""
    files = (ROOT / DOCS).rglob("*.md")
    return {file: with_results(file.read_text(encoding="utf-8")) for file in files}


def with_results(markdown: str) -> str:
    """Return a page with today's tables between its marks.

    Raises:
        ValueError: the log has no table of a mark's name, or a mark has no end.
    """
    shown = {
        name: f"<!-- results:{name} -->\n\n{each.table}\n*{each.caption}.*\n\n<!-- /results -->"
        for name, each in results().items()
    }
    rest = _PLACE.sub(lambda place: "" if place[1] in shown else place[0], markdown)
    if wrong := _MARK.findall(rest):
        raise ValueError(f"needs a NAME of {sorted(shown)} and <!-- /results -->: {wrong}")
    return _PLACE.sub(lambda place: shown[place[1]], markdown)


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
