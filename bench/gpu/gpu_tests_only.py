"""A plugin of pytest that keeps only the tests that are skipped without a GPU."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _needs_gpu(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _needs_gpu(item: pytest.Item) -> bool:
    reasons = (str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif"))
    return any("GPU" in reason or "on CUDA" in reason for reason in reasons)
