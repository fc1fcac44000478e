"""No call that can load a model lets a checkpoint's own code run, in any source of the project.

Where a call leaves ``trust_remote_code`` out, transformers asks on a terminal, and ``y`` runs it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADERS = {"from_pretrained", "from_config", "pipeline"}
FORBIDDEN = {"get_class_from_dynamic_module", "load_dataset", "load_repo", "simple_evaluate"}
"""Calls that run code of a download, or whose code-running option goes by other names."""
OPTION = r"trust[-_]remote[-_]code"
TRUSTING = re.compile(rf"--{OPTION}|{OPTION}\W{{1,4}}(true|yes|1)", re.IGNORECASE)


def folders() -> list[Path]:
    """The checkout's directories that users get; tests load models that they have built."""
    found = [each for each in ROOT.iterdir() if each.is_dir() and each.name[0] != "."]
    return [ROOT / ".github", *(each for each in found if each.name not in {"tests", "docs"})]


def problems(text: str) -> Iterator[str]:
    """Say which calls and names of a module could let a checkpoint's code run."""
    tree = ast.parse(text)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        problem = problem_of(node, is_called=id(node) in called)
        if problem is not None:
            yield f"line {getattr(node, 'lineno', 0)}: {problem}"


def problem_of(node: ast.AST, *, is_called: bool) -> str | None:
    name = name_of(node)
    keywords = node.keywords if isinstance(node, ast.Call) else []
    given = [is_false(each) for each in keywords if each.arg == "trust_remote_code"]
    if isinstance(node, ast.Call) and name_of(node.func) in LOADERS and given != [True]:
        return f"{name_of(node.func)} without trust_remote_code=False"
    if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not is_false(node):
        return "trust_remote_code is not False"
    if isinstance(node, ast.Constant) and TRUSTING.search(str(node.value)):
        return "a text that sets trust_remote_code"
    if name in FORBIDDEN:
        return name
    if name in LOADERS and not is_called and not isinstance(node, ast.alias):
        return f"{name} is passed on, out of this check's sight"
    return None


def is_false(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant) and keyword.value.value is False


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name
    return node.id if isinstance(node, ast.Name) else ""


def test_no_source_lets_a_checkpoints_code_run():
    names = {each.name for each in folders()}
    assert {"platform", "train", "serve", "autoscale", "bench", "k8s", ".github"} <= names
    assert [
        f"{file.relative_to(ROOT)}: {problem}"
        for folder in folders()
        for file in sorted(folder.rglob("*.py"))
        for problem in problems(file.read_text(encoding="utf-8"))
    ] == []


def test_no_other_file_sets_the_option():
    suffixes = {".yaml", ".yml", ".json", ".toml", ".txt", ".sh", ".in"}
    files = [file for folder in folders() for file in folder.rglob("*") if file.suffix in suffixes]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "tests/clients/pytest.ini"]
    files += (ROOT / "tests" / "clients").rglob("*.yaml")
    assert [file for file in files if TRUSTING.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "text",
    [
        "AutoModel.from_pretrained(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=None)",
        "AutoModel.from_pretrained(path, trust_remote_code=trusted)",
        "AutoModel.from_pretrained(path, **options)",
        "AutoModel.from_config(config, dtype=dtype)",
        "transformers.pipeline('text-generation')",
        "pipeline(task)",
        "run(trust_remote_code=True)",
        "run('--model_args', 'pretrained=x,trust_remote_code=True')",
        "run('--trust-remote-code')",
        "load = AutoModel.from_pretrained",
        "partial(AutoModel.from_pretrained, trust_remote_code=False)",
        "datasets.load_dataset('x')",
        "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
    ],
)
def test_the_check_sees_every_way_to_run_the_code(text):
    assert list(problems(text))
