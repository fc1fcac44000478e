"""Runs a trace through a simulated cluster under a policy."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.inner_loop import SAMPLE_PERIOD_S, EngineSample
from mars_autoscale.policy.lengths import LengthCounts, counts_of
from mars_autoscale.policy.observe import RATE_WINDOW_S, Arrivals, ReplicaLoad, Snapshot
from mars_autoscale.policy.pace import bounded
from mars_autoscale.queueing.estimate import LateRule
from mars_autoscale.queueing.grants import even_parts, reserve_of
from mars_autoscale.simulation.cluster import Events, Replica, Served
from mars_autoscale.simulation.policies import InnerLoopPolicy, Policy, Target
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import ClosedLoop
from mars_platform.tier import Tier

_NO_LENGTHS = LengthCounts()
_RETRY_S = 1.0
"""Least seconds that a client waits after a refusal, as the server asks for."""


@dataclass
class ClusterSample:
    """The cluster at one moment."""

    time_s: float
    num_ready: int
    num_starting: int
    num_waiting: int
    threshold: float
    """Mean τ of tier default over the ready replicas."""
    requests_per_s: float
    speed: float
    """Mean real speed of the ready replicas as a multiple of the model's."""


@dataclass
class SimulationResult:
    """The outcome of a trace under a policy."""

    served: list[Served] = field(default_factory=list)
    """Every request, by arrival."""
    replica_seconds: float = 0.0
    """Replica-seconds from time 0 to the last arrival."""
    num_threshold_changes: int = 0
    num_replica_changes: int = 0
    samples: list[ClusterSample] = field(default_factory=list)
    """The cluster after each decision."""


class Simulation:
    """One trace under one policy."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        capacity: Capacity,
        settings: ReplicaSettings,
        policy: Policy,
        *,
        objective_ttft_s: float = 1.0,
        seed: int = 0,
        lengths: LengthCounts = _NO_LENGTHS,
        begin_s: float = 0.0,
        queue_wait_s: float | None = None,
        clients: ClosedLoop | None = None,
    ) -> None:
        """Prepare a run that begins with the outputs ``lengths``.

        The first replicas are ready at ``begin_s``, at most 0, and the policy has seen since then
        that nothing arrives. It decides by ``capacity``; ``settings`` say how replicas really are.
        Requests that would begin after ``objective_ttft_s`` are refused while the policy says that
        nothing is left to give, and those that wait for ``queue_wait_s``. ``clients`` send the
        trace's requests; by default each is sent at its time. ``seed`` is that of the queue before
        the replicas.
        """
        assert begin_s <= 0.0, "the cluster is ready when the trace begins"
        self._trace = trace
        self._capacity = capacity
        self._settings = settings
        self._policy = policy
        self._objective_ttft_s = objective_ttft_s
        self._num_initial = settings.num_initial(trace, capacity)
        self._begin_s = begin_s
        self._queue_wait_s = queue_wait_s
        self._clients = clients
        self._think_s = clients.think_s if clients is not None else 0.0
        self._num_timed = min(clients.num if clients is not None else len(trace), len(trace))
        """Requests that come at the times of the trace."""
        self._events = Events(begin_s)
        self._end_s = trace[-1].arrival_s
        self._dispatch = policy.dispatch(seed)
        self._replicas: list[Replica] = []
        self._num_started = 0
        self._inner_loops: dict[int, InnerLoopPolicy] = {}
        self._stepping: set[int] = set()
        """Identities of the replicas that are in a step."""
        self._window: deque[Served] = deque()
        """Requests that arrived within the rate window."""
        self._mean_prompt = 0.0
        """Mean prompt tokens of the window's requests at the last decision, without prefix hits."""
        self._num_begun = 0
        """Requests that have come since the last decision."""
        self._ended = list[int]()
        """Output tokens of the requests that have ended since the last decision."""
        self._running = LengthCounts()
        """Outputs of the requests that ran at the last decision."""
        self._lengths = lengths
        """Outputs at the last decision, the latest with the highest weight."""
        self._target = Target(self._num_initial)
        self._next = self._num_timed
        """Number of the next request that a client sends behind its first."""
        self._result = SimulationResult()

    def run(self) -> SimulationResult:
        """Simulate from the beginning until the last request has ended."""
        for _ in range(self._num_initial):
            self._start(cold_start_s=0.0)
        self._events.at(self._begin_s, self._decide)
        self._events.at(self._begin_s, self._sample_engines)
        self._events.at(self._trace[0].arrival_s, self._arrive)
        self._events.run()
        for replica in [*self._replicas]:
            self._end(replica)
        return self._result

    # Requests

    def _arrive(self, index: int = 0) -> None:
        """Take in a request of the trace at its time, and schedule the one behind it."""
        if index + 1 < self._num_timed:
            at_s = self._trace[index + 1].arrival_s
            self._events.at(at_s, lambda: self._arrive(index + 1))
        self._take_in(self._trace[index])

    def _arrive_after(self, wait_s: float) -> None:
        """Let a client whose request is over send its next one after some seconds, if any is."""
        at_s = self._events.now_s + wait_s
        if self._clients is not None and at_s <= self._end_s:
            request = replace(self._trace[self._next % len(self._trace)], arrival_s=at_s)
            self._next += 1
            self._events.at(at_s, lambda: self._take_in(request))

    def _take_in(self, request: TraceRequest) -> None:
        served = Served(request)
        self._result.served.append(served)
        self._window.append(served)
        if self._target.range.is_saturated and self._is_too_late(request.tier):
            self._refuse(served)
            return
        self._num_begun += 1
        limit_s = self._queue_wait_s and request.arrival_s + self._queue_wait_s
        self._dispatch.add(served, self._objective_ttft_s, limit_s)
        self._send()

    def _refuse(self, served: Served) -> None:
        served.is_rejected = True
        self._arrive_after(max(self._think_s, _RETRY_S))

    def _is_too_late(self, tier: Tier) -> bool:
        """Whether a new request of a tier would come too late by the slowest replica's rule."""
        ready = self._ready()
        if not ready:
            return False
        each_s = max(
            self._capacity.busy_s(self._lengths.mean, self._mean_prompt, each.decision.gain)
            / bounded(each.meter.pace)
            for each in ready
        )
        reserve = reserve_of(self._capacity.max_num_seqs)
        num_sent = sum(min(each.num_waiting_from(tier), reserve) for each in ready)
        num_ahead = (self._dispatch.num_ahead(tier, self._events.now_s) + num_sent) / len(ready)
        return LateRule(each_s, self._objective_ttft_s).late_s(num_ahead) > 0

    def _send(self) -> None:
        if not len(self._dispatch):
            return
        now = self._events.now_s
        for served in self._dispatch.expire(now):
            self._refuse(served)
        for replica in self._dispatch.send(self._ready(), now):
            if id(replica) not in self._stepping:
                self._step(replica)

    def _step(self, replica: Replica) -> None:
        seconds = replica.begin_step()
        if seconds is None:
            self._stepping.discard(id(replica))
            if replica.is_draining:
                self._end(replica)
            return
        self._stepping.add(id(replica))
        now = self._events.now_s
        real_s = seconds / self._settings.speed_of(replica.number, now)
        self._events.at(now + real_s, lambda: self._finish_step(replica, real_s))

    def _finish_step(self, replica: Replica, seconds: float) -> None:
        ended = replica.finish_step(self._events.now_s, seconds)
        for served in ended:
            self._ended.append(served.request.output_tokens)
            self._arrive_after(self._think_s)
        self._step(replica)  # what is sent now arrives once the next step has begun
        self._send()  # a row has ended, or a prompt has been computed

    # Replicas

    def _start(self, cold_start_s: float) -> None:
        now = self._events.now_s
        inner_loop = self._policy.inner_loop()
        decision = inner_loop.update(EngineSample(now, 0.0))
        replica = Replica(
            self._capacity,
            decision,
            is_by_tier=self._dispatch.is_by_tier,
            started_s=now,
            ready_s=now + cold_start_s,
            number=self._num_started,
            prefix_cache_tokens=self._settings.prefix_cache_tokens,
            real_rows=self._settings.real_rows,
        )
        self._num_started += 1
        self._replicas.append(replica)
        self._inner_loops[id(replica)] = inner_loop
        self._events.at(replica.ready_s, self._send)

    def _end(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        del self._inner_loops[id(replica)]
        begin_s = max(replica.started_s, 0.0)
        self._result.replica_seconds += max(0.0, min(self._events.now_s, self._end_s) - begin_s)

    def _alive(self) -> list[Replica]:
        return [each for each in self._replicas if not each.is_draining]

    def _ready(self) -> list[Replica]:
        now = self._events.now_s
        return [each for each in self._alive() if each.ready_s <= now]

    def _decide(self) -> None:
        now, settings = self._events.now_s, self._settings
        if now > self._end_s:
            return
        self._note_lengths()
        self._target = self._policy.decide(self._snapshot())
        wanted = min(max(self._target.num_replicas, settings.min), settings.max)
        alive = self._alive()
        self._result.num_replica_changes += wanted != len(alive)
        for _ in range(wanted - len(alive)):
            self._start(settings.cold_start_s)
        starting = [each for each in alive if each.ready_s > now]
        running = sorted(
            (each for each in alive if each.ready_s <= now), key=lambda each: each.load
        )
        for replica in [*reversed(starting), *running][: max(0, len(alive) - wanted)]:
            replica.is_draining = True
            if id(replica) not in self._stepping:
                self._end(replica)
        self._sample(now)
        self._events.at(now + self._policy.period_s, self._decide)

    def _sample_engines(self) -> None:
        now = self._events.now_s
        self._send()  # what has waited for too long leaves, whether or not a step ends
        for replica, num_before in self._told():
            before = replica.decision.live
            replica.meter.look(now, replica.status(num_before), replica.decision.gain)
            sample = EngineSample(
                now,
                replica.load + num_before,
                self._target.range,
                prompt_share=replica.prompt_share,
                flex_share=replica.share(Tier.FLEX),
                pinned_share=replica.share(Tier.PRIORITY),
            )
            replica.follow(self._inner_loops[id(replica)].update(sample))
            live = replica.decision.live
            is_changed = replace(live, is_exact=before.is_exact) != before
            self._result.num_threshold_changes += is_changed
        if now < self._end_s or self._stepping:
            self._events.at(now + SAMPLE_PERIOD_S, self._sample_engines)

    def _told(self) -> list[tuple[Replica, int]]:
        """Return the ready replicas, each with its even part of what waits before them."""
        ready = self._ready()
        return list(zip(ready, even_parts(len(self._dispatch), len(ready)), strict=True))

    def _note_lengths(self) -> None:
        """Estimate the length of outputs from what came, grew and ended since the last decision."""
        so_far = [tokens for each in self._replicas for tokens in each.tokens_so_far()]
        new = counts_of(self._ended, so_far, self._num_begun)
        self._lengths = self._lengths.followed_by(new - self._running)
        self._running = counts_of((), so_far)
        self._num_begun = 0
        self._ended.clear()

    def _snapshot(self) -> Snapshot:
        now = self._events.now_s
        while self._window and self._window[0].request.arrival_s < now - RATE_WINDOW_S:
            self._window.popleft()
        # a hit is known once a request runs; until then its whole prompt counts, as in the server
        prompt_tokens = sum(
            served.request.prompt_tokens - served.cached_tokens for served in self._window
        )
        self._mean_prompt = prompt_tokens / max(len(self._window), 1)
        span = max(min(now - self._begin_s, RATE_WINDOW_S), 1.0)
        loads = [
            ReplicaLoad(
                now,
                each.num_running,
                each.num_waiting + num_before,
                gain=each.decision.gain,
                loss=each.decision.loss,
                is_lowest=each.decision.is_lowest,
                pace=each.meter.pace,
            )
            for each, num_before in self._told()
        ]
        arrivals = Arrivals(len(self._window) / span, prompt_tokens / span, self._lengths.mean)
        return Snapshot(now, loads, len(self._alive()) - len(loads), arrivals, now)

    def _sample(self, now: float) -> None:
        snapshot, ready = self._snapshot(), self._ready()
        assert snapshot.arrivals is not None
        thresholds = [each.decision.live.threshold for each in ready]
        speeds = [self._settings.speed_of(each.number, now) for each in ready]
        self._result.samples.append(
            ClusterSample(
                time_s=now,
                num_ready=len(ready),
                num_starting=snapshot.num_starting,
                num_waiting=sum(each.num_waiting for each in ready) + len(self._dispatch),
                threshold=sum(thresholds) / max(len(ready), 1),
                requests_per_s=snapshot.arrivals.requests_per_s,
                speed=sum(speeds) / max(len(speeds), 1),
            )
        )
