"""Pages are short, and so are their sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marsray_docs import build

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    "README.md": 450,
    "CONTRIBUTING.md": 1000,
    "docs/index.md": 250,
    "docs/architecture.md": 2600,
    "docs/about/status.md": 900,
    "docs/contribute/decisions.md": 700,
    "docs/guides/adapter.md": 500,
    "docs/guides/autoscale.md": 900,
    "docs/guides/clients.md": 1000,
    "docs/guides/kubernetes.md": 1400,
    "docs/guides/measure.md": 700,
    "docs/guides/serve.md": 1300,
    "docs/guides/train.md": 1100,
    "docs/operations/failures.md": 800,
    "docs/operations/go-live.md": 600,
    "docs/operations/runbook.md": 1200,
    "docs/operations/security.md": 1100,
    "docs/operations/sizing.md": 650,
    "docs/reference/glossary.md": 650,
    "docs/reference/request-fields.md": 1300,
    "docs/research/paper.md": 700,
    "docs/research/results.md": 1000,
    "docs/start/is-it-for-me.md": 600,
    "docs/start/quickstart.md": 450,
    "docs/start/your-model.md": 600,
    "docs/understand/how-it-works.md": 800,
    "docs/understand/speed-quality-load.md": 600,
}
"""Words outside code and results that a page should have at most; a tenth more is tolerated."""
TOGETHER = 22_000
GENERATED_WORDS = 12_000
LONGEST, USUAL = 35, 22
"""Most words of a sentence, and of the mean sentence of a page."""
_WORD = re.compile(r"\S*\w\S*")
_CODE = re.compile(r"(?ms)^ *(```+).*?^ *\1`*[ ]*$|^<!-- results:.*?^<!-- /results -->$")
_NOT_PROSE = re.compile(_CODE.pattern + r"|<!--.*?-->|^(?:#| *\||!\[|=== )[^\n]*$|<[^>]+>")
_BREAK = re.compile(
    r"(?:^|\n)\s*(?:[-*]|\d+\.) |\n\s*\n|(?<=[.!?])[\"*)”]*\s+(?=[A-ZÄÖÜ`\[*(τ\"“])|:\s+"
)


def num_words(text: str) -> int:
    """Return the number of words, without blocks of code and tables of results."""
    return len(_WORD.findall(_CODE.sub("", text)))


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's paragraphs and lists; a colon ends one, too."""
    plain = re.sub(r"\]\([^)]*\)", "]", _NOT_PROSE.sub("\n\n", text))
    parts = (" ".join(each.split()) for each in _BREAK.split(plain))
    return [each for each in parts if num_words(each) > 2]


def test_every_page_by_hand_has_a_length() -> None:
    by_hand = {
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").rglob("*.md")
        if "decisions" not in page.parent.name
    }
    assert by_hand | {"README.md", "CONTRIBUTING.md"} == WORDS.keys()


@pytest.mark.parametrize("page", WORDS)
def test_a_page_is_short_and_so_are_its_sentences(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert num_words(text) <= 1.1 * WORDS[page]
    found = sentences(text)
    assert [each for each in found if num_words(each) > LONGEST] == []
    assert sum(map(num_words, found)) / len(found) < USUAL


def test_all_pages_together_are_short() -> None:
    assert sum(num_words((ROOT / page).read_text(encoding="utf-8")) for page in WORDS) <= TOGETHER
    assert sum(num_words(generate()) for generate in build.GENERATED.values()) <= GENERATED_WORDS


def test_long_sentences_are_found() -> None:
    prose = "One two three. Four five six:\nseven eight nine."
    parts = (prose, "- ten eleven\ntwelve", "| a b c |")
    told = ["One two three.", "Four five six", "seven eight nine.", "ten eleven twelve"]
    assert sentences("# A head of any length\n\n" + "\n\n".join(parts)) == told
    assert num_words("a b\n<!-- results:c -->\n| d |\n*e.*\n<!-- /results -->\n```\nf\n```") == 2
