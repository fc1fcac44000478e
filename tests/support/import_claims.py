"""An import-linter contract that holds modules to what their docstrings claim not to import.

A module docstring that ends in ``Imports no Ray or torch.`` makes a claim for the module; in a
package's ``__init__.py`` it makes the claim for every module of the package. Imports inside
functions and imports through other modules count.
Source: https://import-linter.readthedocs.io/en/stable/custom_contract_types/
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

LIBRARIES = {
    "Ray": ("ray",),
    "torch": ("torch", "transformers", "accelerate"),  # the latter two import torch
    "HTTP library": ("fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "openai"),
}
_CLAIM = re.compile(r"\bImports no ((?:Ray|torch|HTTP library|,|\s|or|and|nor)+)\.")


def claims_of(docstring: str) -> list[str]:
    """Return the names of `LIBRARIES` that a module docstring claims are not imported."""
    found = _CLAIM.search(" ".join(docstring.split()))
    return [name for name in LIBRARIES if found is not None and name in found[1]]


class DocstringClaims(Contract):
    """Checks the claim of every module docstring that makes one."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look for a chain of imports that breaks a claim."""
        claims = {
            module: claims
            for module in graph.modules
            if "." in module and (claims := claims_of(_docstring(module)))
        }
        chains = [
            chain
            for module, names in sorted(claims.items())
            for name in names
            for member in sorted({module} | graph.find_descendants(module))
            for library in LIBRARIES[name]
            if library in graph.modules
            if (chain := graph.find_shortest_chain(importer=member, imported=library))
        ]
        metadata = {"chains": chains, "num_claims": sum(map(len, claims.values()))}
        return ContractCheck(kept=bool(claims) and not chains, metadata=metadata)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each broken claim with the chain of imports that breaks it."""
        output.print_error(f"{check.metadata['num_claims']} claims were found in docstrings.")
        for chain in check.metadata["chains"]:
            output.print_error(f"{chain[0]} claims not to import {chain[-1]}:")
            output.indent_cursor()
            output.print_error(" -> ".join(chain))
            output.new_line()


def _docstring(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
