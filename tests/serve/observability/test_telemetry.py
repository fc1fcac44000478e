import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from decoding.local_engine_client import LocalEngineClient
from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.policy.reports import Phase
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import LiveDecoding, Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.ipc.messages import Condition
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability import ray_metrics, request_telemetry
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from mars_serve.observability.metric_families import Histogram
from mars_serve.observability.ray_metrics import RayMirror
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.observability.request_telemetry import RequestTelemetry
from waiting import wait_until

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
PROMPT = [5, 9, 12, 30, 7, 41]


@pytest.fixture
def loop(tiny_model, make_engine):
    loop = LocalEngineClient(make_engine(tiny_model("qwen2"), SPECIAL))
    yield loop
    loop.stop()


@pytest.fixture
def replica(loop):
    return ReplicaTelemetry("mars", "r1", loop)


def request(name, *, mode=Mode.AR, **options):
    return Request(name, list(PROMPT), DecodingOptions(mode=mode, **options))


def values(collector, **labels):
    """Return the values, by name, of the samples with exactly these labels."""
    return {
        sample.name: sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.labels == labels
    }


async def run(loop, request):
    return [output async for output in loop.stream(request)]


async def test_a_replica_counts_the_tokens_and_passes_of_its_requests(replica, loop):
    requests = [
        request("a", max_tokens=5),
        request("b", max_tokens=9),
        request("c", mode=Mode.THRESHOLD, max_tokens=12, threshold=0.05, window=3),
    ]
    ran = await asyncio.gather(*(run(loop, each) for each in requests))
    await loop.told(3)
    passes = [output for outputs in ran for output in outputs]
    num_tokens = 5 + 9 + 12
    num_first = sum(len(outputs[0].tokens) for outputs in ran)
    found = values(replica, model="mars", replica="r1")

    assert len(ran[2]) < 12  # several tokens per pass, or the counts below would not differ
    assert found["marsray_prompt_tokens_total"] == 3 * len(PROMPT)
    assert found["marsray_generation_tokens_total"] == num_tokens
    assert found["marsray_row_passes_total"] == len(passes)
    assert found["marsray_tokens_per_forward_count"] == len(passes)
    assert found["marsray_tokens_per_forward_sum"] == num_tokens
    assert found["marsray_inter_token_latency_seconds_count"] == num_tokens - num_first
    assert found["marsray_time_to_first_token_seconds_count"] == 3
    assert found["marsray_request_queue_time_seconds_count"] == 3
    assert found["marsray_e2e_request_latency_seconds_count"] == 3
    assert found["marsray_request_confidence_threshold_count"] == 1
    assert found["marsray_request_confidence_threshold_sum"] == pytest.approx(0.05)
    assert found["marsray_num_requests_running"] == found["marsray_num_requests_waiting"] == 0
    assert found["marsray_kv_cache_usage_ratio"] == 0
    steps = found["marsray_forward_passes_total"]
    assert max(map(len, ran)) <= steps <= len(passes)


async def test_a_cancelled_request_counts_and_holds_no_pages(replica, loop):
    stream = loop.stream(request("a", max_tokens=100))
    await anext(stream)
    held = values(replica, model="mars", replica="r1")
    await stream.aclose()
    await loop.told(1)
    found = values(replica, model="mars", replica="r1")

    assert held["marsray_num_requests_running"] == 1
    assert held["marsray_kv_cache_usage_ratio"] > 0
    assert found["marsray_kv_cache_usage_ratio"] == 0
    assert found["marsray_e2e_request_latency_seconds_count"] == 1
    passes = found["marsray_tokens_per_forward_count"]
    assert 1 <= passes <= found["marsray_generation_tokens_total"] < 100


async def test_prefix_hits_are_counted(replica, loop):
    for name in "ab":
        await run(loop, request(name, max_tokens=1))
    found = values(replica, model="mars", replica="r1")
    assert found["marsray_prefix_cache_hit_tokens_total"] == 4  # one full page of 4


async def test_the_live_threshold_is_that_of_the_engine(replica, loop):
    loop.set_live(LiveDecoding(0.625))
    found = values(replica, model="mars", replica="r1")
    assert found["marsray_confidence_threshold"] == 0.625


async def test_an_overdue_engine_is_told_in_metric_and_report(replica, loop):
    assert values(replica, model="mars", replica="r1")["marsray_engine_overdue"] == 0
    loop.tell(Condition(is_overdue=True))
    assert values(replica, model="mars", replica="r1")["marsray_engine_overdue"] == 1
    assert replica.report().phase is Phase.OVERDUE


def arrived(telemetry, name, **options):
    """Have a request arrive at 10.0 s."""
    found = request(name, **options)
    found.arrived_at = 10.0
    telemetry.come(found)
    return found


def exposed(telemetry, **labels):
    return values(Families(telemetry), **{"model": "mars", "replica": "r1", **labels})


class Families(Collector):
    """The metrics of `RequestTelemetry` alone."""

    def __init__(self, telemetry):
        self.telemetry = telemetry

    def collect(self):
        return self.telemetry.families(("mars", "r1"))


def step_through(telemetry):
    """Run a request with three passes that give tokens."""
    timed = arrived(telemetry, "a", mode=Mode.THRESHOLD, max_tokens=9)
    for now_s, output in (
        (10.3, StepOutput("a", [], None, queue_s=0.25)),  # a part of a prompt
        (10.5, StepOutput("a", [7, 8], None, threshold=0.5)),
        (11.1, StepOutput("a", [9, 10, 11], None, threshold=0.75)),
        (11.3, StepOutput("a", [12], None, threshold=1.0)),
    ):
        telemetry.stepped(timed, output, now_s)
    telemetry.gone(timed, 14.0)


def test_the_passes_of_a_request_are_timed():
    telemetry = RequestTelemetry()
    step_through(telemetry)
    found = exposed(telemetry)

    sums = {name: value for name, value in found.items() if name.endswith("_sum")}
    assert sums == pytest.approx(
        {
            "marsray_request_queue_time_seconds_sum": 0.25,
            "marsray_time_to_first_token_seconds_sum": 0.5,
            "marsray_inter_token_latency_seconds_sum": 0.6 + 0.2,
            "marsray_e2e_request_latency_seconds_sum": 4.0,
            "marsray_tokens_per_forward_sum": 6,
            "marsray_request_confidence_threshold_sum": 0.75,
        }
    )
    assert found["marsray_inter_token_latency_seconds_count"] == 4
    gaps = exposed(telemetry, le="0.2")["marsray_inter_token_latency_seconds_bucket"]
    assert gaps in (3, 4)  # three of 0.2 s, up to the last bit; the pass itself took 0.6 s


@pytest.mark.parametrize(
    "reason", [None, FinishReason.ERROR, FinishReason.REFUSED, FinishReason.TIMEOUT]
)
def test_a_request_that_never_began_is_not_timed(reason):
    telemetry = RequestTelemetry()
    left = arrived(telemetry, "a", max_tokens=1)
    if reason is not None:
        telemetry.stepped(left, StepOutput("a", [], reason), 10.5)
    telemetry.gone(left, 11.0)
    assert not any(value for name, value in exposed(telemetry).items() if name.endswith("_count"))
    assert sum(telemetry.counts.lengths.ended) == 0


def test_the_counts_are_the_same_on_the_other_side_of_a_connection():
    """The requests that run stay behind: only the engine's process sees them end."""
    telemetry = RequestTelemetry()
    step_through(telemetry)
    flex = {"mode": Mode.THRESHOLD, "threshold": None, "tier": Tier.FLEX, "max_tokens": 4}
    running = arrived(telemetry, "runs", **flex)
    telemetry.stepped(running, StepOutput("runs", [7], None), 10.1)
    arrived(telemetry, "waits", **flex)
    received = pickle.loads(pickle.dumps(telemetry))  # noqa: S301
    assert exposed(received) == exposed(telemetry)
    assert received.counts == telemetry.counts
    lengths = replace(counts_of([6], [1]), num_begun=3, limits=9 + 4 + 4)
    assert received.counts.lengths == lengths
    assert received.counts.prompt_tokens == 3 * len(PROMPT)
    assert received.share(Tier.FLEX) == telemetry.share(Tier.FLEX) == 1.0
    telemetry.stepped(running, StepOutput("runs", [7], FinishReason.LENGTH), 10.2)
    telemetry.gone(running, 10.2)
    found = [sum(each.counts.lengths.ended) for each in (received, telemetry)]
    assert found == [1, 2]


def test_a_copy_is_small_however_many_requests_run():
    telemetry = RequestTelemetry()
    size = len(pickle.dumps(telemetry))
    for number in range(1_000):
        arrived(telemetry, f"r{number}", max_tokens=4)
    assert len(pickle.dumps(telemetry)) < size + 200


def test_the_times_are_reported_even_if_the_engine_is_dead(replica, loop):
    loop.stop()
    names = {family.name for family in replica.collect()}
    assert "marsray_e2e_request_latency_seconds" in names
    assert "marsray_num_requests_running" not in names


@given(st.lists(st.floats(0, 12), max_size=20), st.data())
def test_a_histogram_equals_that_of_prometheus_client(numbers, data):
    definition = request_telemetry._INTER_TOKEN_LATENCY
    edges = data.draw(st.lists(st.sampled_from(definition.buckets), max_size=5))
    own = Histogram(definition)
    oracle = prometheus_client.Histogram(
        definition.name, definition.help, ["model", "replica"], buckets=definition.buckets,
        registry=None,
    )  # fmt: skip
    child = oracle.labels("m", "r")
    for number in [*numbers, *edges]:
        own.observe(number)
        child.observe(number)

    def samples(family):
        return {
            (each.name, each.labels.get("le", "")): each.value
            for each in family.samples
            if not each.name.endswith("_created")
        }

    (expected,) = oracle.collect()
    assert samples(own.family(("m", "r"))) == pytest.approx(samples(expected))


def test_requests_for_models_that_are_not_served_share_a_label():
    ingress = IngressTelemetry(["mars"], "i1")
    ingress.count("mars", "stop", "/v1/messages")
    for name in ("anything", "else", None):
        ingress.count(name, "rejected_404", "other")
    ingress.count_rejection("else", 404, "model_not_found")
    assert values(ingress, model="mars", replica="i1", outcome="stop") == {
        "marsray_requests_total": 1
    }
    assert values(ingress, model="", replica="i1", outcome="rejected_404") == {
        "marsray_requests_total": 3
    }
    assert values(ingress, model="", replica="i1", status="404", code="model_not_found") == {
        "marsray_rejections_total": 1
    }
    ingress.count_moves("mars", 2)
    ingress.count_moves("mars", 1)
    assert values(ingress, model="mars", replica="i1") == {"marsray_moves_total": 3}


class FakeInstrument:
    """A gauge or counter that keeps what is written to it."""

    made = {}  # noqa: RUF012
    """The instruments by name."""

    def __init__(self, name, description, tag_keys):
        self.tag_keys = tag_keys
        self.writes = []
        assert name not in self.made, "Ray allows an instrument to be made only once"
        self.made[name] = self

    def write(self, value, tags):
        assert tuple(tags) == self.tag_keys
        self.writes.append((value, tags))

    set = inc = write


FAKE_METRICS = SimpleNamespace(Gauge=FakeInstrument, Counter=FakeInstrument)


@pytest.fixture
def instruments(monkeypatch):
    monkeypatch.setattr(FakeInstrument, "made", {})
    return FakeInstrument.made


def test_ray_gets_the_growth_of_a_restarted_counter(instruments):
    counts = iter([5.0, 2.0, 6.0])

    class Restarting(Collector):
        def collect(self):
            yield CounterMetricFamily("marsray_some_total", "Some.", value=next(counts))

    mirror = RayMirror(Restarting(), FAKE_METRICS)
    for _ in range(3):
        mirror.update()
    assert [value for value, _ in instruments["marsray_some_total"].writes] == [5, 2, 4]


def test_an_error_does_not_end_the_copies(instruments, monkeypatch, caplog):
    monkeypatch.setattr(ray_metrics, "PERIOD_S", 0.001)
    script = iter([1, "odd", 2])

    class Failing(Collector):
        def collect(self):
            value = next(script, 2)
            if value == "odd":
                raise RuntimeError(value)
            yield GaugeMetricFamily("marsray_some", "Some.", value=value)

    def copied():
        return instruments["marsray_some"].writes if instruments else []

    end = RayMirror(Failing(), FAKE_METRICS).start()
    try:
        wait_until(lambda: (2, {}) in copied(), 20, lambda: "no further copy")
    finally:
        end()
    assert len(caplog.records) == 1


def test_ray_gets_histograms_as_gauges(instruments):
    telemetry = RequestTelemetry()
    given = arrived(telemetry, "a", max_tokens=2)
    telemetry.stepped(given, StepOutput("a", [7, 8], None), 10.5)
    RayMirror(Families(telemetry), FAKE_METRICS).update()
    buckets = instruments["marsray_tokens_per_forward_bucket"].writes
    assert [value for value, tags in buckets if tags["le"] == "1.0"] == [0]
    assert [value for value, tags in buckets if tags["le"] in ("2.0", "+Inf")] == [1, 1]
    assert instruments["marsray_tokens_per_forward_sum"].writes == [(2, {"model": "mars"})]
