"""The pages that promise something name tests, which exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(\w+))?`")


def section(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md", "docs/serving.md"])
def test_the_tests_that_a_page_names_exist(page):
    folder, found = "", 0
    for file, function in NAMED.findall((ROOT / page).read_text(encoding="utf-8")):
        if "/" in file:  # a bare name is a file of the folder that was named last
            folder = file.rpartition("/")[0]
        path = ROOT / folder / file.rpartition("/")[2]
        assert path.is_file(), f"{page} names {path.relative_to(ROOT)}"
        assert f"def {function}(" in path.read_text(encoding="utf-8") or not function
        found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("page", "title"),
    [("SECURITY.md", "What the server does by default"), ("docs/serving.md", "Behaviour")],
)
def test_every_claim_of_a_list_names_its_tests(page, title):
    claims = section(page, title).strip().split("\n- ")
    assert len(claims) > 10
    assert [each for each in claims if not NAMED.search(each)] == []


def test_every_line_of_the_promises_names_its_tests():
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) if "---" not in row]
    assert [row for row in rows if not NAMED.search(row) and "| test |" not in row] == []
