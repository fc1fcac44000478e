"""Audits of served outputs, on a trained model whose masks are right often enough to matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import pytest

from decoding.engine_requests import make_request
from decoding.engines import output_of, prompt_of, run
from decoding.local_engine_client import LocalEngineClient
from mars_autoscale.audit.counts import AuditCounts, AuditKey, AuditOutcome, group_of
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method.mode import Confidence, LiveDecoding, Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Sampling,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc import auditor as module
from mars_serve.engine.ipc.auditor import Auditor
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.observability.request_telemetry import RequestTelemetry
from waiting import soon

MAX_TOKENS = 40
LOW = DecodingOptions(MAX_TOKENS, threshold=0.2)
FLAT = StepTimes((1, 4096), (0,), ((1.0,), (1.0,)))
"""Times of a machine whose arithmetic is idle: positions cost nothing."""
STEEP = StepTimes((1, 4096), (0,), ((0.001,), (4.096,)))
_NAMES = count()


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Engine:
    return Engine(checkpoint, EngineSettings(max_num_seqs=8, num_pages=120))


class Served:
    """Drives an engine and its auditor as the worker does, and keeps what they give."""

    def __init__(self, engine: Engine, auditor: Auditor) -> None:
        self.engine, self.auditor = engine, auditor
        self.outputs = list[StepOutput]()
        self.outcomes = list[AuditOutcome]()
        self._requests = dict[str, Request]()

    def add(self, request: Request) -> None:
        request.may_be_audited = True
        self.auditor.come(request)
        self._requests[request.id] = request
        self.engine.add(request)

    def cancel(self, request: Request) -> None:
        self.engine.cancel(request.id)
        self.auditor.gone(self._requests.pop(request.id))

    def step(self) -> None:
        self.auditor.begin()
        for output in self.auditor.take(self.engine.step()):
            self.outputs.append(output)
            self.auditor.stepped(output)
            if output.finish_reason is not None:
                self.auditor.gone(self._requests.pop(output.request_id))
        self.engine.check_integrity()
        self.outcomes += self.auditor.take_outcomes()

    def serve(self) -> None:
        """Step until all requests are served; audits may be left."""
        while self.engine.status().num_requests:
            self.step()

    def run(self, requests: Iterable[Request] = ()) -> list[AuditOutcome]:
        """Serve requests at once, then audit all of them."""
        for request in requests:
            self.add(request)
        while self.engine.has_work or self.auditor.has_work:
            self.step()
        assert self.engine.status().num_free_pages == self.engine.num_pages
        return self.outcomes


def requests_of(prompts: Sequence[Sequence[int]], options: DecodingOptions = LOW) -> list[Request]:
    return [Request(f"r{next(_NAMES)}", list(prompt), options) for prompt in prompts]


def plain_outputs(engine: Engine, served: Sequence[Request]) -> list[list[int]]:
    """Return the output of mode ar for each request."""
    plain = [
        Request(
            f"plain {each.id}",
            prompt_of(each),
            replace(each.options, mode=Mode.AR, threshold=1.0, spans=None),
        )
        for each in served
    ]
    run(engine, plain)
    return [output_of(each) for each in plain]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def test_an_outcome_tells_apart_whose_it_is(engine: Engine, prompts: list[list[int]]) -> None:
    requests = requests_of(prompts[:6])
    for request, tenant in zip(requests, "aaaabb", strict=True):
        request.tenant = tenant
    outcomes = Served(engine, Auditor(engine, share=1.0)).run(requests)
    found = Counter(key.group for outcome in outcomes for key in outcome.counts())
    assert found == {group_of("a"): 4, group_of("b"): 2}


OPTIONS = {
    "greedy": LOW,
    "sampled": replace(LOW, sampling=Sampling(temperature=0.9, seed=7)),
    "penalties": replace(LOW, sampling=Sampling(repetition_penalty=1.3, frequency_penalty=0.4)),
    "min tokens": replace(LOW, sampling=Sampling(temperature=0.5, seed=3, min_tokens=30)),
    "no end": replace(LOW, ignore_eos=True),
    "flex": replace(LOW, threshold=0.5, tier=Tier.FLEX),
    "drawn windows": replace(LOW, window=2),
    "grammar": replace(LOW, grammar=GrammarSpec(GrammarKind.REGEX, "[a-z ]{8,20}")),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_audit_finds_the_first_token_that_mode_ar_chooses_otherwise(
    engine: Engine, prompts: list[list[int]], options: DecodingOptions
) -> None:
    requests = requests_of(prompts[:24], options)
    driver = Served(engine, Auditor(engine, share=1.0))
    for request in requests:  # one after the other, so that the order of the outcomes is theirs
        driver.run([request])
    plain = plain_outputs(engine, requests)
    differences = [first_difference(output_of(r), p) for r, p in zip(requests, plain, strict=True)]
    assert any(each is not None for each in differences), "nothing is tested without a difference"
    assert len(driver.outcomes) == len(requests)
    for request, difference, outcome in zip(requests, differences, driver.outcomes, strict=True):
        assert outcome.tier is options.tier
        is_plain = options.sampling == Sampling() and options.grammar is None
        assert outcome.is_plain == is_plain
        num_compared = request.num_output if difference is None else difference + 1
        assert outcome.tokens == {options.threshold: num_compared}
        assert outcome.diverged_at == (None if difference is None else options.threshold)


def test_outputs_of_mode_exact_never_diverge_and_are_not_audited(
    engine: Engine, prompts: list[list[int]]
) -> None:
    kinds = (
        DecodingOptions(MAX_TOKENS, Mode.EXACT),
        DecodingOptions(MAX_TOKENS, Mode.AR),
        DecodingOptions(MAX_TOKENS, threshold=1.0),
        replace(LOW, confidence=Confidence.ENTROPY),
    )
    requests = [each for kind in kinds for each in requests_of(prompts[:2], kind)]
    assert Served(engine, Auditor(engine, share=1.0)).run(requests) == []


def test_each_token_counts_at_the_threshold_it_was_served_with(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """The live τ changes while an output grows, to 1 and back."""
    driver = Served(engine, Auditor(engine, share=1.0))
    (request,) = requests_of(
        prompts[:1], DecodingOptions(MAX_TOKENS, threshold=None, ignore_eos=True)
    )
    engine.live = LiveDecoding(0.99)
    driver.add(request)
    for threshold in (0.99, 0.9, 1.0):
        engine.live = LiveDecoding(threshold)
        driver.step()
    engine.live = LiveDecoding(0.9)
    (outcome,) = driver.run()
    by_threshold = dict[float, int]()
    left = sum(outcome.tokens.values())
    for output in driver.outputs:
        if output.threshold < 1 and left:
            num = min(len(output.tokens), left)
            by_threshold[output.threshold] = by_threshold.get(output.threshold, 0) + num
            left -= num
    assert outcome.tokens == by_threshold
    assert {0.99, 0.9} <= set(outcome.tokens)


def test_outputs_that_were_cut_short_are_compared_as_far_as_they_go(
    engine: Engine, prompts: list[list[int]]
) -> None:
    driver = Served(engine, Auditor(engine, share=1.0))
    (request,) = requests_of(prompts[:1], replace(LOW, threshold=0.999))
    driver.add(request)
    driver.step()
    driver.step()
    num_served = sum(len(output.tokens) for output in driver.outputs)
    driver.cancel(request)
    (outcome,) = driver.run()
    assert 0 < sum(outcome.tokens.values()) <= num_served


# Who comes first


def test_audits_count_nowhere_in_the_engines_status(
    engine: Engine, prompts: list[list[int]]
) -> None:
    driver = Served(engine, Auditor(engine, share=1.0))
    requests = requests_of(prompts[:8])
    for request in requests:
        driver.add(request)
    driver.serve()
    before = engine.status()
    assert engine.has_work or driver.auditor.has_work, "the audits are to come"
    driver.run()
    assert engine.status() == replace(before, num_free_pages=engine.num_pages)
    assert len(driver.outcomes) == len(requests)
    assert {output.request_id for output in driver.outputs} == {each.id for each in requests}


def test_no_audit_runs_beside_others_where_positions_cost_time(
    engine: Engine, prompts: list[list[int]]
) -> None:
    engine.adapt_windows(STEEP)
    driver = Served(engine, Auditor(engine, share=1.0))
    driver.add(requests_of(prompts[:1])[0])
    driver.serve()
    engine.on_launch = lambda rows: seen.append({row.request.is_audit for row in rows})
    seen = list[set[bool]]()
    driver.auditor.begin()
    driver.add(requests_of(prompts[1:2], replace(LOW, threshold=0.99))[0])
    driver.serve()
    assert seen
    assert all(kinds == {False} for kinds in seen)
    assert not driver.outcomes
    assert len(driver.run()) == 2


def test_audits_run_beside_others_where_arithmetic_is_idle(
    engine: Engine, prompts: list[list[int]]
) -> None:
    engine.adapt_windows(FLAT)
    driver = Served(engine, Auditor(engine, share=1.0))
    driver.add(requests_of(prompts[:1])[0])
    driver.serve()
    (long,) = requests_of(
        prompts[1:2], DecodingOptions(60, threshold=0.999, window=1, ignore_eos=True)
    )
    driver.add(long)
    driver.serve()
    assert driver.outcomes, "the first output was audited while the second was served"


def test_waiting_requests_take_the_room_and_the_pages_of_audits(
    checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    """Nothing that is served changes by audits beside it, in a pool that holds two requests."""
    few = EngineSettings(max_num_seqs=2, num_pages=14, enable_prefix_caching=False)
    options = replace(LOW, threshold=0.9, window=4)
    alone = requests_of(prompts[:10], options)
    run(Engine(checkpoint, few), alone)
    engine = Engine(checkpoint, few)
    engine.adapt_windows(FLAT)
    driver = Served(engine, Auditor(engine, share=1.0))
    requests = requests_of(prompts[:10], options)
    for i, request in enumerate(requests):
        driver.add(request)
        for _ in range(i % 4):
            driver.step()
    driver.run()
    assert [output_of(each) for each in requests] == [output_of(each) for each in alone]
    assert len(driver.outcomes) == len(requests)
    assert engine.status().num_preemptions == 0, "those of audits do not count"


# Samples


def test_the_share_of_outputs_is_sampled(engine: Engine) -> None:
    auditor = Auditor(engine, share=0.2, seed=5)
    for index in range(1000):
        request = make_request(f"r{index}", threshold=0.9)
        request.may_be_audited = index % 2 == 0
        auditor.come(request)
    sampled = [int(name[1:]) for name in auditor._running]
    assert 70 < len(sampled) < 130, "a fifth of the 500 that may be"
    assert all(index % 2 == 0 for index in sampled)


def test_few_outputs_wait(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 3)
    auditor = Auditor(engine, share=1.0)
    requests = requests_of(prompts[:5], replace(LOW, max_tokens=8))
    driver = Served(engine, auditor)
    for request in requests:
        driver.add(request)
    driver.serve()
    assert len(auditor._waiting) <= 3
    monkeypatch.setattr(module, "_MAX_WAITING_TOKENS", 0)
    driver.add(requests_of(prompts[5:6])[0])
    driver.serve()
    assert not auditor._waiting


def test_a_failed_audit_is_dropped(engine: Engine, prompts: list[list[int]]) -> None:
    driver = Served(engine, Auditor(engine, share=1.0))
    driver.add(requests_of(prompts[:1])[0])
    driver.serve()
    driver.auditor.begin()
    assert driver.auditor._current is not None
    (_, request) = driver.auditor._current
    engine.cancel(request.id)
    failed = StepOutput(request.id, [], FinishReason.ERROR, error="made up")
    assert driver.auditor.take([failed]) == []
    assert driver.run() == []


# In the worker


async def test_an_idle_engine_audits_what_it_has_served(
    engine: Engine, prompts: list[list[int]]
) -> None:
    loop = LocalEngineClient(engine, audited_share=1.0)
    try:
        requests = requests_of(prompts[:6])
        for request in requests:
            request.may_be_audited = request is not requests[-1]
            assert [output async for output in loop.stream(request)]

        def counted() -> Mapping[AuditKey, AuditCounts]:
            found = loop.activity
            return found.audits if isinstance(found, RequestTelemetry) else {}

        key = AuditKey(Tier.DEFAULT, LOW.threshold or 0.0, is_plain=True)
        await soon(lambda: key in counted() and counted()[key].num_outputs == 5)
        assert loop.status().num_requests == 0
        telemetry = loop.activity
        assert isinstance(telemetry, RequestTelemetry)
        assert telemetry.counts.lengths.num_begun == len(requests)
        (outputs,) = (
            sample.value
            for family in telemetry.families(("mars", "one"))
            for sample in family.samples
            if sample.name == "marsray_audited_outputs_total"
        )
        assert outputs == 5
    finally:
        loop.stop()
