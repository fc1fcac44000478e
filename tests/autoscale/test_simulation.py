from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mars_autoscale.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.simulation.bound import Bound, clairvoyant
from mars_autoscale.simulation.compare import compare, figures_of
from mars_autoscale.simulation.config import SimulationConfig
from mars_autoscale.simulation.policies import StaticReplicas, Target
from mars_autoscale.simulation.run import ClusterSettings, Result, Simulation
from mars_autoscale.synthetic import Lengths, Spike, SyntheticTrace, generate
from mars_autoscale.traces import TraceRequest, write_trace
from mars_platform.cli import run as run_command

AR = Rung(1.0, 1.0, 0.0)
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
    cluster = ClusterSettings(max_replicas=max(replicas, 1), initial_replicas=replicas)
    return Simulation(trace, capacity, cluster, StaticReplicas(replicas, rung)).run()


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
    capacity = SimulationConfig.model_validate(CONFIG).capacity()
    result = simulate(trace, capacity, replicas=8)
    assert [each.request for each in result.served] == trace
    assert all(0 < each.ttft_s < np.inf for each in result.served)
    assert result.replica_seconds == pytest.approx(8 * trace[-1].arrival_s)


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
    cluster = ClusterSettings(max_replicas=4, initial_replicas=1, cold_start_s=20)
    result = Simulation(trace, ONE_SLOT, cluster, policy).run()
    states = {time: (ready, starting) for time, ready, starting in policy.seen}
    assert (states[10.0], states[11.0], states[29.0]) == ((1, 0), (1, 2), (1, 2))
    assert (states[31.0], states[50.0], states[51.0]) == ((3, 0), (3, 0), (1, 0))
    assert result.replica_seconds == pytest.approx(100 + 2 * 40, abs=0.2)
    assert result.num_replica_changes == 2


def test_those_that_still_start_are_ended_first() -> None:
    trace = [TraceRequest(float(i), 0, 1) for i in range(61)]
    policy = Steps({0.0: 2, 5.0: 3, 15.0: 2})
    cluster = ClusterSettings(max_replicas=4, initial_replicas=2, cold_start_s=20)
    result = Simulation(trace, ONE_SLOT, cluster, policy).run()
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


def test_figures_leave_out_what_came_early() -> None:
    trace = [TraceRequest(0.0, 0, 50), TraceRequest(0.5, 0, 1), TraceRequest(20.0, 0, 1)]
    config = SimulationConfig.model_validate({**CONFIG, "measured_from_s": 10})
    figures = figures_of(simulate(trace), config)
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


def bound(trace: list[TraceRequest], hours: float, **limits: float) -> Bound:
    cluster = ClusterSettings.model_validate(
        {"min_replicas": 1, "max_replicas": 4, "cold_start_s": 30, **limits}
    )
    return clairvoyant(trace, BOUND_CAPACITY, cluster, objective_s=1.0, max_replica_hours=hours)


def test_replicas_come_just_in_time() -> None:
    trace = work(at_s=0, seconds=100, replicas=0.9)
    trace += work(at_s=100, seconds=100, replicas=2.9) + work(at_s=200, seconds=100, replicas=0.9)
    best = bound(trace, hours=1.0)
    assert best.quality_loss_mean == 0.0
    assert best.num_replicas == [1] * 10 + [3] * 10 + [1] * 10
    assert best.replica_hours == pytest.approx((300 + 2 * 100 + 2 * 30) / 3600)


def test_fewer_hours_cost_quality() -> None:
    trace = work(at_s=0, seconds=300, replicas=2.4)
    whole, less = bound(trace, 1.0, initial_replicas=3), bound(trace, 0.2, initial_replicas=2)
    assert (whole.quality_loss_mean, whole.num_replicas) == (0.0, [3] * 30)
    assert less.num_replicas == [2] * 30
    # two replicas have to be 1.2 times as fast: a mixture of both rungs
    assert less.quality_loss_mean == pytest.approx(3.0 * 0.2 / (FAST - 1), rel=0.05)


def test_what_cannot_be_done_is_infinite() -> None:
    assert bound(work(at_s=0, seconds=50, replicas=6.0), 1.0).quality_loss_mean == np.inf
    prompts = work(at_s=0, seconds=50, replicas=0.1, prompts=4.5)
    assert bound(prompts, 1.0, initial_replicas=4).quality_loss_mean == np.inf


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
    assert set(written["clairvoyant"]) == {"quality_loss_mean", "replica_hours"}
    assert policies[0]["name"] == "joint"
    assert {"slo_attainment", "ttft_p50_s", "ttft_p99_s", "quality_loss_mean"} <= set(policies[0])
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
    ("change", "message"),
    [
        ({"frontier": CONFIG["frontier"][1:]}, "threshold 1 must be there"),
        ({"frontier": [*CONFIG["frontier"], CONFIG["frontier"][1]]}, "is there twice"),
        ({"rivals": {"static_threshold": 0.5}}, "rivals.static_threshold"),
        ({"replicas": {"min": 5, "max": 4}}, "min is above max"),
        ({"slots": 3}, "slots"),
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
