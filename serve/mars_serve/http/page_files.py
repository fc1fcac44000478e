"""The files of the web pages, read once from the folder ``pages`` beside this module.

Each folder there but ``common`` is a page: its ``index.html`` is served at ``/`` for the playground
and at the folder's name for others, and every other file at its path below ``/pages/``. Nothing but
these files is ever served, whatever a request asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

_FOLDER = Path(__file__).parent / "pages"
_FRONT = "playground"  # the page at /
_INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types by the end of a file's name; files with other ends are not served."""


@dataclass(frozen=True)
class PageFile:
    """A file of a page, with what HTTP says of it."""

    content: bytes
    content_type: str
    etag: str
    """Strong entity tag, which changes with the content."""


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files by the paths at which they are served."""
    return {
        _path_of(file.relative_to(_FOLDER)): _read(file)
        for file in sorted(_FOLDER.rglob("*"))
        if file.is_file() and file.suffix in _TYPES
    }


def _path_of(file: Path) -> str:
    if file.name != _INDEX:
        return f"/pages/{file.as_posix()}"
    page = file.parent.as_posix()
    return "/" if page == _FRONT else f"/{page}"


def _read(file: Path) -> PageFile:
    content = file.read_bytes()
    digest = blake2b(content, digest_size=12).hexdigest()
    return PageFile(content, _TYPES[file.suffix], f'"{digest}"')
