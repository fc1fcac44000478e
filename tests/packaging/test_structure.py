"""The checkout's structure: sizes of rooms and files, and documents that name what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("platform", "train", "serve", "autoscale")
CHECKED = (*SOURCE_ROOTS, "tests", "bench")
MAX_FILES = 12
MAX_LINES = 500
PACKAGES = [
    next(path for path in (ROOT / root).iterdir() if path.is_dir()) for root in SOURCE_ROOTS
]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "k8s" / "README.md",
    ROOT / "tests" / "README.md",
]


def python_files():
    return [file for root in CHECKED for file in sorted((ROOT / root).rglob("*.py"))]


def test_no_folder_holds_more_files_than_a_reader_keeps_in_mind():
    folders = {file.parent for file in python_files()}
    sizes = {str(each.relative_to(ROOT)): len(list(each.glob("*.py"))) for each in folders}
    assert {name: size for name, size in sizes.items() if size > MAX_FILES} == {}
    assert len(list((ROOT / "serve" / "mars_serve").glob("*.py"))) <= 3


def test_no_file_is_too_long():
    pages = ROOT / "serve" / "mars_serve" / "http" / "pages"
    files = [*python_files(), *(file for file in pages.rglob("*") if file.is_file())]
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {file.name: length for file, length in lengths.items() if length > MAX_LINES} == {}


def test_every_package_says_in_one_line_what_it_is_for():
    for package in PACKAGES:
        for init in package.rglob("__init__.py"):
            assert re.match(r'"""[A-Z`].+\.', init.read_text(encoding="utf-8")), init


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_files_that_exist(document):
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|svg|json))`", text)
    bases = [ROOT, document.parent, *PACKAGES, *(package.parent for package in PACKAGES)]
    missing = {name for name in named if not any((base / name).exists() for base in bases)}
    assert missing - {"platform/__init__.py"} == set(), "the latter must never exist"
