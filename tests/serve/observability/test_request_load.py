from dataclasses import replace

import pytest

from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.policy.reports import RequestCounts
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.request import Request
from mars_serve.observability.request_load import RequestLoad, live_tier

LIVE = DecodingOptions(20, threshold=None)
FLEX = replace(LIVE, tier=Tier.FLEX)
PINNED = replace(LIVE, threshold=0.9)
EXACT = replace(LIVE, mode=Mode.EXACT, tier=Tier.PRIORITY)


def request(options=LIVE, num_prompt=10):
    return Request("r", [5] * num_prompt, options)


@pytest.mark.parametrize(
    ("options", "tier"),
    [
        (LIVE, Tier.DEFAULT),
        (replace(LIVE, tier=Tier.PRIORITY), Tier.DEFAULT),
        (FLEX, Tier.FLEX),
        (PINNED, None),
        (replace(FLEX, threshold=0.9), None),
        (EXACT, None),
        (replace(FLEX, mode=Mode.AR), None),
    ],
)
def test_a_request_that_follows_the_live_threshold_has_a_live_tier(options, tier):
    assert live_tier(request(options)) is tier


def test_arrivals_and_ends_are_counted():
    load = RequestLoad()
    first, second = request(num_prompt=10), request(num_prompt=30)
    load.come(first)
    load.come(second)
    assert load.counts == RequestCounts(40, 0, counts_of([], num_begun=2, max_tokens=20))
    load.begun(num_prefix_hit_tokens=16)
    assert load.counts == RequestCounts(40, 16, counts_of([], num_begun=2, max_tokens=20))
    assert load.counts.mean_prompt_tokens == 12
    load.grown(0, 5)
    load.grown(5, 7)
    load.grown(0, 3)
    load.gone(second, has_begun=True, num_tokens=7)
    assert load.counts == RequestCounts(40, 16, counts_of([7], [3], num_begun=2, max_tokens=20))


def test_a_request_that_never_began_does_not_count_as_ended():
    load = RequestLoad()
    load.come(request())
    load.gone(request(), has_begun=False, num_tokens=0)
    assert load.counts == RequestCounts(10, 0, counts_of([], num_begun=1, max_tokens=20))


def test_shares_are_those_of_the_present_requests():
    load = RequestLoad()
    assert [load.share(tier) for tier in (None, Tier.DEFAULT, Tier.FLEX)] == [0.0, 0.0, 0.0]
    for options in (LIVE, FLEX, FLEX, PINNED):
        load.come(request(options))
    assert load.share(Tier.DEFAULT) == load.share(None) == 0.25
    assert load.share(Tier.FLEX) == 0.5
    load.begun(0)
    assert load.share(Tier.FLEX) == 0.5
    load.gone(request(FLEX), has_begun=True, num_tokens=3)
    load.gone(request(FLEX), has_begun=False, num_tokens=0)
    assert load.share(Tier.FLEX) == 0.0
    assert load.share(Tier.DEFAULT) == 0.5
