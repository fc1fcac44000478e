"""Measures audits: how soon they find a frontier that is wrong, how rarely they alarm, their cost.

    python -m bench.audit detect MODEL --data EVAL --threshold .8 --served .65
    python -m bench.audit calm --hours 1000
    python -m bench.audit cost MODEL --dtype bfloat16

``detect`` serves conversations with MODEL and audits all of them, then lets detectors hear the
outcomes in many random orders. A frontier may be wrong in two ways: it says a third of what τ
loses, or the model has become too sure of itself, as it is with ``--served``: its outputs are those
of that τ, and count as served with the other one. ``calm`` draws audits of a frontier that
holds, once a second. ``cost`` decodes with and without audits in turn, with as many requests as the
engine runs at once, and with single ones that come now and then.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from mars_autoscale.audit.counts import AuditOutcome
from mars_autoscale.audit.drift import Drift
from mars_autoscale.model.expectations import Expectation
from mars_autoscale.model.frontier import read_frontier
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.data.answers import is_correct
from mars_platform.errors import UserError
from mars_platform.statistics import difference_of_pairs, proportion
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.auditor import Auditor, Check
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.items import EvalItem, read_items

app = typer.Typer(add_completion=False, no_args_is_help=True)
_MAX_AUDITS = 2000
"""Audits after which no alarm is waited for."""
_NUM_ORDERS = 200
_MAX_TOKENS = 200
_LENGTH = 100
"""Tokens of a drawn output."""


class _Driver:
    """Steps an engine with its auditor, as the engine's worker does."""

    def __init__(self, engine: Engine, auditor: Auditor) -> None:
        self.engine, self.auditor = engine, auditor
        self._served = dict[str, Request]()
        self.outcomes = list[AuditOutcome]()

    def add(self, request: Request) -> None:
        request.may_be_audited = True
        self.auditor.come(request)
        self._served[request.id] = request
        self.engine.add(request)

    @property
    def num_served(self) -> int:
        """Requests that are being served."""
        return len(self._served)

    def step(self) -> int:
        """Run a step; returns the number of tokens that were served."""
        self.auditor.begin()
        outputs = self.auditor.take(self.engine.step())
        for output in outputs:
            self.auditor.stepped(output)
            if output.finish_reason is not None:
                self.auditor.gone(self._served.pop(output.request_id))
        self.outcomes += self.auditor.take_outcomes()
        return sum(len(output.tokens) for output in outputs)

    def drain(self, num_outcomes: int) -> None:
        """Step until all outputs are audited."""
        while len(self.outcomes) < num_outcomes:
            self.step()


# Detection


def _check_of(items: Sequence[EvalItem], checkpoint: Checkpoint) -> Check:
    answers = {tuple(item.prompt): item for item in items}

    def check(prompt: Sequence[int], output: Sequence[int]) -> bool | None:
        item = answers[tuple(prompt)]
        text = checkpoint.tokenizer.decode(list(output), skip_special_tokens=True)
        return None if item.answer is None else is_correct(text, item.answer)

    return check


def _audit_all(
    checkpoint: Checkpoint, items: Sequence[EvalItem], threshold: float
) -> list[AuditOutcome]:
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=16))
    driver = _Driver(engine, Auditor(engine, 1.0, _check_of(items, checkpoint)))
    for index, item in enumerate(items):
        most = min(_MAX_TOKENS, engine.max_length - len(item.prompt))
        driver.add(
            Request(str(index), list(item.prompt), DecodingOptions(most, threshold=threshold))
        )
        while driver.num_served >= 16:
            driver.step()
        if index % 32 == 31:
            driver.drain(index + 1)  # fewer wait than the auditor keeps
    driver.drain(len(items))
    return driver.outcomes


def _expectation(outcomes: Sequence[AuditOutcome], threshold: float) -> Expectation:
    """Return what calibration would have found on these outputs."""
    diverged = sum(each.diverged_at is not None for each in outcomes)
    tokens = sum(sum(each.tokens.values()) for each in outcomes)
    lost = sum(bool(each.is_right) and not each.was_right for each in outcomes)
    gained = sum(bool(each.was_right) and not each.is_right for each in outcomes)
    loss = difference_of_pairs(lost, gained, len(outcomes)).high
    return Expectation(threshold, proportion(diverged, tokens).high, 100 * loss)


def _third(expectation: Expectation) -> Expectation:
    assert expectation.loss is not None
    return replace(expectation, divergence=expectation.divergence / 3, loss=expectation.loss / 3)


def _audits_to_alarm(
    outcomes: Sequence[AuditOutcome], expectation: Expectation, seed: int
) -> int | None:
    draw, drift = random.Random(seed), Drift((expectation,))
    for number in range(1, _MAX_AUDITS + 1):
        drift = drift.heard(draw.choice(outcomes).counts(), float(number))
        if drift.is_refuted:
            return number
    return None


def _called(outcome: AuditOutcome, threshold: float) -> AuditOutcome:
    """Return an outcome as if it had been served with another τ."""
    diverged_at = None if outcome.diverged_at is None else threshold
    tokens = {threshold: sum(outcome.tokens.values())}
    return replace(outcome, tokens=tokens, diverged_at=diverged_at)


def _unchecked(outcomes: Sequence[AuditOutcome]) -> list[AuditOutcome]:
    return [replace(each, was_right=None, is_right=None) for each in outcomes]


@app.command()
def detect(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    data: Annotated[Path, typer.Option(help="Conversations with answers.")],
    threshold: Annotated[float, typer.Option(help="τ that they are served with.")] = 0.8,
    served: Annotated[
        float | None, typer.Option(help="τ that they are really served with.")
    ] = None,
    items: Annotated[int, typer.Option(help="Number of conversations.")] = 600,
) -> None:
    """Print how many audits it takes to find a frontier that is wrong."""
    checkpoint = read_checkpoint(model)
    found = read_items(
        [data], checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=items
    )
    torch.set_num_threads(1)  # such a model gains nothing by more
    begin = time.perf_counter()
    outcomes = _audit_all(checkpoint, found, served or threshold)
    if served is not None:
        outcomes = [_called(each, threshold) for each in outcomes]
    measured = _expectation(outcomes, threshold)
    print(
        f"{len(outcomes)} outputs served and audited in {time.perf_counter() - begin:.0f} s: "
        f"{sum(each.diverged_at is not None for each in outcomes)} diverged, "
        f"{sum(bool(each.is_right) for each in outcomes)} right in mode exact, "
        f"{sum(bool(each.was_right) for each in outcomes)} as served; "
        f"upper ends: {1000 * measured.divergence:.2f} per 1,000 tokens, {measured.loss:.1f} points"
    )
    told = {"as measured now": measured, "a third of that": _third(measured)}
    try:
        points = read_frontier(model).expectations()
        (known,) = (each for each in points if each.threshold == threshold)
        told |= {"frontier.json": known, "a third of frontier.json": _third(known)}
    except (UserError, ValueError) as error:
        print(f"without frontier.json: {error}")
    for name, expectation in told.items():
        for kind, heard in (("divergence", _unchecked(outcomes)), ("with answers", outcomes)):
            alarms = [_audits_to_alarm(heard, expectation, seed) for seed in range(_NUM_ORDERS)]
            numbers = [each or _MAX_AUDITS for each in alarms]
            missed = sum(each is None for each in alarms)
            middle, late = np.percentile(numbers, (50, 95))
            print(
                f"{name}, {kind}: alarm after {middle:.0f} audits (median), {late:.0f} (95%); "
                f"none within {_MAX_AUDITS} in {missed} of {_NUM_ORDERS} orders"
            )


# False alarms


def _drawn(rate: float, loss: float, draw: np.random.Generator) -> Iterator[AuditOutcome]:
    """Yield outcomes of τ = .8 that diverge and lose answers at these rates."""
    while True:
        places = draw.geometric(rate, 10_000)
        is_lost = draw.random(10_000) < loss
        for place, lost in zip(places.tolist(), is_lost.tolist(), strict=True):
            diverged_at = 0.8 if place <= _LENGTH else None
            yield AuditOutcome(
                Tier.DEFAULT, True, {0.8: min(place, _LENGTH)}, diverged_at, not lost, True
            )


@app.command()
def calm(
    hours: Annotated[int, typer.Option(help="Simulated hours.")] = 1000,
    per_hour: Annotated[int, typer.Option(help="Audits an hour.")] = 3600,
    rate: Annotated[float, typer.Option(help="True rate of divergence of a token.")] = 0.002,
    loss: Annotated[float, typer.Option(help="True share of lost answers.")] = 0.076,
    items: Annotated[int, typer.Option(help="Items that each frontier was measured on.")] = 600,
    frontiers: Annotated[int, typer.Option(help="Frontiers among which the hours divide.")] = 10,
) -> None:
    """Print how often a right frontier raises an alarm.

    Half of the frontiers are as calibration would measure them, the others say exactly the truth,
    which leaves no margin.
    """
    draw = np.random.default_rng(0)
    num_alarms, highest = 0, 0.0
    for number in range(frontiers):
        sample = _drawn(rate, loss, draw)
        expectation = _expectation([next(sample) for _ in range(items)], 0.8)
        if number % 2:
            expectation = Expectation(0.8, rate, 100 * loss)
        drift, highest_here = Drift((expectation,)), 0.0
        for index in range(hours * per_hour // frontiers):
            drift = drift.heard(next(sample).counts(), float(index))
            highest_here = max(highest_here, drift.evidence)
            if drift.is_refuted:
                num_alarms, drift = num_alarms + 1, Drift((expectation,))
        print(
            f"{1000 * expectation.divergence:.2f} per 1,000 tokens, {expectation.loss:.1f} points: "
            f"highest evidence {highest_here:.2f}, recent loss factor {drift.loss_factor:.2f}"
        )
        highest = max(highest, highest_here)
    print(
        f"{num_alarms} alarms in {hours} hours of {per_hour} audits; evidence at most {highest:.2f}"
    )


# Cost


def _request(index: int, max_tokens: int, length: int, vocabulary: int) -> Request:
    draw = random.Random(index)
    prompt = [draw.randrange(10, vocabulary - 10) for _ in range(length)]
    options = DecodingOptions(max_tokens, threshold=0.05, ignore_eos=True)
    return Request(f"r{index}", prompt, options)


def _full_load(driver: _Driver, rows: int, seconds: float, vocabulary: int) -> float:
    """Return tokens per second with a full batch."""
    index = num_tokens = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        while driver.num_served < rows:
            driver.add(_request(index, 48, 24, vocabulary))
            index += 1
        num_tokens += driver.step()
    spent = time.perf_counter() - begin
    while driver.num_served:
        driver.step()
    return num_tokens / spent


def _single(driver: _Driver, num: int, pause_s: float, vocabulary: int) -> list[float]:
    """Return the seconds to the first token of requests that come now and then."""
    found = []
    for index in range(num):
        until = time.perf_counter() + pause_s
        while time.perf_counter() < until:
            if driver.engine.has_work or driver.auditor.has_work:
                driver.step()
            else:
                time.sleep(0.001)
        # a request comes at any moment of a step: half of one is waited for on average
        begin = time.perf_counter()
        driver.add(_request(10_000 + index, 48, 24, vocabulary))
        while not driver.step():
            pass
        found.append(time.perf_counter() - begin)
        while driver.num_served:
            driver.step()
    return found


@app.command()
def cost(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    rows: Annotated[int, typer.Option(help="Requests of a full batch.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds of each, in turn.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds of each round.")] = 6.0,
) -> None:
    """Print tokens per second and the time to the first token, with audits over those without."""
    checkpoint = read_checkpoint(model)
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=rows), dtype=getattr(torch, dtype))
    engine.warm_up()
    vocabulary = len(checkpoint.tokenizer)
    speeds, waits, audits = list[float](), list[float](), 0
    for number in range(rounds + 1):
        by_share = dict[float, tuple[float, float]]()
        for share in (0.0, 1.0) if number % 2 else (1.0, 0.0):
            driver = _Driver(engine, Auditor(engine, share, seed=number))
            speed = _full_load(driver, rows, seconds, vocabulary)
            first_s = statistics.median(_single(driver, 10, 0.15, vocabulary))
            by_share[share] = speed, first_s
            audits = max(audits, len(driver.outcomes))
            while engine.has_work:
                driver.step()
        if number:  # the first round warms up
            speeds.append(by_share[1.0][0] / by_share[0.0][0])
            waits.append(by_share[1.0][1] / by_share[0.0][1])
            print(f"round {number}: {by_share}")
    for name, ratios in (("tokens/s under full load", speeds), ("time to first token", waits)):
        text = ", ".join(f"{each:.3f}" for each in sorted(ratios))
        print(f"{name}, with audits over without: {statistics.median(ratios):.3f} ({text})")
    print(f"audits in a round with them: {audits}")


if __name__ == "__main__":
    app()
