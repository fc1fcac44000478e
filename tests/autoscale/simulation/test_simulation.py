from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.model.frontier import Frontier, write_frontier
from mars_autoscale.policy.inner_loop import Stage
from mars_autoscale.simulation.bound import Bound, clairvoyant
from mars_autoscale.simulation.compare import compare
from mars_autoscale.simulation.config import SimulationConfig, families
from mars_autoscale.simulation.figures import Figures, figures_of
from mars_autoscale.simulation.policies import StaticReplicas, Target
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.report import picture_of
from mars_autoscale.simulation.run import Result, Simulation
from mars_autoscale.traces.files import TraceRequest, write_trace
from mars_autoscale.traces.synthetic import (
    Lengths,
    Spike,
    SyntheticTrace,
    TraceChange,
    changed,
    generate,
)
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.cli.main import run as run_command
from mars_platform.config import build_settings
from mars_platform.tier import Tier

AR = Rung(1.0, 1.0, 0.0)
LIGHT = Rung(0.9, 1.5, 2.0, 2)
DEEP = Rung(0.8, 2.0, 5.0, 2)
STEP = linear_step_time(0.1, 10)
ONE_SLOT = Capacity(STEP, (AR, DEEP), 1, 100.0)
CONFIG: dict[str, Any] = {
    "step_time": {"t0_s": 0.032, "positions_to_double": 128},
    "prefill_tokens_per_s": 20_000,
    "slots_per_replica": 16,
    "frontier": [
        {"threshold": 1.0, "tokens_per_forward": 1.0, "loss": 0.0},
        {"threshold": 0.95, "tokens_per_forward": 1.695, "loss": 1.7},
        {"threshold": 0.9, "tokens_per_forward": 1.85, "loss": 2.95},
        {"threshold": 0.7, "tokens_per_forward": 2.255, "loss": 12.6},
    ],
    "replicas": {"min": 1, "max": 8, "cold_start_s": 60},
    "rivals": {"ray_targets": [10.0], "knative_targets": [9.6]},
}
TRACE = SyntheticTrace(
    duration_s=500,
    mean_rate_per_s=5.0,
    spikes=(Spike(at_s=250, for_s=60, times=2.6),),
    prompt=Lengths(mean=300, sigma=0.5, max=2000),
    output=Lengths(mean=150, sigma=0.5, max=1000),
)


def simulate(
    trace: list[TraceRequest], capacity: Capacity = ONE_SLOT, replicas: int = 1, rung: Rung = AR
) -> Result:
    limits = ReplicaSettings(max=replicas, initial=replicas)
    return Simulation(trace, capacity, limits, StaticReplicas(replicas, rung)).run()


# One replica, by hand: a step of one row takes 0.11 s


def test_a_request_alone() -> None:
    (served,) = simulate([TraceRequest(1.0, 50, 10)]).served
    assert served.ttft_s == pytest.approx(0.5 + 0.11)
    assert served.loss_tokens == 0.0


def test_requests_wait_for_a_slot() -> None:
    first, second = simulate([TraceRequest(0.0, 0, 10), TraceRequest(0.2, 0, 1)]).served
    assert first.ttft_s == pytest.approx(0.11)
    assert second.ttft_s == pytest.approx(10 * 0.11 - 0.2 + 0.11)


def test_a_prompt_stalls_the_rows_beside_it() -> None:
    capacity = Capacity(STEP, (AR,), 2, 100.0)
    trace = [TraceRequest(0.0, 0, 3), TraceRequest(0.05, 100, 1), TraceRequest(0.06, 0, 1)]
    _, stalling, last = simulate(trace, capacity).served
    both = 0.1 * (1 + 2 / 10)
    assert stalling.ttft_s == pytest.approx(0.11 - 0.05 + 1.0 + both)
    assert last.ttft_s == pytest.approx(0.11 - 0.06 + 1.0 + both + both)


def test_several_tokens_a_pass_and_what_they_cost() -> None:
    capacity = Capacity(STEP, (AR, DEEP), 1, 100.0)
    trace = [TraceRequest(0.0, 0, 10), TraceRequest(0.0, 0, 1)]
    first, second = simulate(trace, capacity, rung=DEEP).served
    step = 0.1 * (1 + 4 / 10)  # a row costs two tokens and two masks
    assert second.ttft_s == pytest.approx(5 * step + step)
    assert first.loss_tokens == pytest.approx(10 * 5.0)
    assert second.loss_tokens == pytest.approx(5.0)


def test_the_least_loaded_replica_takes_a_request() -> None:
    served = simulate([TraceRequest(0.01 * i, 0, 5) for i in range(3)], replicas=3).served
    assert [each.ttft_s for each in served] == pytest.approx([0.11] * 3)


def test_all_requests_are_served_once_and_time_is_billed() -> None:
    trace = generate(TRACE, seed=1)
    capacity = SimulationConfig.model_validate(CONFIG).capacity
    result = simulate(trace, capacity, replicas=8)
    assert [each.request for each in result.served] == trace
    assert all(0 < each.ttft_s < np.inf for each in result.served)
    assert result.replica_seconds == pytest.approx(8 * trace[-1].arrival_s)


# Classes

PRIORITY, DEFAULT, FLEX = Tier


class Fixed:
    """As many replicas as ever, at one stage."""

    period_s = 1.0

    def __init__(self, num_replicas: int, stage: Stage, *, is_saturated: bool = False) -> None:
        self.target = Target(num_replicas, is_saturated=is_saturated)
        self.stage = stage

    def decide(self, snapshot: Any, /) -> Target:
        return self.target

    def local(self) -> Any:
        return self

    def update(self, look: Any, /) -> Stage:
        return self.stage


def simulate_stage(
    trace: list[TraceRequest], capacity: Capacity, stage: Stage, *, is_saturated: bool = False
) -> Result:
    policy = Fixed(1, stage, is_saturated=is_saturated)
    return Simulation(trace, capacity, ReplicaSettings(initial=1), policy).run()


def test_classes_are_served_in_order() -> None:
    order = (DEFAULT, FLEX, DEFAULT, PRIORITY, FLEX, PRIORITY)
    trace = [TraceRequest(0.001 * i, 0, 1, name) for i, name in enumerate(order)]
    served = simulate(trace).served
    turns = sorted(range(len(served)), key=lambda i: served[i].ttft_s + 0.001 * i)
    assert turns == [0, 3, 5, 2, 1, 4]


def test_each_class_has_its_rung() -> None:
    """By hand: a row costs 1 position, 1.5 + 2 and 2 + 2."""
    capacity = Capacity(STEP, (AR, LIGHT, DEEP), 3, 100.0)
    trace = [TraceRequest(0.0, 0, 6, name) for name in (PRIORITY, DEFAULT, FLEX, FLEX)]
    *first, last = simulate_stage(trace, capacity, Stage(LIGHT, DEEP)).served
    assert [each.loss_tokens for each in first] == pytest.approx([0.0, 6 * 2.0, 6 * 5.0])
    # a step of the first alone, three until the third ends, and one with its successor
    assert last.ttft_s == pytest.approx(0.11 + 4 * 0.1 * (1 + (1 + 3.5 + 4) / 10))


def test_mode_exact_costs_no_quality() -> None:
    exact = Rung(1.0, 2.0, 0.0, positions_per_row=4)
    capacity = replace(ONE_SLOT, exact=exact)
    trace = [TraceRequest(0.0, 0, 10), TraceRequest(0.0, 0, 1)]
    for names in ((DEFAULT, DEFAULT), (PRIORITY, FLEX)):
        requests = [replace(each, tier=c) for each, c in zip(trace, names, strict=True)]
        stage = Stage(AR, AR, is_exact=True)
        first, second = simulate_stage(requests, capacity, stage).served
        assert second.ttft_s == pytest.approx(6 * 0.14)
        assert first.loss_tokens == second.loss_tokens == 0.0
        _, plain = simulate_stage(requests, capacity, Stage(AR, AR)).served
        assert plain.ttft_s == pytest.approx(11 * 0.11)
    (deep,) = simulate_stage(trace[:1], capacity, Stage(DEEP, DEEP, is_exact=True)).served
    assert deep.loss_tokens == pytest.approx(50.0), "at τ = 1 alone"


def test_class_flex_is_refused_first() -> None:
    """One slot and outputs of 3 tokens, .33 s each: three may be ahead of one that waits."""
    after = [*[DEFAULT] * 3, FLEX, FLEX, FLEX, DEFAULT, DEFAULT, DEFAULT, PRIORITY]
    trace = [TraceRequest(0.0, 0, 3)]  # so that the mean output is known
    trace += [TraceRequest(1.0 + 0.001 * i, 0, 3, name) for i, name in enumerate(after)]
    served = simulate_stage(trace, ONE_SLOT, Stage(AR, AR), is_saturated=True).served
    refused = [i for i, each in enumerate(served) if each.is_rejected]
    assert refused == [6, 9], "behind 2 of class default and 2 of flex; behind 4 of class default"
    assert all(served[i].ttft_s == np.inf for i in refused)
    assert not any(each.is_rejected for each in simulate(trace).served), "where more may be given"


def test_what_was_refused_is_missed_and_cost_nothing() -> None:
    late = [TraceRequest(1 + 0.001 * i, 0, 3, FLEX) for i in range(12)]
    result = simulate_stage(
        [TraceRequest(0.0, 0, 3), *late], ONE_SLOT, Stage(DEEP, DEEP), is_saturated=True
    )
    figures = figures_of(result, measured_from_s=0, objective_ttft_s=100.0)
    flex = figures.by_class[FLEX]
    assert flex.rejected == figures.rejected > 0
    assert flex.slo_attainment == pytest.approx(1 - flex.rejected / 12)
    assert flex.ttft_p99_s == np.inf
    assert flex.quality_loss_mean == figures.quality_loss_mean == pytest.approx(5.0)
    assert figures.by_class[DEFAULT].slo_attainment == 1.0
    assert set(figures.by_class) == {DEFAULT, FLEX}


def test_the_joint_policy_keeps_classes_apart() -> None:
    shares = {PRIORITY: 0.2, DEFAULT: 0.5, FLEX: 0.3}
    trace = changed(generate(TRACE, seed=0), TraceChange(classes=shares), seed=0)
    config = SimulationConfig.model_validate({**CONFIG, "replicas": {"min": 1, "max": 4}})
    joint: Figures = compare(config, trace, lambda *_: None).policies[0].figures
    priority, default, flex = (joint.by_class[name] for name in (PRIORITY, DEFAULT, FLEX))
    assert priority.quality_loss_mean == 0.0
    assert 0.0 < default.quality_loss_mean < 2.95
    assert default.quality_loss_mean < flex.quality_loss_mean < 12.6
    assert priority.slo_attainment >= default.slo_attainment > flex.slo_attainment
    assert flex.rejected >= default.rejected >= priority.rejected == 0


class Stages(Fixed):
    """Another stage at each look."""

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__(1, stages[0])
        self.rest = list(stages)

    def update(self, look: Any, /) -> Stage:
        return self.rest.pop(0) if len(self.rest) > 1 else self.rest[0]


def test_changes_of_either_class_are_counted_and_those_of_exact_are_not() -> None:
    both = Stage(LIGHT, DEEP)
    stages = [Stage(AR, AR), Stage(AR, AR, is_exact=True), Stage(AR, DEEP), both, Stage(AR, AR)]
    trace = [TraceRequest(float(i), 0, 1) for i in range(6)]
    policy = Stages(stages)
    result = Simulation(trace, ONE_SLOT, ReplicaSettings(initial=1), policy).run()
    assert result.num_threshold_changes == 3


class Steps:
    """Wants other numbers of replicas from given times on."""

    period_s = 1.0

    def __init__(self, numbers: dict[float, int]) -> None:
        self.numbers = numbers
        self.seen: list[tuple[float, int, int]] = []

    def decide(self, snapshot: Any, /) -> Target:
        self.seen.append((snapshot.now_s, len(snapshot.replicas), snapshot.num_starting))
        return Target(
            max((time, n) for time, n in self.numbers.items() if time <= snapshot.now_s)[1]
        )

    def local(self) -> Any:
        return StaticReplicas(1, AR).local()


def test_replicas_start_late_and_are_billed_from_the_asking() -> None:
    trace = [TraceRequest(float(i), 0, 1) for i in range(101)]
    policy = Steps({0.0: 1, 10.0: 3, 50.0: 1})
    limits = ReplicaSettings(max=4, initial=1, cold_start_s=20)
    result = Simulation(trace, ONE_SLOT, limits, policy).run()
    states = {time: (ready, starting) for time, ready, starting in policy.seen}
    assert (states[10.0], states[11.0], states[29.0]) == ((1, 0), (1, 2), (1, 2))
    assert (states[31.0], states[50.0], states[51.0]) == ((3, 0), (3, 0), (1, 0))
    assert result.replica_seconds == pytest.approx(100 + 2 * 40, abs=0.2)
    assert result.num_replica_changes == 2


def test_those_that_still_start_are_ended_first() -> None:
    trace = [TraceRequest(float(i), 0, 1) for i in range(61)]
    policy = Steps({0.0: 2, 5.0: 3, 15.0: 2})
    limits = ReplicaSettings(max=4, initial=2, cold_start_s=20)
    result = Simulation(trace, ONE_SLOT, limits, policy).run()
    states = {time: (ready, starting) for time, ready, starting in policy.seen}
    assert (states[14.0], states[16.0]) == ((2, 1), (2, 0))
    assert result.replica_seconds == pytest.approx(2 * 60 + 10)


# Policies side by side


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    config = SimulationConfig.model_validate({**CONFIG, "measured_from_s": 60})
    found = compare(config, generate(TRACE, seed=0), lambda *_: None)
    return {each.name: each for each in found.policies}


def test_the_joint_policy_spends_quality_and_saves_waiting(compared: dict[str, Any]) -> None:
    joint, alone = compared["joint"].figures, compared["replicas by token rate"].figures
    assert joint.slo_attainment > alone.slo_attainment + 0.01
    assert 0 < joint.quality_loss_mean < 2.95, "it pays by the token, and mostly at high τ"
    assert alone.quality_loss_mean == 0
    assert joint.replica_hours < compared["static, 8 replicas"].figures.replica_hours
    for name in ("ray", "knative", "knative, τ=0.95"):
        assert joint.slo_attainment > compared[name].figures.slo_attainment


def test_a_fixed_threshold_costs_its_loss(compared: dict[str, Any]) -> None:
    assert compared["knative, τ=0.95"].figures.quality_loss_mean == pytest.approx(1.7)


def test_static_replicas_are_there_from_the_start() -> None:
    trace = generate(TRACE.model_copy(update={"duration_s": 50}), seed=0)
    limits = {"min": 1, "max": 8, "initial": 1, "cold_start_s": 60}
    config = SimulationConfig.model_validate({**CONFIG, "replicas": limits})
    found = {each.name: each for each in compare(config, trace, lambda *_: None).policies}
    static = found["static, 8 replicas"]
    assert {sample.num_ready for sample in static.samples} == {8}
    assert (static.figures.slo_attainment, static.figures.replica_changes) == (1.0, 0)
    assert found["joint"].samples[0].num_ready == 1, "the others start as they are told to"


def test_the_picture_has_the_table_s_bound() -> None:
    trace = generate(TRACE.model_copy(update={"duration_s": 120}), seed=0)
    change = {"trace": {"multiply": 1.5}, "seeds": [0, 1], "replicas": {"min": 1, "max": 3}}
    found = compare(SimulationConfig.model_validate({**CONFIG, **change}), trace, lambda *_: None)
    hours = [each.replica_hours for each in found.bounds]
    losses = [each.quality_loss_mean for each in found.bounds]
    assert losses[0] != losses[1], "else this shows nothing"
    shown = np.asarray(picture_of(found).axes[-1].collections[-1].get_offsets())
    assert shown.tolist() == [pytest.approx([np.mean(hours), np.mean(losses)])]


def test_prompt_bound_load_spends_no_quality() -> None:
    trace = generate(
        TRACE.model_copy(
            update={"prompt": Lengths(mean=4000, max=8000), "output": Lengths(mean=10, max=50)}
        ),
        seed=0,
    )
    config = SimulationConfig.model_validate(CONFIG)
    joint = compare(config, trace, lambda *_: None).policies[0].figures
    assert joint.quality_loss_mean <= 0.1


BURSTS = SyntheticTrace(
    duration_s=1800,
    mean_rate_per_s=0.4,
    spikes=tuple(Spike(at_s=at, for_s=15, times=80) for at in range(100, 1800, 200)),
    prompt=Lengths(mean=2000, sigma=0.3, max=4000),
    output=Lengths(mean=25, max=100),
)
"""A prompt-bound load of four or five replicas for 15 s, again and again; a start takes 60 s."""


def test_bursts_of_prompts_that_come_again_find_replicas() -> None:
    trace = generate(BURSTS, seed=0)
    found = dict[float, Figures]()
    for memory_s in (0.0, 1200.0):
        outer = {"burst_memory_s": memory_s}
        config = SimulationConfig.model_validate({**CONFIG, "outer": outer})
        (_, [(_, joint_policy)]), *_ = families(config)
        result = Simulation(trace, config.capacity, config.replicas, joint_policy()).run()
        found[memory_s] = figures_of(result, measured_from_s=0, objective_ttft_s=1.0)
    forgetful, joint = found.values()
    assert joint.slo_attainment > forgetful.slo_attainment + 0.2
    assert joint.quality_loss_mean <= 0.1


def test_figures_leave_out_what_came_early() -> None:
    trace = [TraceRequest(0.0, 0, 50), TraceRequest(0.5, 0, 1), TraceRequest(20.0, 0, 1)]
    figures = figures_of(simulate(trace), measured_from_s=10, objective_ttft_s=1.0)
    assert figures.slo_attainment == 1.0
    assert figures.ttft_p99_s == pytest.approx(0.11)


# What was possible


def work(
    *, at_s: float, seconds: float, replicas: float, prompts: float = 0.0
) -> list[TraceRequest]:
    """Requests that keep so many replicas of `BOUND_CAPACITY` busy for so long."""
    plain = BOUND_CAPACITY.tokens_per_s(AR)
    times = np.arange(at_s, at_s + seconds, 0.5)
    prompt = round(0.5 * prompts * BOUND_CAPACITY.prefill_tokens_per_s)
    output = round(0.5 * replicas * plain)
    return [TraceRequest(float(time), prompt, output) for time in times]


BOUND_CAPACITY = Capacity(linear_step_time(0.032, 128), (AR, Rung(0.9, 1.85, 3.0, 3)), 16, 20_000)
FAST = BOUND_CAPACITY.gain(BOUND_CAPACITY.rungs[1])


def bound(trace: list[TraceRequest], hours: float, initial: int = 1) -> Bound:
    limits = ReplicaSettings(min=1, max=4, initial=initial, cold_start_s=30)
    return clairvoyant(trace, BOUND_CAPACITY, limits, objective_s=1.0, max_replica_hours=hours)


def test_replicas_come_just_in_time() -> None:
    trace = work(at_s=0, seconds=100, replicas=0.9)
    trace += work(at_s=100, seconds=100, replicas=2.9) + work(at_s=200, seconds=100, replicas=0.9)
    best = bound(trace, hours=1.0)
    assert (best.served, best.quality_loss_mean) == (1.0, 0.0)
    assert best.num_replicas == [1] * 10 + [3] * 10 + [1] * 10
    assert best.replica_hours == pytest.approx((300 + 2 * 100 + 2 * 30) / 3600)


def test_fewer_hours_cost_quality() -> None:
    trace = work(at_s=0, seconds=300, replicas=2.4)
    whole, less = bound(trace, 1.0, initial=3), bound(trace, 0.2, initial=2)
    assert (whole.quality_loss_mean, whole.num_replicas) == (0.0, [3] * 30)
    assert less.num_replicas == [2] * 30
    # two replicas have to be 1.2 times as fast: a mixture of both rungs
    assert less.quality_loss_mean == pytest.approx(3.0 * 0.2 / (FAST - 1), rel=0.05)


def test_what_cannot_be_done_is_refused() -> None:
    best = bound(work(at_s=0, seconds=200, replicas=5 * FAST), 1.0, initial=4)
    assert best.served == pytest.approx(4 / 5, rel=0.02)
    assert best.quality_loss_mean == pytest.approx(3.0, rel=0.01)
    best = bound(work(at_s=0, seconds=200, replicas=0.1, prompts=4.5), 1.0, initial=4)
    assert best.served == pytest.approx(4.0 / 4.6, rel=0.02)
    assert bound(work(at_s=0, seconds=100, replicas=2.9), 1.0).served < 1.0, "one is there at first"


# The command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, config = tmp_path / "trace.csv", tmp_path / "config.yaml"
    write_trace(trace, generate(TRACE.model_copy(update={"duration_s": 120}), seed=0))
    config.write_text(yaml.safe_dump(CONFIG))
    out, picture = tmp_path / "out.json", tmp_path / "picture.png"
    command = ["simulate", str(config), "--trace", str(trace), "--set", "replicas.max=4"]
    assert run_command([*command, "--json", str(out), "--plot", str(picture)]) == 0
    assert "replica-hours" in capsys.readouterr().out
    written = json.loads(out.read_text())
    policies = written["policies"]
    assert set(written["clairvoyant"]) == {
        "slo_attainment",
        "quality_loss_mean",
        "replica_hours",
    }
    assert policies[0]["name"] == "joint"
    assert {"slo_attainment", "ttft_p50_s", "ttft_p99_s", "quality_loss_mean"} <= set(policies[0])
    assert set(policies[0]["by_class"]) == {"default"}
    assert {"replica_hours", "threshold_changes", "replica_changes", "rejected"} <= set(policies[0])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    assert run_command(["simulate", str(config)]) == 2
    assert "--trace: give a file" in capsys.readouterr().err
    synthetic = TRACE.model_copy(update={"duration_s": 60}).model_dump(mode="json")
    config.write_text(yaml.safe_dump({**CONFIG, "synthetic": synthetic}))
    assert run_command(["simulate", str(config)]) == 0
    assert "clairvoyant" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--plot", "x.odd", "x.odd names no format of pictures"),
        ("--plot", "nowhere/x.png", "there is no directory"),
        ("--json", "nowhere/x.json", "there is no directory"),
    ],
)
def test_files_that_cannot_be_written_are_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, file: str, message: str
) -> None:
    config = tmp_path / "config.yaml"
    synthetic = TRACE.model_copy(update={"duration_s": 60}).model_dump(mode="json")
    config.write_text(yaml.safe_dump({**CONFIG, "synthetic": synthetic}))
    assert run_command(["simulate", str(config), option, str(tmp_path / file)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {option}: ")
    assert message in output.err
    assert output.out == "", "nothing was simulated"


def test_the_command_with_several_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config, out = (tmp_path / name for name in ("trace.csv", "config.yaml", "out.json"))
    write_trace(trace, generate(TRACE.model_copy(update={"duration_s": 60}), seed=0))
    shares = {"priority": 0.2, "default": 0.5, "flex": 0.3}
    config.write_text(yaml.safe_dump({**CONFIG, "trace": {"classes": shares}, "seeds": [0, 1]}))
    command = ["simulate", str(config), "--trace", str(trace), "--json", str(out)]
    assert run_command(command) == 0
    assert capsys.readouterr().out.count("flex") >= 7, "a row for each policy"
    for policy in json.loads(out.read_text())["policies"]:
        assert list(policy["by_class"]) == ["priority", "default", "flex"]
        assert {"slo_attainment", "ttft_p99_s", "quality_loss_mean", "rejected"} <= set(
            policy["by_class"]["flex"]
        )
        assert policy["by_class"]["priority"]["quality_loss_mean"] == 0


# Where a replica's speed comes from


def checkpoint(path: Path) -> Path:
    """Weights and a frontier."""
    save_file({"embed.weight": torch.zeros(2, 3)}, path / "model.safetensors")
    measured = {"quality": 80.0, "quality_low": 79.0, "quality_high": 81.0}
    points = [
        {"mode": mode, "threshold": threshold, "tokens_per_forward": tokens,
         "positions_per_row": positions, **measured}
        for mode, threshold, tokens, positions in (
            ("ar", 1.0, 1.0, 1.0), ("exact", 1.0, 1.9, 16.0), ("threshold", 0.95, 1.7, 4.7)
        )
    ]  # fmt: skip
    content = {
        "weights": weights_fingerprint(path),
        "hardware": "one H200",
        "dtype": "bfloat16",
        "measure": "accuracy",
        "num_items": 500,
        "window": 3,
        "step_seconds": {
            "positions": [1.0, 256.0],
            "stored": [0.0, 8192.0],
            "seconds": [[0.01, 0.02], [0.03, 0.04]],
        },
        "prefill_tokens_per_s": 5000.0,
        "points": points,
    }
    write_frontier(path, build_settings(content, Frontier, source="test"))
    return path


def test_a_calibrated_model_can_be_simulated(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    config = {"frontier_file": path, "slots_per_replica": 8, "mean_stored_tokens": 1024}
    capacity = SimulationConfig.model_validate(config).capacity
    assert capacity.step_time.at(1) == pytest.approx(0.02)
    assert (capacity.max_num_seqs, capacity.prefill_tokens_per_s) == (8, 5000.0)
    assert [rung.threshold for rung in capacity.rungs] == [1.0, 0.95]
    assert capacity.exact is not None
    assert capacity.exact.positions == 16.0
    (served,) = simulate([TraceRequest(0.0, 500, 3)], capacity).served
    assert served.ttft_s == pytest.approx(0.1 + 0.02)


def test_a_made_up_mode_exact() -> None:
    exact = {"tokens_per_forward": 1.9, "positions_per_row": 16}
    capacity = SimulationConfig.model_validate({**CONFIG, "exact": exact}).capacity
    assert capacity.exact == Rung(1.0, 1.9, 0.0, positions_per_row=16)
    assert SimulationConfig.model_validate(CONFIG).capacity.exact is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots_per_replica": 8}, "frontier.json: cannot be read"),
        ({"step_time": CONFIG["step_time"]}, "step_time: frontier_file says it already"),
        ({"exact": {"tokens_per_forward": 2, "positions_per_row": 9}}, "exact: frontier_file says"),
        ({"num_masks": 3}, "num_masks: frontier_file says it already"),
        ({"frontier_file": None}, "step_time: give it, or frontier_file"),
        ({"frontier_file": None, **CONFIG, "mean_stored_tokens": 9}, "mean_stored_tokens: it belo"),
    ],
)
def test_there_is_one_source_of_speed(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config = tmp_path / "trace.csv", tmp_path / "config.yaml"
    write_trace(trace, [TraceRequest(0.0, 1, 1)])
    given = {"frontier_file": str(tmp_path), "slots_per_replica": 16, **change}
    config.write_text(yaml.safe_dump(given))
    assert run_command(["simulate", str(config), "--trace", str(trace)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frontier": CONFIG["frontier"][1:]}, "threshold 1 must be there"),
        ({"frontier": [*CONFIG["frontier"], CONFIG["frontier"][1]]}, "is there twice"),
        ({"rivals": {"static_threshold": 0.5}}, "rivals.static_threshold"),
        ({"replicas": {"min": 5, "max": 4}}, "min is above max"),
        ({"slots": 3}, "slots"),
        ({"seeds": []}, "seeds: Tuple should have at least 1 item"),
        ({"seeds": [0, -1]}, "seeds.1: Input should be greater than or equal to 0"),
        ({"measured_from_s": 10}, "measured_from_s: 10 is later than the trace's last request"),
    ],
)
def test_mistakes_in_the_config(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config = tmp_path / "trace.csv", tmp_path / "config.yaml"
    write_trace(trace, [TraceRequest(0.0, 1, 1)])
    config.write_text(yaml.safe_dump({**CONFIG, **change}))
    assert run_command(["simulate", str(config), "--trace", str(trace)]) == 2
    assert message in capsys.readouterr().err
