"""Builds the documentation site: ``python -m marsray_docs.build build``.

The pages of ``docs``, those that lie elsewhere in the repository and those that are generated are put
together in one folder, from which Zensical makes the site. A link or picture that leads nowhere, and a
page that the menu lacks, is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path

from marsray_docs import commands, families, metrics, repository, rest, settings
from marsray_docs.tables import with_plain_pipes

CONFIG = repository.ROOT / "mkdocs.yml"
_PAGE_OF_MENU = re.compile(r"^ +- .+: (\S+\.md)$", re.MULTILINE)
GENERATED: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands.page,
    "reference/families.md": families.page,
    "reference/rest.md": rest.page,
    "reference/metrics.md": metrics.page,
    **{f"reference/{name}.md": partial(settings.page, name) for name in settings.REFERENCES},
}


def main(folder: Path) -> None:
    """Build the site into ``site`` in a folder; what it is built from lies beside it.

    Raises:
        ValueError: a link leads nowhere, or a page is not in the menu.
        subprocess.CalledProcessError: Zensical found an error, and has printed it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "docs", ignore_errors=True)
    stage(folder / "docs")
    shutil.copy(CONFIG, folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run([*command, "--config-file", CONFIG.name], cwd=folder, check=True)  # noqa: S603 - our own program


def stage(folder: Path) -> None:
    """Put all pages and pictures of the site into a folder, or raise as :func:`main` does."""
    generated = {f"{repository.DOCS}/{place}" for place in GENERATED}
    texts = {place: generate() for place, generate in GENERATED.items()}
    wrong: list[str] = []
    for path, place in repository.sources().items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, target)
            continue
        wrong += repository.broken_links(path, generated)
        texts[place] = repository.with_links_of_the_site(path.read_text(encoding="utf-8"), place)
    for place, text in texts.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_plain_pipes(text), encoding="utf-8")
    pages = {place for place in texts if place.endswith(".md")}
    wrong += menu_gaps(CONFIG.read_text(encoding="utf-8"), pages)
    if wrong:
        raise ValueError("\n".join(wrong))


def menu_gaps(config: str, pages: Set[str]) -> list[str]:
    """Return in what the menu of a configuration differs from the pages, one line each."""
    menu = set(_PAGE_OF_MENU.findall(config))
    lacking = [f"the menu lacks {place}" for place in sorted(pages - menu)]
    return lacking + [
        f"the menu names {place}, which is not there" for place in sorted(menu - pages)
    ]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
