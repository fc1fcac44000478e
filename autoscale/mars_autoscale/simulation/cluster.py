"""Replicas as they serve: slots, queues, steps, prompts that stall a batch, starts and drains.

Each step of each replica is one event. A row gets its rung's mean tokens a step: what is random in
decoding has averaged out over a request. Knows no policy.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mars_autoscale.model.capacity import Capacity, Rung
from mars_autoscale.policy.inner_loop import Stage
from mars_autoscale.traces.files import TraceRequest
from mars_platform.tier import Tier

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
    """Of the lane's token counter, when all of its output has come."""
    loss_at_start: float
    tokens_at_start: float


@dataclass(slots=True)
class _Lane:
    """A replica's requests of one class: they decode with one rung. Counters of tokens and losses
    run over all steps, so that a step costs the same whatever its rows are.
    """

    rung: Rung
    """Of the step at hand: the replica's stage may have changed meanwhile."""
    queue: deque[Served] = field(default_factory=deque)
    rows: list[tuple[float, int, _Row]] = field(default_factory=list)
    new: list[_Row] = field(default_factory=list)
    tokens: float = 0.0
    loss: float = 0.0
    count: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.rows) + len(self.queue)

    def admit(self) -> int:
        """Let the first of the queue run; its prompt tokens."""
        served = self.queue.popleft()
        row = _Row(served, self.tokens + served.request.output_tokens, self.loss, self.tokens)
        self.count += 1
        heapq.heappush(self.rows, (row.end, self.count, row))
        self.new.append(row)
        return served.request.prompt_tokens

    def finish_step(self, now_s: float) -> list[Served]:
        """Give the rows their tokens; those that have ended."""
        if not self.rows:
            return []
        self.tokens += self.rung.tokens_per_forward
        self.loss += self.rung.loss * self.rung.tokens_per_forward
        for row in self.new:
            row.served.first_token_s = now_s
        self.new.clear()
        ended = []
        while self.rows and self.rows[0][0] <= self.tokens:
            row = heapq.heappop(self.rows)[2]
            share = row.served.request.output_tokens / (self.tokens - row.tokens_at_start)
            row.served.loss_tokens = (self.loss - row.loss_at_start) * share
            ended.append(row.served)
        return ended


class Replica:
    """One replica. It serves classes in the order of `Tier`, and first come, first served
    within a class.
    """

    def __init__(
        self, capacity: Capacity, stage: Stage, *, started_s: float, ready_s: float
    ) -> None:
        self.capacity = capacity
        self.stage = stage
        """What rows decode with from the next step on."""
        self.started_s = started_s
        self.ready_s = ready_s
        self.ended_s: float | None = None
        self.is_draining = False
        self.num_running = 0
        """Rows of the step."""
        self.num_waiting = 0
        self._lanes = {name: _Lane(capacity.rungs[0]) for name in Tier}
        self._prompt_s = 0.0
        self._busy_s = 0.0

    @property
    def prompt_share(self) -> float:
        """Of the time of its latest steps, the share that prompts took."""
        return self._prompt_s / self._busy_s if self._busy_s else 0.0

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return self.num_running + self.num_waiting

    def share(self, name: Tier) -> float:
        """Of the requests that run or wait, the share of a class; 0 where there are none."""
        return self._lanes[name].num_requests / self.load if self.load else 0.0

    def num_ahead(self, name: Tier) -> int:
        """Requests that wait and would be served before a new one of a class."""
        num = 0
        for each, lane in self._lanes.items():
            num += len(lane.queue)
            if each is name:
                break
        return num

    def enqueue(self, served: Served) -> None:
        """Have a request wait for a slot."""
        self._lanes[served.request.tier].queue.append(served)
        self.num_waiting += 1

    def begin_step(self) -> float | None:
        """Admit what fits and begin a step; its seconds, or None where there is nothing to do."""
        stall_s = self._admit()
        if not self.num_running:
            return None
        positions = 0.0
        for name, lane in self._lanes.items():
            if lane.rows:
                lane.rung = self._rung_of(name)
                positions += len(lane.rows) * lane.rung.positions
        step_s = self.capacity.step_time.at(positions)
        fade = 0.5 ** ((stall_s + step_s) / _SHARE_HALF_LIFE_S)
        self._prompt_s = self._prompt_s * fade + stall_s
        self._busy_s = self._busy_s * fade + stall_s + step_s
        return stall_s + step_s

    def _admit(self) -> float:
        """Fill the slots; seconds that the new rows' prompts take."""
        stall_s = 0.0
        for lane in self._lanes.values():
            while lane.queue and self.num_running < self.capacity.max_num_seqs:
                stall_s += lane.admit() / self.capacity.prefill_tokens_per_s
                self.num_running += 1
                self.num_waiting -= 1
        return stall_s

    def _rung_of(self, name: Tier) -> Rung:
        rung = self.capacity.rungs[0]
        if name is Tier.DEFAULT:
            rung = self.stage.default
        elif name is Tier.FLEX:
            rung = self.stage.flex
        if rung.threshold >= 1.0 and self.stage.is_exact and self.capacity.exact is not None:
            return self.capacity.exact
        return rung

    def finish_step(self, now_s: float) -> list[Served]:
        """Give the rows their tokens; those that have ended."""
        ended = [served for lane in self._lanes.values() for served in lane.finish_step(now_s)]
        self.num_running -= len(ended)
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
