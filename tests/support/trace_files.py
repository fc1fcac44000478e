"""Writes request traces for tests that read them."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from mars_autoscale.traces.files import TraceRequest


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Write a trace in marsray's own format, compressed if the name ends in ``.gz``."""
    rows = ["arrival_s,prompt_tokens,output_tokens,class"]
    rows += [
        f"{each.arrival_s:.6f},{each.prompt_tokens},{each.output_tokens},{each.tier}"
        for each in trace
    ]
    raw = "\n".join(rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
