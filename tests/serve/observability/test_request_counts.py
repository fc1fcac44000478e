from dataclasses import replace
from itertools import count

import pytest

from mars_autoscale.policy.lengths import counts_of
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.request_telemetry import RequestTelemetry, live_tier

LIVE = DecodingOptions(20, threshold=None)
FLEX = replace(LIVE, tier=Tier.FLEX)
PINNED = replace(LIVE, threshold=0.9)
NUMBERS = count()
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


@pytest.fixture
def telemetry():
    return RequestTelemetry()


def come(telemetry, options=LIVE, num_prompt=10):
    """Have a request come to the engine."""
    found = request(options, num_prompt)
    found.id, found.arrived_at = str(next(NUMBERS)), 1.0
    telemetry.come(found)
    return found


def step(telemetry, request, num_tokens, num_hits=0):
    """Give a request so many tokens."""
    output = StepOutput(request.id, [7] * num_tokens, None, num_prefix_hit_tokens=num_hits)
    telemetry.stepped(request, output, 2.0)


def test_prompts_and_outputs_are_counted(telemetry):
    first, second = come(telemetry, num_prompt=10), come(telemetry, num_prompt=30)
    assert telemetry.counts.prompt_tokens == 40
    assert telemetry.counts.lengths == counts_of([], num_begun=2, max_tokens=20)
    step(telemetry, second, 5, num_hits=16)
    assert telemetry.counts.prefix_hit_tokens == 16
    assert telemetry.counts.mean_prompt_tokens == 12
    step(telemetry, second, 2)
    step(telemetry, first, 3)
    telemetry.gone(second, 3.0)
    assert telemetry.counts.lengths == counts_of([7], [3], num_begun=2, max_tokens=20)


def test_a_request_that_never_began_does_not_count_as_ended(telemetry):
    telemetry.gone(come(telemetry), 3.0)
    assert telemetry.counts.lengths == counts_of([], num_begun=1, max_tokens=20)


def test_shares_are_those_of_the_present_requests(telemetry):
    assert [telemetry.share(tier) for tier in (None, Tier.DEFAULT, Tier.FLEX)] == [0.0, 0.0, 0.0]
    _, *flex, _ = [come(telemetry, options) for options in (LIVE, FLEX, FLEX, PINNED)]
    assert telemetry.share(Tier.DEFAULT) == telemetry.share(None) == 0.25
    assert telemetry.share(Tier.FLEX) == 0.5
    step(telemetry, flex[0], 3)
    assert telemetry.share(Tier.FLEX) == 0.5
    for each in flex:
        telemetry.gone(each, 3.0)
    assert telemetry.share(Tier.FLEX) == 0.0
    assert telemetry.share(Tier.DEFAULT) == 0.5
