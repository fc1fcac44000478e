import math
from collections import Counter

import numpy as np
import pytest

from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import (
    MAX_REQUESTS,
    Lengths,
    Spike,
    SyntheticTrace,
    TraceChange,
    changed,
    generate,
)
from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_platform.tier import Tier

SHORT = Lengths(mean=10, max=10)


def regular(num=10_000, per_s=10.0):
    return [TraceRequest(i / per_s, 100 + i % 7, 1 + i % 5) for i in range(num)]


def synthetic(**settings):
    return SyntheticTrace(**{"prompt": SHORT, "output": SHORT, **settings})


def arrivals(trace):
    return np.array([request.arrival_s for request in trace])


def count(trace, begin_s, end_s):
    times = arrivals(trace)
    return int(((times >= begin_s) & (times < end_s)).sum())


def near(measured, expected, deviation):
    assert abs(measured - expected) < 3 * deviation, (measured, expected, deviation)


def test_the_default_change_keeps_the_trace_and_its_tiers():
    trace = [TraceRequest(0.0, 1, 1, Tier.FLEX), *regular(100)[1:]]
    assert changed(trace, TraceChange(), seed=0) == trace


def test_cutting_drops_later_requests():
    assert changed(regular(), TraceChange(cut_s=20), seed=0) == regular(201)


@pytest.mark.parametrize("multiply", [0.3, 1.5, 2.2, 3.0])
def test_multiplied_requests_have_the_right_number_and_delay(multiply):
    trace = [
        TraceRequest(10.0 * i, i, 1) for i in range(10_000)
    ]  # the prompt identifies the request
    result = changed(trace, TraceChange(multiply=multiply, shift_s=3.0), seed=1)
    part = multiply % 1
    near(len(result), 10_000 * multiply, math.sqrt(10_000 * part * (1 - part)) + 0.1)
    numbers = Counter(request.prompt_tokens for request in result)
    assert {numbers[i] for i in range(10_000)} == {math.floor(multiply), math.ceil(multiply)}
    late = np.array([request.arrival_s - 10 * request.prompt_tokens for request in result])
    assert 0 <= late.min() <= late.max() <= 3
    near(late.mean(), 1.5, 3 / math.sqrt(12 * len(result)))


def test_copies_have_prefixes_in_common_with_copies_of_the_same_number():
    trace = [TraceRequest(0.0, 1500, 1, prefix=(0, 1, 2)), TraceRequest(9.0, 900, 1, prefix=(0, 3))]
    copies = changed(trace, TraceChange(multiply=3), seed=0)
    prefixes = sorted(tuple(each.prefix) for each in copies)
    assert prefixes == [(0, 1, 2), (0, 3), (4, 5, 6), (4, 7), (8, 9, 10), (8, 11)]
    assert changed(trace, TraceChange(), seed=0) == trace


def test_changed_traces_are_sorted_and_depend_only_on_the_seed():
    change = TraceChange(multiply=2.2, classes={"default": 0.5, "flex": 0.5})
    first = changed(regular(), change, seed=3)
    assert first == changed(regular(), change, seed=3)
    assert first != changed(regular(), change, seed=4)
    assert (np.diff(arrivals(first)) >= 0).all()


def test_spikes_multiply_requests_and_change_nothing_outside():
    spikes = (Spike(at_s=100, for_s=50, times=3.5), Spike(at_s=300, for_s=50, times=0))
    result = changed(regular(), TraceChange(spikes=spikes, shift_s=1.0), seed=0)
    near(count(result, 100, 151), 500 * 3.5 + 10, math.sqrt(500 * 0.25))
    assert count(result, 301, 350) == 0
    outside, untouched = (
        [r for r in trace if not 100 <= r.arrival_s < 151 and not 300 <= r.arrival_s < 350]
        for trace in (result, regular())
    )
    assert outside == untouched


def test_tiers_are_drawn_by_their_shares_and_leave_arrivals_alone():
    shares = {"flex": 0.3, "priority": 0.1, "default": 0.6}
    plain = changed(regular(), TraceChange(multiply=2), seed=5)
    drawn = changed(regular(), TraceChange(multiply=2, classes=shares), seed=5)
    assert (arrivals(plain) == arrivals(drawn)).all()
    numbers = Counter(request.tier for request in drawn)
    for name, share in shares.items():
        near(numbers[Tier(name)], 20_000 * share, math.sqrt(20_000 * share * (1 - share)))
    reordered = dict(sorted(shares.items()))
    assert changed(regular(), TraceChange(multiply=2, classes=reordered), seed=5) == drawn


def test_shares_that_sum_to_nearly_1_are_accepted():
    third = 0.3333333
    change = TraceChange(classes=dict.fromkeys(Tier, third))
    numbers = Counter(request.tier for request in changed(regular(), change, seed=0))
    assert min(numbers[tier] for tier in Tier) > 3000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"classes": {"flex": 0.5, "default": 0.4}}, "classes: .*0.9 together"),
        ({"classes": {"gold": 1.0}}, "classes.*'priority'"),
        ({"classes": {"flex": -0.5, "default": 1.5}}, "classes.flex"),
        ({"multiply": 0}, "multiply"),
        ({"spikes": [{"at_s": 0, "for_s": 0, "times": 2}]}, "spikes.0.for_s"),
        ({"spikes": [{"at_s": math.inf, "for_s": 1, "times": 1}]}, "spikes.0.at_s: .*finite"),
    ],
)
def test_an_invalid_change_names_its_field(content, message):
    with pytest.raises(UserError, match=f"^change: {message}"):
        build_settings(content, TraceChange, source="change")


def test_changes_that_leave_no_request_or_far_too_many_are_refused():
    with pytest.raises(UserError, match="multiply: no request"):
        changed(regular(3), TraceChange(multiply=1e-9), seed=0)
    with pytest.raises(UserError, match=f"multiply: .*{MAX_REQUESTS}"):
        changed(regular(3), TraceChange(multiply=1e12), seed=0)


def test_a_steady_synthetic_trace_is_a_poisson_process():
    trace = generate(synthetic(duration_s=10_000, mean_rate_per_s=5), seed=0)
    assert trace[0].arrival_s == 0
    gaps = np.diff(arrivals(trace))
    near(len(gaps), 50_000, math.sqrt(50_000))
    near(gaps.mean(), 0.2, 0.2 / math.sqrt(50_000))
    near(gaps.std(), 0.2, 0.2 / math.sqrt(50_000) * math.sqrt(2))  # of an exponential distribution
    assert gaps.min() >= 0
    assert trace[-1].arrival_s < 10_000


def test_the_rates_follow_spikes():
    spikes = [Spike(at_s=1000, for_s=500, times=3), Spike(at_s=1250, for_s=500, times=0.5)]
    trace = generate(synthetic(duration_s=2000, mean_rate_per_s=20, spikes=spikes), seed=2)
    pieces = [(0, 1000, 1), (1000, 1250, 3), (1250, 1500, 1.5), (1500, 1750, 0.5), (1750, 2000, 1)]
    for begin_s, end_s, times in pieces:
        expected = 20 * times * (end_s - begin_s)
        near(count(trace, begin_s, end_s), expected, math.sqrt(expected))


def test_synthetic_traces_depend_only_on_the_seed():
    made = synthetic(duration_s=100, mean_rate_per_s=5, output=Lengths(mean=9, sigma=1, max=99))
    assert generate(made, seed=0) == generate(made, seed=0)
    assert generate(made, seed=0) != generate(made, seed=1)


def test_lengths_are_lognormal_with_the_given_mean():
    output = Lengths(mean=300, sigma=0.8, max=10**9)
    trace = generate(synthetic(duration_s=10_000, mean_rate_per_s=5, output=output), seed=3)
    tokens = np.array([request.output_tokens for request in trace])
    deviation = 300 * math.sqrt(math.exp(0.8**2) - 1)
    near(tokens.mean(), 300, deviation / math.sqrt(len(tokens)))
    near(np.log(tokens).std(), 0.8, 0.8 / math.sqrt(2 * len(tokens)) + 0.001)  # for rounding
    assert {request.prompt_tokens for request in trace} == {10}


def test_a_share_of_lengths_has_a_heavy_tail_up_to_the_maximum():
    prompt = Lengths(mean=100, max=5000, tail_share=0.05, tail_times=10)
    trace = generate(synthetic(duration_s=10_000, mean_rate_per_s=5, prompt=prompt), seed=4)
    tokens = np.array([request.prompt_tokens for request in trace])
    num = len(tokens)
    assert set(tokens[tokens < 1000]) == {100}
    near((tokens > 100).sum(), 0.05 * num, math.sqrt(0.05 * 0.95 * num))
    share = 0.05 * 2**-1.5  # Pareto with index 1.5: at least twice the minimum
    near((tokens >= 2000).sum(), share * num, math.sqrt(share * num))
    assert tokens.max() == 5000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"mean_rate_per_s": 1e9}, "duration_s: .*lower"),
        ({"output": {"mean": 50, "max": 10}}, "output: max: 10 is below the mean of 50"),
        ({"ramps": []}, "ramps: unknown key; known keys: duration_s, mean_rate_per_s, spikes"),
    ],
)
def test_invalid_synthetic_settings_name_their_field(content, message):
    lengths = {"mean": 5, "max": 10}
    base = {"duration_s": 100, "mean_rate_per_s": 1, "prompt": lengths, "output": lengths}
    with pytest.raises(UserError, match=f"^synthetic: {message}"):
        build_settings({**base, **content}, SyntheticTrace, source="synthetic")
