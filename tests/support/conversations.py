"""Conversations in files, and as items to decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.measure.evaluation.items import EvalItem, read_items


def row(question: str, response: str = "Answer: 7", **columns: Any) -> dict[str, Any]:
    """Return a conversation of one question and one response."""
    turns = [("user", question), ("assistant", response)]
    return {"messages": [{"role": role, "content": text} for role, text in turns], **columns}


def write(path: Path, *rows: Any) -> Path:
    """Write rows to a JSONL file."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


def read(*paths: Path, model: Path, **options: Any) -> list[EvalItem]:
    """Read items with the tokenizer and context of a model."""
    checkpoint = read_checkpoint(model)
    limits = {"max_length": checkpoint.max_length, **options}
    return read_items(paths, checkpoint.tokenizer, **limits)
