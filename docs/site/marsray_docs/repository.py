"""Brings files from outside ``docs/`` into the site, turns links to them, and checks links.

The pages are read in the repository as well, so their links name files there. On the site a link to a
file that has a page leads to that page; a link to any other file keeps its words alone, because the
site has no address of the repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container
from pathlib import Path, PurePosixPath

from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[3]
DOCS = "docs"

INCLUDED = {
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "contribute/contributing.md",
}
"""Page of the site for each file outside ``docs/`` that has one."""
_STANDS_FOR = {
    "README.md": "index.md",
    "SECURITY.md": "operations/security.md",
    "k8s/README.md": "guides/kubernetes.md",
}
"""Page that a link on the site leads to in place of a short file of the repository."""
_OFF_SITE = ("docs/site/", "docs/decisions/")
PICTURES = ("bench/autoscaling/burst.svg", "bench/autoscaling/check.svg",
            "bench/autoscaling/comparison.svg")  # fmt: skip
"""Pictures outside ``docs/`` that pages show; they lie below ``pictures/`` on the site."""

_LINK = re.compile(r"(?P<image>!?)\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_SOURCE = re.compile(r"<img[^>]* src=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_ADDRESS = re.compile(r"https?://[\w.-]+(:\d+)?(/[^\s<>\"]*)?|mailto:[^\s@]+@[^\s@]+")
_slug = slugify(case="lower")
_FENCE = re.compile(r"^(```+).*?^\1`*[ ]*$", re.MULTILINE | re.DOTALL)


def sources() -> dict[Path, str]:
    """Return the files of the repository that the site has, each with its place there."""
    files = [path for path in (ROOT / DOCS).rglob("*") if path.is_file()]
    paths = [*(str(path.relative_to(ROOT)) for path in files), *INCLUDED, *PICTURES]
    places = {ROOT / path: _place(path) for path in sorted(paths)}
    return {path: place for path, place in places.items() if place is not None}


def origin_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    outside = {included: path for path, included in INCLUDED.items()}
    return outside.get(page, f"{DOCS}/{page}")


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Return a page with its links turned from files of the repository to pages of the site.

    Args:
        markdown: the page's text.
        page: path of the page on the site.
    """
    parts, position = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_turned(markdown[position : fence.start()], page), fence.group()]
        position = fence.end()
    return "".join([*parts, _turned(markdown[position:], page)])


def _turned(markdown: str, page: str) -> str:
    return _LINK.sub(lambda found: _link(found, page), markdown)


def _link(found: re.Match[str], page: str) -> str:
    target, _, anchor = found["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return found.group()
    folder = PurePosixPath(origin_of(page)).parent
    path = os.path.normpath(folder / target)
    place = _place(path)
    if place is None:
        return found["words"]
    relative = os.path.relpath(place, PurePosixPath(page).parent)
    return f"{found['image']}[{found['words']}]({relative}{anchor and f'#{anchor}'})"


def _place(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it has not."""
    if path in INCLUDED:
        return INCLUDED[path]
    if path in PICTURES:
        return f"pictures/{Path(path).name}"
    if path in _STANDS_FOR:
        return _STANDS_FOR[path]
    is_page = path.startswith(f"{DOCS}/") and not path.startswith(_OFF_SITE)
    return path.removeprefix(f"{DOCS}/") if is_page else None


def broken_links(page: Path, generated: Container[str] = ()) -> list[str]:
    """Return what is wrong with the links of a page of the repository, one line each.

    Args:
        page: the page.
        generated: paths of pages that only the site has; pages outside ``docs`` cannot lead to them.
    """
    text, name = _FENCE.sub("", page.read_text(encoding="utf-8")), page.relative_to(ROOT)
    targets = [found["target"] for found in _LINK.finditer(text)] + _SOURCE.findall(text)
    wrong = (_wrong(page, target, generated) for target in targets)
    return [f"{name}: {target} {why}" for target, why in zip(targets, wrong, strict=True) if why]


def _wrong(page: Path, target: str, generated: Container[str]) -> str:
    if re.match(r"[a-z]+:", target):
        return "" if _ADDRESS.fullmatch(target) else "is no address"
    path, _, anchor = target.partition("#")
    file = Path(os.path.normpath(page.parent / path)) if path else page
    if not file.is_relative_to(ROOT):
        return "is outside the repository"
    if page.is_relative_to(ROOT / DOCS) and str(file.relative_to(ROOT)) in generated:
        return ""
    if not file.exists():
        return "does not exist"
    return "names no heading" if anchor and anchor not in anchors(file) else ""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site has them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", words) for words in _HEADING.findall(text))
    given = re.findall(r"\bid=\"([^\"]+)\"|\{ *#([\w-]+) *\}", text)
    return {_slug(words, "-") for words in plain} | {name for pair in given for name in pair}
