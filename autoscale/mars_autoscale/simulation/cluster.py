"""Replicas as they serve: slots, queues, steps, prompts that stall a batch, starts and drains.

Each step of each replica is one event. A row gets its rung's mean tokens a step: what is random in
decoding has averaged out over a request. Knows no policy.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mars_autoscale.capacity import Capacity, Rung
from mars_autoscale.traces import TraceRequest

_SHARE_HALF_LIFE_S = 5.0
"""Of work in the share that prompts took, in seconds of work."""


@dataclass(slots=True)
class Served:
    """What became of a request."""

    request: TraceRequest
    first_token_s: float | None = None
    """When it came; None while it has not."""
    loss_tokens: float = 0.0
    """Points of loss, summed over its tokens."""
    is_rejected: bool = False

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite where there was none."""
        if self.first_token_s is None:
            return float("inf")
        return self.first_token_s - self.request.arrival_s


@dataclass(slots=True)
class _Row:
    served: Served
    end: float
    """Of the replica's token counter, when all of its output has come."""
    loss_at_start: float
    tokens_at_start: float


@dataclass
class Replica:
    """One replica. Counters of tokens and losses run over all steps, so that a step costs the same
    whatever its rows are.
    """

    capacity: Capacity
    rung: Rung
    started_s: float
    ready_s: float
    ended_s: float | None = None
    is_draining: bool = False
    queue: deque[Served] = field(default_factory=deque)
    _rows: list[tuple[float, int, _Row]] = field(default_factory=list)
    _new: list[_Row] = field(default_factory=list)
    _tokens: float = 0.0
    _loss: float = 0.0
    _count: int = 0
    _prompt_s: float = 0.0
    _busy_s: float = 0.0
    _stepping: Rung = field(init=False)
    """Of the step at hand; `rung` may have changed meanwhile."""

    @property
    def prompt_share(self) -> float:
        """Of the time of its latest steps, the share that prompts took."""
        return self._prompt_s / self._busy_s if self._busy_s else 0.0

    @property
    def num_running(self) -> int:
        """Rows of the step."""
        return len(self._rows)

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._rows) + len(self.queue)

    def begin_step(self) -> float | None:
        """Admit what fits and begin a step; its seconds, or None where there is nothing to do."""
        stall_s = 0.0
        while self.queue and len(self._rows) < self.capacity.num_slots:
            served = self.queue.popleft()
            stall_s += served.request.prompt_tokens / self.capacity.prefill_tokens_per_s
            row = _Row(
                served, self._tokens + served.request.output_tokens, self._loss, self._tokens
            )
            self._count += 1
            heapq.heappush(self._rows, (row.end, self._count, row))
            self._new.append(row)
        if not self._rows:
            return None
        self._stepping = self.rung
        step_s = self.capacity.step_time.at(len(self._rows) * self.rung.positions)
        fade = 0.5 ** ((stall_s + step_s) / _SHARE_HALF_LIFE_S)
        self._prompt_s = self._prompt_s * fade + stall_s
        self._busy_s = self._busy_s * fade + stall_s + step_s
        return stall_s + step_s

    def finish_step(self, now_s: float) -> list[Served]:
        """Give the rows their tokens; those that have ended."""
        rung = self._stepping
        self._tokens += rung.tokens_per_forward
        self._loss += rung.loss * rung.tokens_per_forward
        for row in self._new:
            row.served.first_token_s = now_s
        self._new.clear()
        ended = []
        while self._rows and self._rows[0][0] <= self._tokens:
            row = heapq.heappop(self._rows)[2]
            share = row.served.request.output_tokens / (self._tokens - row.tokens_at_start)
            row.served.loss_tokens = (self._loss - row.loss_at_start) * share
            ended.append(row.served)
        return ended


class Events:
    """What is to happen, in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Have something done at a time; at the same time, in the order of asking."""
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, action))

    def run(self) -> None:
        """Until nothing is left."""
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
