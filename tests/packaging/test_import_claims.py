"""The import-linter contract that checks what docstrings claim."""

import sys

import grimp
import pytest

from import_claims import DocstringClaims, claims_of


@pytest.mark.parametrize(
    ("docstring", "claims"),
    [
        ("Plans steps. Imports no torch.", ["torch"]),
        ("Plans steps. Imports no Ray, torch or\nHTTP library.", ["Ray", "torch", "HTTP library"]),
        ("Plans steps on Ray.", []),
    ],
)
def test_claims_are_read_from_docstrings(docstring, claims):
    assert claims_of(docstring) == claims


@pytest.mark.parametrize(
    ("imported", "is_kept"), [("json", True), ("httpx", False), ("claiming.client", False)]
)
def test_a_claim_is_broken_by_imports_inside_functions_and_through_other_modules(
    tmp_path, monkeypatch, imported, is_kept
):
    package = tmp_path / "claiming"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text("import httpx\n")
    (package / "pure.py").write_text(
        f'"""Adds numbers. Imports no HTTP library."""\ndef add():\n    import {imported}\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    graph = grimp.build_graph("claiming", include_external_packages=True, cache_dir=None)
    contract = DocstringClaims("claims", {}, {})
    try:
        assert contract.check(graph, verbose=False).kept == is_kept
    finally:
        sys.modules.pop("claiming", None)
