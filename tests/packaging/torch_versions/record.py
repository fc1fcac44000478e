"""Records the signatures of torch on which this project relies, read from the sources of a wheel.

    pip download torch==2.12.0 --no-deps && unzip -q torch-*.whl 'torch/*.py' -d sources
    python tests/packaging/torch_versions/record.py 2.12 sources

Nothing of torch is imported, so that versions can be recorded that do not run here.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")


def signatures(folder: Path, places: list[str]) -> dict[str, str]:
    """Return the names of the parameters of functions and classes, and nothing for plain values."""
    return {place: " ".join(_signature(folder, place)) for place in places}


def _signature(folder: Path, place: str) -> list[str]:
    path, _, names = place.partition(":")
    body: list[ast.stmt] = ast.parse((folder / "torch" / path).read_text("utf-8")).body
    for name in names.split("."):
        node = _last(body, name)
        body = getattr(node, "body", [])
    if isinstance(node, ast.ClassDef):
        own = [part for part in body if isinstance(part, ast.FunctionDef)]
        init = [part for part in own if part.name == "__init__"]
        if not init:  # a dataclass, or nothing of its own
            fields = [part for part in body if isinstance(part, ast.AnnAssign)]
            return [ast.unparse(part.target) for part in fields]
        node = init[-1]
    if not isinstance(node, ast.FunctionDef):
        return []
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls")]


def _last(body: list[ast.stmt], name: str) -> ast.stmt:
    """Return the last definition of a name, which follows its overloads."""
    found = [part for part in _flat(body) if _defines(part, name)]
    if not found:
        raise LookupError(f"{name} is not defined")
    return found[-1]


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements with those of conditions in their place."""
    flat = []
    for part in body:
        flat += _flat([*part.body, *part.orelse]) if isinstance(part, ast.If) else [part]
    return flat


def _defines(part: ast.stmt, name: str) -> bool:
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return part.name == name
    targets = getattr(part, "targets", [getattr(part, "target", None)])
    return any(isinstance(each, ast.Name) and each.id == name for each in targets)


def main() -> None:
    """Enter a version's signatures in the file."""
    version, folder = sys.argv[1], Path(sys.argv[2])
    recorded = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    places = (Path(__file__).with_name("used.txt")).read_text("utf-8").splitlines()
    recorded[version] = signatures(folder, [line.split()[0] for line in places])
    FILE.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
