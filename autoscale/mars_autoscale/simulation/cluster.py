"""Simulated replicas: batches, queues, steps, prompts and their cache, starts and drains.

Each step of each replica is one event. A row gets its rung's mean number of tokens in each step,
because the randomness of decoding averages out over a request.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mars_autoscale.model.capacity import AR, ONE_TOKEN, Capacity, Rung, Window
from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.policy.pace import PaceMeter
from mars_autoscale.policy.reports import EngineStatus
from mars_autoscale.traces.files import PREFIX_BLOCK_TOKENS, TraceRequest
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier

_SHARE_HALF_LIFE_S = 5.0
"""Seconds of work after which work counts half in the share of time that prompts took."""


@dataclass(slots=True)
class Served:
    """A request and its outcome."""

    request: TraceRequest
    first_token_s: float | None = None
    """Time of the first token; None before."""
    loss_tokens: float = 0.0
    """Points of quality lost, summed over the request's tokens."""
    is_rejected: bool = False
    cached_tokens: int = 0
    """Tokens of the prompt that the replica had cached when it began with it."""
    due_tokens: int = 0
    """Tokens of the prompt that the replica had not cached when it got the request."""

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token; infinite if there was none."""
        if self.first_token_s is None:
            return float("inf")
        return self.first_token_s - self.request.arrival_s


@dataclass(slots=True)
class _SimulatedRow:
    served: Served
    end: float
    """Value of the lane's token counter at which all of the output is there."""
    loss_at_start: float
    tokens_at_start: float


@dataclass(slots=True)
class _Lane:
    """A replica's requests of one tier, which decode with one rung.

    Its counters of tokens and losses run over all steps; a step then costs the same time to
    simulate however many rows there are.
    """

    rung: Rung
    """Rung of the step at hand, which lasts although the replica's decision changes."""
    window: Window = ONE_TOKEN
    """Window of the step at hand."""
    num_waiting: int = 0
    """Requests that have no row yet."""
    rows: list[tuple[float, int, _SimulatedRow]] = field(default_factory=list)
    """Heap of (end, order of admission, row)."""
    tokens: float = 0.0
    """Tokens that a row would have got in all steps so far."""
    loss: float = 0.0
    """Points of quality lost, summed over those tokens."""
    count: int = 0
    """Number of rows that were ever admitted."""

    def admit(self, served: Served) -> None:
        self.num_waiting -= 1
        row = _SimulatedRow(
            served, self.tokens + served.request.output_tokens, self.loss, self.tokens
        )
        self.count += 1
        heapq.heappush(self.rows, (row.end, self.count, row))

    def finish_step(self) -> list[Served]:
        """Give the rows, at least one, their tokens; returns the requests that have ended."""
        self.tokens += self.window.tokens_per_forward
        self.loss += self.rung.loss * self.window.tokens_per_forward
        ended = []
        while self.rows and self.rows[0][0] <= self.tokens:
            row = heapq.heappop(self.rows)[2]
            share = row.served.request.output_tokens / (self.tokens - row.tokens_at_start)
            row.served.loss_tokens = (self.loss - row.loss_at_start) * share
            ended.append(row.served)
        return ended


class PrefixCache:
    """The blocks of prompts that a replica has computed; the least recently used are dropped first.

    As in a server, what is looked up are whole blocks, and the last block of a prompt is computed
    in any case, since its logits are needed. Outputs are not kept: no trace tells which prompts
    continue them.
    """

    def __init__(self, max_tokens: int) -> None:
        """Start empty; ``max_tokens`` is the room for blocks, of which 0 keeps none."""
        self._max_blocks = max_tokens // PREFIX_BLOCK_TOKENS
        self._blocks = OrderedDict[int, None]()  # least recently used first

    def num_cached(self, request: TraceRequest) -> int:
        """Return the tokens at the beginning of a request's prompt that are cached."""
        most = max(request.prompt_tokens - 1, 0) // PREFIX_BLOCK_TOKENS
        num_blocks = 0
        for block in request.prefix[:most]:
            if block not in self._blocks:
                break
            num_blocks += 1
        return num_blocks * PREFIX_BLOCK_TOKENS

    def add(self, request: TraceRequest) -> None:
        """Keep a request's prompt, of whose blocks the last are dropped first."""
        num_whole = request.prompt_tokens // PREFIX_BLOCK_TOKENS
        for block in reversed(request.prefix[:num_whole]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class Replica:
    """One simulated replica."""

    def __init__(
        self,
        capacity: Capacity,
        decision: InnerLoopDecision,
        *,
        is_by_tier: bool,
        started_s: float,
        ready_s: float,
        number: int = 0,
        prefix_cache_tokens: int = 0,
        real_rows: int | None = None,
    ) -> None:
        """Start without requests and with an empty cache.

        It was ordered at ``started_s``, as the ``number``-th after the first, and gets requests
        from ``ready_s`` on. By ``is_by_tier`` higher tiers are served first, otherwise all are
        served in order of arrival. It has pages for ``real_rows`` rows, or for all slots, and
        decodes by ``decision`` at first.
        """
        self.number, self.name = number, str(number)
        self.capacity = capacity
        self.meter = PaceMeter(capacity)
        self.prefixes = PrefixCache(prefix_cache_tokens)
        self.started_s = started_s
        self.ready_s = ready_s
        self.is_draining = False
        self.num_running = 0
        """Rows of the step at hand."""
        self.is_short_of_pages = False
        """Whether requests wait for pages although slots are free."""
        self.backlog_tokens = 0
        """Prompt tokens of the requests without a first token, but for those that were cached when
        they came."""
        self._is_by_tier = is_by_tier
        self._waiting = list[tuple[int, int, Served]]()
        """Heap of (negative rank of the tier if tiers count, order of arrival, request)."""
        self._num_arrived = 0
        self._new = list[Served]()
        """Running requests without a first token."""
        self._lanes = {tier: _Lane(AR) for tier in Tier}
        self._most_rows = min(real_rows or capacity.max_num_seqs, capacity.max_num_seqs)
        self._step_s = dict[float, float]()
        """Seconds of a step by its positions, for those that were seen."""
        self._prompt_s = 0.0
        self._busy_s = 0.0
        self._num_passes = self._num_row_passes = 0
        self._tokens = self._worked_s = 0.0
        self._prompt_tokens = self._hit_tokens = 0
        self.follow(decision)

    def follow(self, decision: InnerLoopDecision) -> None:
        """Decode as an inner loop has decided, from the next step on."""
        self.decision = decision
        self._rungs = {tier: self._rung_of(tier) for tier in Tier}

    def _rung_of(self, tier: Tier) -> Rung:
        live = self.decision.live
        threshold = 1.0 if tier is Tier.PRIORITY else live.threshold_of(tier)
        is_exact = threshold == 1.0 and live.is_exact
        return self.capacity.rung(Mode.EXACT if is_exact else Mode.THRESHOLD, threshold)

    @property
    def prompt_share(self) -> float:
        """Share of the latest steps' time that prompts took."""
        return self._prompt_s / self._busy_s if self._busy_s else 0.0

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    def num_waiting_from(self, tier: Tier) -> int:
        """Return the number of waiting requests of a tier and of those above it."""
        return sum(lane.num_waiting for each, lane in self._lanes.items() if each.rank >= tier.rank)

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return self.num_running + self.num_waiting

    def share(self, tier: Tier) -> float:
        """Return a tier's share of the requests that run or wait; 0 if there are none."""
        lane = self._lanes[tier]
        return (len(lane.rows) + lane.num_waiting) / max(self.load, 1)

    def tokens_so_far(self) -> list[int]:
        """Return the number of output tokens of each running request."""
        return [
            int(lane.tokens - row.tokens_at_start)
            for lane in self._lanes.values()
            for _, _, row in lane.rows
        ]

    def enqueue(self, served: Served) -> None:
        """Let a request wait for a place in the batch."""
        tier = served.request.tier
        heapq.heappush(
            self._waiting, (-tier.rank if self._is_by_tier else 0, self._num_arrived, served)
        )
        self._num_arrived += 1
        self._lanes[tier].num_waiting += 1
        served.due_tokens = served.request.prompt_tokens - self.prefixes.num_cached(served.request)
        self.backlog_tokens += served.due_tokens

    def begin_step(self) -> float | None:
        """Admit requests and begin a step; returns its seconds, or None if there is no request."""
        stall_s = self._admit()
        if not self.num_running:
            return None
        positions = 0.0
        for tier, lane in self._lanes.items():
            if lane.rows:
                lane.rung = self._rungs[tier]
                lane.window = self._window(lane.rung)
                positions += len(lane.rows) * lane.window.positions
        step_s = self._step_s.get(positions)
        if step_s is None:
            step_s = self._step_s[positions] = self.capacity.step_time.at(positions)
        fade = 0.5 ** ((stall_s + step_s) / _SHARE_HALF_LIFE_S)
        self._prompt_s = self._prompt_s * fade + stall_s
        self._busy_s = self._busy_s * fade + stall_s + step_s
        return stall_s + step_s

    def _window(self, rung: Rung) -> Window:
        if len(rung.windows) == 1:
            return rung.windows[0]
        return self.capacity.window(rung, self.num_running)

    def _admit(self) -> float:
        """Fill the batch; returns the seconds that the new rows' prompts take."""
        stall_s = 0.0
        while self._waiting and self.num_running < self._most_rows:
            served = heapq.heappop(self._waiting)[2]
            self._lanes[served.request.tier].admit(served)
            self._new.append(served)
            self.num_running += 1
            served.cached_tokens = self.prefixes.num_cached(served.request)
            self.prefixes.add(served.request)
            prompt_tokens = served.request.prompt_tokens - served.cached_tokens
            stall_s += prompt_tokens / self.capacity.prefill_tokens_per_s
        has_slots = self.num_running < self.capacity.max_num_seqs
        self.is_short_of_pages = has_slots and bool(self._waiting)
        return stall_s

    def finish_step(self, now_s: float, seconds: float) -> list[Served]:
        """Give the rows the tokens of a step that took so long; returns the ended requests."""
        for served in self._new:
            served.first_token_s = now_s
            self.backlog_tokens -= served.due_tokens
            self._prompt_tokens += served.request.prompt_tokens
            self._hit_tokens += served.cached_tokens
        self._new.clear()
        self._worked_s += seconds
        self._num_passes += 1
        self._num_row_passes += self.num_running
        ended = list[Served]()
        for lane in self._lanes.values():
            if lane.rows:
                self._tokens += len(lane.rows) * lane.window.tokens_per_forward
                ended += lane.finish_step()
        self.num_running -= len(ended)
        return ended

    def status(self, num_before: int) -> EngineStatus:
        """Return what an engine would report, with the requests that wait before it for it."""
        return EngineStatus(
            num_requests=self.load + num_before,
            num_running=self.num_running,
            num_waiting=self.num_waiting + num_before,
            num_pages=self._most_rows,  # a page holds a request here
            num_free_pages=self._most_rows - self.num_running,
            num_prefix_hit_tokens=self._hit_tokens,
            num_prompt_tokens=self._prompt_tokens,
            num_generated_tokens=round(self._tokens),
            num_forward_passes=self._num_passes,
            num_row_passes=self._num_row_passes,
            busy_s=self._worked_s,
        )


class Events:
    """The simulation's clock and its future actions."""

    def __init__(self, begin_s: float = 0.0) -> None:
        self.now_s = begin_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule an action; those of the same time run in the order of these calls."""
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, action))

    def run(self) -> None:
        """Run actions, and those that they schedule, until none is left."""
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
