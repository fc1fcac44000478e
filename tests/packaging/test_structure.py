"""Documents name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("platform", "train", "serve", "autoscale")
PACKAGES = [
    next(path for path in (ROOT / root).iterdir() if path.is_dir()) for root in SOURCE_ROOTS
]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "k8s" / "README.md",
    ROOT / "examples" / "README.md",
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_files_that_exist(document):
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    files = [link for link in links if "reference/" not in link]  # pages generated for the site
    assert [link for link in files if not (document.parent / link).exists()] == []
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|svg|json))`", text)
    bases = [ROOT, document.parent, *PACKAGES, *(package.parent for package in PACKAGES)]
    missing = {name for name in named if not any((base / name).exists() for base in bases)}
    assert missing - {"platform/__init__.py"} == set(), "the latter must never exist"
