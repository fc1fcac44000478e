"""Puts tables of the log of experiments into pages, with date and machine.

A table of ``bench/log/*.md`` stands between ``<!-- results:NAME YYYY-MM-DD, machine; what -->`` and
``<!-- /results -->``; a page shows it where it has ``{{ results:NAME }}`` on a line of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from marsray_docs.repository import ROOT

LOGS = ROOT / "bench" / "log"
_MARK = re.compile(r"^<!-- results:.*$", re.MULTILINE)
_RESULT = re.compile(
    r"^<!-- results:(?P<name>[\w-]+) (?P<caption>\d{4}-\d\d-\d\d, .+) -->\n+(?P<table>(?:\|.*\n)+)\n*<!-- /results -->$",
    re.MULTILINE,
)
_PLACE = re.compile(r"^\{\{ results:(?P<name>.*) \}\}$", re.MULTILINE)


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
    whole = {each.group().partition("\n")[0] for each in found}
    wrong = [mark for mark in _MARK.findall(text) if mark not in whole]
    if wrong:
        raise ValueError(f"needs NAME YYYY-MM-DD, a table and <!-- /results -->: {wrong}")
    names = [each["name"] for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"the log has two results of one name: {sorted(names)}")
    return {each["name"]: Result(each["caption"], each["table"]) for each in found}


def with_results(markdown: str) -> str:
    """Return a page with the tables that it names.

    Raises:
        ValueError: the log has no table of a name.
    """

    def shown(place: re.Match[str]) -> str:
        result = results().get(place["name"])
        if result is None:
            raise ValueError(f"no log has results:{place['name']}; there are {sorted(results())}")
        return f"{result.table}\n*{result.caption}.*\n"

    return _PLACE.sub(shown, markdown)
