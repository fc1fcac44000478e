"""Links of pages lead somewhere, and results come from the log as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from marsray_docs import build, repository, results

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "k8s", "examples", "bench", "tests", "platform", "train", "serve", "autoscale")
PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
GENERATED = {f"docs/{place}" for place in build.GENERATED}
LOG = """## 2026-11-28: an experiment

<!-- results:speed 2026-11-28, two cores; 121M weights -->

| clients | 1 | 64 |
| --- | --- | --- |
| `exact` | 199 | 451 |

<!-- /results -->
"""


def test_links_of_pages_lead_to_files_and_headings() -> None:
    assert len(PAGES) > 50
    assert [each for page in PAGES for each in repository.broken_links(page, GENERATED)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](b.md)", "b.md does not exist"),
        ("![a](b.svg)", "b.svg does not exist"),
        ('<img src="b.svg">', "b.svg does not exist"),
        ("[a](#b)", "#b names no heading"),
        ("[a](README.md#b)", "README.md#b names no heading"),
        ("[a](../outside.md)", "../outside.md is outside the repository"),
        ("[a](https:/host/path)", "https:/host/path is no address"),
        ("[a](ftp://host/path)", "ftp://host/path is no address"),
        ("# The τ of `b`, now\n[a](#the-τ-of-b-now)", None),
        ("[a](https://host.org/b?c=d#e) [b](mailto:a@b.org)", None),
        ("```sh\n[a](b.md)\n```", None),
    ],
)
def test_a_link_that_leads_nowhere_is_told(
    text: str, wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("# Title\n")
    page = tmp_path / "links.md"
    page.write_text(text, encoding="utf-8")
    assert repository.broken_links(page) == ([f"links.md: {wrong}"] if wrong else [])


def test_the_menu_has_every_page() -> None:
    menu = "nav:\n  - Home: index.md\n  - Guides:\n      - Serve it: guides/serve.md\n"
    assert build.menu_gaps(menu, {"index.md", "guides/serve.md"}) == []
    assert build.menu_gaps(menu, {"index.md", "guides/train.md"}) == [
        "the menu lacks guides/train.md",
        "the menu names guides/serve.md, which is not there",
    ]


def test_pages_show_the_tables_of_todays_log() -> None:
    pages = results.pages()
    assert sum(text.count("<!-- results:") for text in pages.values()) > 10
    changed = [page for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    assert changed == [], "run make figures"


def test_a_page_shows_a_table_of_the_log_with_its_date() -> None:
    assert results.read(LOG)["speed"].rows == [["clients", "1", "64"], ["`exact`", "199", "451"]]
    (name, first) = next(iter(results.results().items()))
    begin, end = f"<!-- results:{name} -->\n", "<!-- /results -->\n"
    table = f"\n{first.table}\n*{first.caption}.*\n\n"
    assert results.with_results(f"a\n{begin}| old |\n{end}b") == f"a\n{begin}{table}{end}b"
    for wrong in (
        begin,
        end,
        begin * 2 + end,
        begin + "words\n" + end,
        begin.replace(name, "no") + end,
    ):
        with pytest.raises(ValueError, match="needs a NAME"):
            results.with_results(wrong)


@pytest.mark.parametrize(
    "text",
    [
        LOG.replace("2026-11-28, two", "two"),
        LOG.replace("<!-- /results -->", ""),
        LOG.replace("| --- | --- | --- |\n", "\n"),
        LOG + LOG,
    ],
    ids=["no date", "no end", "no table", "twice"],
)
def test_a_wrong_mark_in_the_log_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="speed"):
        results.read(text)
