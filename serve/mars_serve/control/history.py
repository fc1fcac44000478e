"""The last hour of a model in rows of figures: seconds at first, coarser ones later.

A row is kept as the JSON text in which dashboards get it, 200 characters at the most; `NUM_FINE`
and `NUM_COARSE` bound their number, so a model's history takes half a megabyte. Imports no Ray.
"""

import json
import math
from collections import deque
from collections.abc import Mapping

COLUMNS = (
    "time_s",  # seconds since 1970
    "num_ready",
    "num_starting",
    "num_draining",
    "num_ordered",
    "num_running",
    "num_waiting",
    "waiting_priority",
    "waiting_default",
    "waiting_flex",
    "threshold",
    "flex_threshold",
    "exact_share",
    "arrived_per_s",
    "ended_per_s",
    "failed_per_s",
    "rejected_per_s",
    "batch_lines_per_s",
    "generated_per_s",
    "prompt_per_s",
    "tokens_per_pass",
    "prefix_hit_share",
    "kv_share",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "gap_p50_s",
    "gap_p95_s",
    "gap_p99_s",
    "loss",
    "spent_share",
    "evidence",
)
"""Names of a row's figures, in order. A figure that is unknown is null."""
HOUR_S = 3600
COARSE_S = 5
"""Seconds that a coarse row stands for."""
NUM_FINE = 600
"""Number of latest seconds that are kept one by one."""
NUM_COARSE = HOUR_S // COARSE_S

Row = Mapping[str, float | None]


class History:
    """A model's rows, the oldest first."""

    def __init__(self) -> None:
        self._fine = deque[tuple[int, str]](maxlen=NUM_FINE)
        self._coarse = deque[tuple[int, str]](maxlen=NUM_COARSE)
        self._open: list[Row] = []
        """Rows of the coarse row that is not complete yet."""
        self._open_s = 0
        """Time of the latest of those."""

    @property
    def last_s(self) -> int | None:
        """Time of the latest row; None before the first."""
        return self._fine[-1][0] if self._fine else None

    def add(self, time_s: int, row: Row) -> None:
        """Add a second's figures; times rise."""
        if self._open and time_s // COARSE_S != self._open_s // COARSE_S:
            merged = _merged(self._open)
            self._coarse.append((self._open_s, _encoded(self._open_s, merged)))
            self._open = []
        self._open.append(row)
        self._open_s = time_s
        self._fine.append((time_s, _encoded(time_s, row)))

    def since(self, since_s: int | None) -> str:
        """Return the rows after a time as a JSON list; all of the hour if it is None.

        Those of which seconds are no longer kept are coarse ones.
        """
        last_s = self.last_s
        if since_s is None or last_s is None or since_s > last_s:
            since_s = -1  # a time to come is of a clock that was put back
        first_s = self._fine[0][0] if self._fine else math.inf
        rows = [text for at, text in self._coarse if since_s < at < first_s]
        recent = list[str]()
        for at, text in reversed(self._fine):
            if at <= since_s:
                break
            recent.append(text)
        return f"[{','.join([*rows, *reversed(recent)])}]"


def _merged(rows: list[Row]) -> Row:
    merged = dict[str, float | None]()
    for name in COLUMNS[1:]:
        known = [value for row in rows if (value := row.get(name)) is not None]
        merged[name] = math.fsum(known) / len(known) if known else None
    return merged


def _encoded(time_s: int, row: Row) -> str:
    values = [time_s, *(_rounded(row.get(name)) for name in COLUMNS[1:])]
    return json.dumps(values, separators=(",", ":"))


def _rounded(value: float | None) -> float | None:
    """Round to five digits, enough for a chart; JSON has no number that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded
