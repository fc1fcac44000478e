"""Hooks of mkdocs: pages that are generated or lie outside ``docs/``, and their links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from marsray_docs import commands, families, metrics, repository, rest, settings

GENERATED: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands.page,
    "reference/families.md": families.page,
    "reference/rest.md": rest.page,
    "reference/metrics.md": metrics.page,
    **{
        f"reference/{name}.md": partial(settings.page, reference)
        for name, reference in settings.REFERENCES.items()
    },
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and those that lie outside ``docs/``."""
    for file in _added(config):
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn a page's links from files of the repository to pages of the site."""
    del config, files
    if page.file.src_uri in GENERATED:
        return markdown
    return repository.with_links_of_the_site(markdown, page.file.src_uri)


def _added(config: MkDocsConfig) -> Iterator[File]:
    for place, generate in GENERATED.items():
        yield File.generated(config, place, content=generate())
    for path, place in repository.INCLUDED.items():
        text = (repository.ROOT / path).read_text(encoding="utf-8")
        yield File.generated(config, place, content=text)
    for path in repository.PICTURES:
        source = str(repository.ROOT / path)
        yield File.generated(config, f"pictures/{Path(path).name}", abs_src_path=source)
