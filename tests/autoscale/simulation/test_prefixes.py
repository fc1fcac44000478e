"""Checks of prompts that begin alike: caches of replicas, routing by them, and the figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.simulation.cluster import PrefixCache
from mars_autoscale.simulation.figures import figures_of
from mars_autoscale.simulation.policies import StaticReplicas
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.run import Simulation
from mars_autoscale.traces.files import PREFIX_BLOCK_TOKENS as BLOCK
from mars_autoscale.traces.files import TraceRequest

CAPACITY = Capacity(linear_step_time(0.1, 10), (AR,), 4, 10.0 * BLOCK)
"""A block takes .1 s, and a step of one row .11 s."""


def request(at_s, *blocks, output=1, rest=1):
    """Return a request whose last block has ``rest`` tokens."""
    return TraceRequest(at_s, (len(blocks) - 1) * BLOCK + rest, output, prefix=blocks)


def simulate(trace, num_replicas=1, cache=100 * BLOCK, policy=None):
    limits = ReplicaSettings(max=num_replicas, initial=num_replicas, prefix_cache_tokens=cache)
    policy = policy or StaticReplicas(num_replicas)
    return Simulation(trace, CAPACITY, limits, policy).run()


def test_a_cached_beginning_is_not_computed_again():
    trace = [request(0.0, 1, 2, 3, 4), request(5.0, 1, 2, 3, 5, 6), request(10.0, 9, 2, 3)]
    first, second, third = simulate(trace).served
    part_s = 1 / BLOCK / 10
    assert first.ttft_s == pytest.approx(0.3 + part_s + 0.11)
    assert second.ttft_s == pytest.approx(0.1 + part_s + 0.11), "three of four whole blocks"
    assert third.cached_tokens == 0, "a block counts with all that is before it"
    again = simulate(trace, cache=0).served[1]
    assert (again.cached_tokens, again.ttft_s) == (0, pytest.approx(0.4 + part_s + 0.11))


def test_the_least_recently_used_blocks_are_dropped_and_ends_before_beginnings():
    cache = PrefixCache(4 * BLOCK)
    cache.add(request(0.0, 1, 2, 3, rest=BLOCK))
    cache.add(request(0.0, 7, 8, rest=BLOCK))
    assert cache.num_cached(request(0.0, 1, 2, 3, 4)) == 2 * BLOCK
    cache.add(request(0.0, 1, 2, rest=BLOCK))
    cache.add(request(0.0, 9, rest=BLOCK))
    assert cache.num_cached(request(0.0, 7, 8, 4)) == BLOCK
    assert cache.num_cached(request(0.0, 1, 2, 4)) == 2 * BLOCK


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(st.lists(paths, min_size=1, max_size=12))
def test_a_large_cache_holds_the_longest_beginning_of_all_prompts_before(prompts):
    cache, before = PrefixCache(1000 * BLOCK), list[list[int]]()
    for path in prompts:
        blocks = [int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path))]
        new = request(0.0, *blocks, rest=BLOCK)
        longest = max([_num_common(path, other) for other in before], default=0)
        assert cache.num_cached(new) == min(longest, len(path) - 1) * BLOCK
        cache.add(new)
        before.append(path)


def _num_common(one, other):
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_the_queue_sends_a_prompt_to_the_replica_that_has_its_beginning():
    """By hand: the first two occupy both replicas; the third would go to the first otherwise."""
    trace = [request(0.0, 1, output=50), request(0.01, 2, 3, 4, output=50)]
    trace += [request(2.0, 2, 3, 5), request(2.05, 6, 7)]
    *_, third, fourth = simulate(trace, num_replicas=2).served
    assert (third.cached_tokens, fourth.cached_tokens) == (2 * BLOCK, 0)


class Watched(StaticReplicas):
    """A fixed number of replicas that records the rates of prompts that it is told each 10 s."""

    def __init__(self):
        super().__init__(1)
        self.told = []

    def decide(self, snapshot, /):
        self.told.append(snapshot.arrivals.prompt_tokens_per_s)
        return super().decide(snapshot)


def test_decisions_are_told_the_prompts_that_are_not_cached():
    trace = [request(i, 1, 2, 3, 4, 5) for i in (11.0, 12.0, 13.0, 14.0, 15.0, 20.5)]
    policy = Watched()
    simulate(trace, policy=policy)
    whole = 4 * BLOCK + 1
    assert policy.told == pytest.approx([0.0, 0.0, (whole + 4 * 1) / 10])


def test_figures_tell_the_share_that_was_cached():
    result = simulate([request(0.0, 1, 2, 3), request(5.0, 1, 2, 4)])
    figures = figures_of(result, measured_from_s=0, objective_ttft_s=1.0)
    assert figures.prefix_hit_rate == pytest.approx(2 * BLOCK / (4 * BLOCK + 2))
    late = figures_of(result, measured_from_s=1, objective_ttft_s=1.0)
    assert late.prefix_hit_rate == pytest.approx(2 * BLOCK / (2 * BLOCK + 1))
