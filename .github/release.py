"""What is checked before a release, and its notes: the tag, the version and CHANGELOG.md agree.

python .github/release.py v0.1.0 > notes.md
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, root: Path = _ROOT) -> str:
    """The section of CHANGELOG.md for the version that a tag names.

    Args:
        tag: ``v`` and the version.
        root: the directory with pyproject.toml and CHANGELOG.md.

    Raises:
        ValueError: the tag is not the project's version, or there is no dated section for it.
    """
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(
            f"tag {tag}: pyproject.toml has version {version}; tag v{version}, or change it"
        )
    heading = re.compile(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |^\[[^]]+\]: |\Z)",
        re.MULTILINE | re.DOTALL,
    )
    section = heading.search((root / "CHANGELOG.md").read_text())
    if section is None or not section[1].strip():
        raise ValueError(
            f"CHANGELOG.md: no section '## [{version}] - YYYY-MM-DD' with content; write one"
        )
    return section[1].strip() + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(release_notes(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
