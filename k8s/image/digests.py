"""Pins images by digest: those that the image is built on, and those that the manifests deploy.

    python k8s/image/digests.py             asks the registries for the digests that are missing
    python k8s/image/digests.py --update    asks for all, after a change of a tag or for new fixes
    python k8s/image/digests.py --check     names the images without a digest, without network

Whoever owns a tag can move it; a digest always means the same image. Both stand in the files, as
NAME:TAG@DIGEST. Asking needs Docker with buildx. Whoever builds marsray's own image pins it in
components/image/kustomization.yaml.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_K8S = Path(__file__).resolve().parents[1]
_REFERENCE = re.compile(
    r"(?P<before>^FROM |^\s*(?:- )?image: )(?P<image>[a-z0-9./_-]+:[\w.-]+)"
    r"(?P<digest>@sha256:[0-9a-f]{64})?(?=\s|$)",
    re.MULTILINE,
)


def files(root: Path) -> Iterator[Path]:
    """Yield the files that may name images."""
    yield root / "image" / "Dockerfile"
    yield from sorted(root.rglob("*.yaml"))


def unpinned(root: Path) -> list[str]:
    """Return the images that a tag alone names, with their files."""
    return [
        f"{file.relative_to(root)}: {found['image']}"
        for file in files(root)
        for found in _REFERENCE.finditer(file.read_text(encoding="utf-8"))
        if not found["digest"]
    ]


def pin(root: Path, *, update: bool) -> None:
    """Write the digests that the registries have now, where they are missing or everywhere."""

    def pinned(found: re.Match[str]) -> str:
        kept = None if update else found["digest"]
        return found["before"] + found["image"] + (kept or f"@{_ask(found['image'])}")

    for file in files(root):
        text = file.read_text(encoding="utf-8")
        if (changed := _REFERENCE.sub(pinned, text)) != text:
            file.write_text(changed, encoding="utf-8")
            sys.stdout.write(f"{file.relative_to(root)}\n")


def _ask(image: str) -> str:
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{json .Manifest}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"error: {image}: {done.stderr.strip()}")
    digest = str(json.loads(done.stdout)["digest"])
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        sys.exit(f"error: {image}: the registry's digest is {digest!r}")
    return digest


def main(arguments: list[str], root: Path = _K8S) -> int:
    """Run a command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--update", action="store_true", help="ask for all digests")
    choice.add_argument("--check", action="store_true", help="name images without a digest")
    options = parser.parse_args(arguments)
    if not options.check:
        pin(root, update=options.update)
        return 0
    for missing in unpinned(root):
        sys.stderr.write(f"{missing} has no digest; run k8s/image/digests.py\n")
    return 1 if unpinned(root) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
