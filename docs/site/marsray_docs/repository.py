"""Brings files from outside ``docs/`` into the site, and turns links to them.

The pages are read in the repository as well, so their links name files there. On the site a link to a
file that has a page leads to that page; a link to any other file keeps its words alone, because the
site has no address of the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[3]
DOCS = "docs"

INCLUDED = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "operations/security.md",
    "bench/LOG.md": "design/log.md",
    "bench/log/2026-11.md": "design/log-2026-11.md",
    "k8s/README.md": "operations/kubernetes.md",
    "k8s/image/README.md": "operations/image.md",
    "tests/README.md": "project/tests.md",
    "examples/README.md": "examples.md",
}
"""Page of the site for each file outside ``docs/`` that has one."""
PICTURES = ("bench/autoscaling/burst.svg", "bench/autoscaling/check.svg",
            "bench/autoscaling/comparison.svg")  # fmt: skip
"""Pictures outside ``docs/`` that pages show; they lie below ``pictures/`` on the site."""

_LINK = re.compile(r"(?P<image>!?)\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^(```+).*?^\1`*[ ]*$", re.MULTILINE | re.DOTALL)


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
        # A target that does not exist stays, so that the strict build names it.
        return found["words"] if (ROOT / path).exists() else found.group()
    relative = os.path.relpath(place, PurePosixPath(page).parent)
    return f"{found['image']}[{found['words']}]({relative}{anchor and f'#{anchor}'})"


def _place(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it has not."""
    if path in INCLUDED:
        return INCLUDED[path]
    if path in PICTURES:
        return f"pictures/{Path(path).name}"
    if path == "README.md":
        return "index.md"
    folder = f"{DOCS}/"
    is_page = path.startswith(folder) and not path.startswith(f"{folder}site/")
    return path.removeprefix(folder) if is_page else None
