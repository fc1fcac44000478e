import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from frontiers import AR as AR_POINT
from frontiers import frontier_of, point
from ladders import exact_rung
from mars_autoscale.model.frontier import write_frontier
from mars_autoscale.simulation.compare import compare, processes
from mars_autoscale.simulation.config import SimulationConfig, families
from mars_autoscale.simulation.figures import figures_of
from mars_autoscale.simulation.report import picture_of
from mars_autoscale.simulation.run import Simulation
from mars_autoscale.traces.files import TraceRequest
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
from mars_platform.config import load_settings
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from trace_files import write_trace

CONFIG = {
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
    "rivals": {"ray_targets": [10.0], "keda_token_shares": [0.8]},
}
TRACE = SyntheticTrace(
    duration_s=500,
    mean_rate_per_s=5.0,
    spikes=(Spike(at_s=250, for_s=60, times=2.6),),
    prompt=Lengths(mean=300, sigma=0.5, max=2000),
    output=Lengths(mean=150, sigma=0.5, max=1000),
)


def config_of(**changes):
    return SimulationConfig.model_validate({**CONFIG, **changes})


def trace_of(**changes):
    return generate(TRACE.model_copy(update=changes), seed=0)


def compared(config, trace):
    return compare(config, trace, lambda *_: None)


def simulate_joint(trace, config):
    (_, [(_, joint_policy)]), *_ = families(config)
    result = Simulation(trace, config.capacity, config.replicas, joint_policy()).run()
    return figures_of(result, measured_from_s=0, objective_ttft_s=1.0)


@pytest.fixture(scope="module")
def comparison():
    return compared(config_of(measured_from_s=60), trace_of())


@pytest.fixture(scope="module")
def policies(comparison):
    return {each.name: each.figures for each in comparison.policies}


def test_the_joint_policy_trades_quality_for_waiting(policies):
    floors = {"floor_threshold": 1.0, "flex_floor_threshold": 1.0}
    alone = simulate_joint(trace_of(), config_of(outer=floors))
    joint = policies["joint"]
    assert joint.slo_attainment > alone.slo_attainment + 0.01
    assert 0 < joint.quality_loss_mean < 2.95, "it pays by the token, and mostly at high τ"
    assert alone.quality_loss_mean == 0
    assert joint.replica_hours < policies["static, 8 replicas"].replica_hours
    for name in ("ray", "ray, τ=0.95", "keda"):
        assert joint.slo_attainment > policies[name].slo_attainment


def test_a_fixed_threshold_costs_its_loss(policies):
    assert policies["ray, τ=0.95"].quality_loss_mean == pytest.approx(1.7)


def test_of_each_rival_the_best_variant_within_the_joint_policys_hours_is_shown():
    rivals = {"ray_targets": [2.0, 10.0, 40.0]}
    joint, _, ray, *_ = compared(config_of(rivals=rivals), trace_of(duration_s=300)).policies
    assert ray.variant == "target 10", "target 2 takes more hours, and 40 is later"
    assert ray.figures.replica_hours <= 1.01 * joint.figures.replica_hours


def test_rivals_may_use_mode_exact():
    exact = {"tokens_per_forward": 2.2, "positions_per_row": 5}
    without, found = (dict(families(config_of(**each))) for each in ({}, {"exact": exact}))
    assert list(found) == ["joint", "static, 8 replicas", "ray", "ray, τ=0.95", "keda"]
    assert [name for name, _ in found["static, 8 replicas"]] == ["", "exact"]
    assert [name for name, _ in found["ray"]] == ["target 10", "target 10, exact"]
    assert len(found["keda"]) == 2 * len(without["keda"])


def test_runs_in_processes_have_the_same_outcomes():
    config, trace = config_of(), trace_of(duration_s=20)
    (_, [(_, make)]), *_ = families(config)
    task = (config, trace, make, 0)  # each further task would start a process
    with processes(is_long=True) as run_all:
        outcomes = list(run_all([task]))
    with processes(is_long=False) as run_all:
        assert outcomes == list(run_all([task]))


def test_static_replicas_are_there_from_the_start():
    limits = {"min": 1, "max": 8, "initial": 1, "cold_start_s": 60}
    found = compared(config_of(replicas=limits), trace_of(duration_s=50)).policies
    by_name = {each.name: each for each in found}
    static = by_name["static, 8 replicas"]
    assert {sample.num_ready for sample in static.samples} == {8}
    assert (static.figures.slo_attainment, static.figures.replica_changes) == (1.0, 0)
    assert by_name["joint"].samples[0].num_ready == 1, "other policies start as configured"


def test_the_picture_shows_the_loss_and_the_hours_of_every_policy(comparison):
    points = [each.get_offsets().tolist() for each in picture_of(comparison).axes[-1].collections]
    figures = [each.figures for each in comparison.policies]
    assert points == [[[each.replica_hours, each.quality_loss_mean]] for each in figures]


def test_the_joint_policy_keeps_tiers_apart():
    shares = {Tier.PRIORITY: 0.2, Tier.DEFAULT: 0.5, Tier.FLEX: 0.3}
    trace = changed(trace_of(), TraceChange(classes=shares), seed=0)
    joint = simulate_joint(trace, config_of(replicas={"min": 1, "max": 4}))
    priority, default, flex = (joint.by_class[tier] for tier in Tier)
    assert priority.quality_loss_mean == 0.0
    assert 0.0 < default.quality_loss_mean < 2.95
    assert default.quality_loss_mean < flex.quality_loss_mean < 12.6
    assert priority.slo_attainment >= default.slo_attainment > flex.slo_attainment
    assert flex.rejected >= default.rejected >= priority.rejected == 0


# The command


def run_simulate(tmp_path, config, *options, trace=None):
    """Run ``marsray simulate``; returns its exit code."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    if trace is not None:
        write_trace(tmp_path / "trace.csv", trace)
        options = ("--trace", str(tmp_path / "trace.csv"), *options)
    return run_command(["simulate", str(file), *options])


def synthetic(**changes):
    return TRACE.model_copy(update=changes).model_dump(mode="json")


def test_the_command_writes_table_figures_and_picture(tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "picture.png"
    options = ["--set", "replicas.max=4", "--json", str(out), "--plot", str(picture)]
    assert run_simulate(tmp_path, CONFIG, *options, trace=trace_of(duration_s=20)) == 0
    assert "replica-hours" in capsys.readouterr().out
    written = json.loads(out.read_text())
    joint = written["policies"][0]
    assert joint["name"] == "joint"
    assert {
        "slo_attainment",
        "ttft_p50_s",
        "ttft_p99_s",
        "quality_loss_mean",
        "replica_hours",
        "threshold_changes",
        "replica_changes",
        "rejected",
    } <= set(joint)
    assert set(joint["by_class"]) == {"default"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_needs_a_trace_or_a_synthetic_one(tmp_path, capsys):
    assert run_simulate(tmp_path, CONFIG) == 2
    assert "--trace: give a file" in capsys.readouterr().err
    assert run_simulate(tmp_path, {**CONFIG, "synthetic": synthetic(duration_s=9)}) == 0
    assert "keda" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--plot", "x.odd", "x.odd names no format of pictures"),
        ("--plot", "nowhere/x.png", "there is no directory"),
        ("--json", "nowhere/x.json", "there is no directory"),
    ],
)
def test_files_that_cannot_be_written_are_refused_first(tmp_path, capsys, option, file, message):
    config = {**CONFIG, "synthetic": synthetic(duration_s=60)}
    assert run_simulate(tmp_path, config, option, str(tmp_path / file)) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {option}: ")
    assert message in output.err
    assert output.out == "", "nothing was simulated"


def test_the_command_shows_each_tier_of_a_trace(tmp_path, capsys):
    shares = {"priority": 0.2, "default": 0.5, "flex": 0.3}
    config = {**CONFIG, "trace": {"classes": shares}, "seeds": [0, 1]}
    out = tmp_path / "out.json"
    options = ["--json", str(out)]
    assert run_simulate(tmp_path, config, *options, trace=trace_of(duration_s=20)) == 0
    assert capsys.readouterr().out.count("flex") == 5, "a row for each policy"
    for policy in json.loads(out.read_text())["policies"]:
        by_tier = policy["by_class"]
        assert list(by_tier) == ["priority", "default", "flex"]
        assert {"slo_attainment", "ttft_p99_s", "quality_loss_mean", "rejected"} <= set(
            by_tier["flex"]
        )
        assert by_tier["priority"]["quality_loss_mean"] == 0


# The configuration


@pytest.mark.parametrize("name", ["simulate", "exact", "code", "mooncake"])
def test_the_benchmarks_configurations_are_valid(name):
    file = Path(__file__).parents[3] / f"bench/autoscaling/{name}.yaml"
    config = load_settings(file, SimulationConfig, [])
    assert f"marsray simulate bench/autoscaling/{name}.yaml --trace" in file.read_text()
    modes = {rung.mode for rung in config.capacity.rungs}
    assert (Mode.EXACT in modes) is (name == "exact")


def test_a_calibrated_model_can_be_simulated(tmp_path):
    save_file({"embed.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    frontier = frontier_of(
        AR_POINT,
        point("exact", 1.0, 80.0, 1.9, 16.0),
        point("threshold", 0.95, 80.0, 1.7, 4.7),
        weights=weights_fingerprint(tmp_path),
        seconds=((0.01, 0.02), (0.03, 0.04)),
        prefill_tokens_per_s=5000.0,
    )
    write_frontier(tmp_path, frontier)
    config = {"frontier_file": tmp_path, "slots_per_replica": 8, "mean_stored_tokens": 125}
    capacity = SimulationConfig.model_validate(config).capacity
    assert capacity.step_time.at(0) == pytest.approx(0.02), "at 1000 cached tokens"
    assert (capacity.max_num_seqs, capacity.prefill_tokens_per_s) == (8, 5000.0)
    assert [rung.threshold for rung in capacity.rungs] == [1.0, 1.0, 0.95]
    assert capacity.rung(Mode.EXACT, 1.0).windows[0].positions == 16.0


def test_mode_exact_can_be_made_up():
    exact = {"tokens_per_forward": 1.9, "positions_per_row": 16}
    assert exact_rung(1.9, 16) in config_of(exact=exact).capacity.rungs
    assert {rung.mode for rung in config_of().capacity.rungs} == {Mode.AR, Mode.THRESHOLD}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots_per_replica": 8}, "frontier.json: cannot be read"),
        ({"step_time": CONFIG["step_time"]}, "step_time: frontier_file says it already"),
        ({"exact": {"tokens_per_forward": 2, "positions_per_row": 9}}, "exact: frontier_file says"),
        ({"num_masks": 3}, "num_masks: frontier_file says it already"),
        ({"frontier_file": None}, "step_time: give it, or frontier_file"),
        ({"frontier_file": None, **CONFIG, "mean_stored_tokens": 9}, "mean_stored_tokens: it belo"),
        ({**CONFIG, "frontier": CONFIG["frontier"][1:]}, "threshold 1 must be there"),
        ({**CONFIG, "frontier": [*CONFIG["frontier"], CONFIG["frontier"][1]]}, "is there twice"),
        ({**CONFIG, "rivals": {"static_threshold": 0.5}}, "rivals.static_threshold"),
        ({**CONFIG, "replicas": {"min": 5, "max": 4}}, "min is above max"),
        ({**CONFIG, "slots": 3}, "slots"),
        ({**CONFIG, "rivals": {"knative_targets": [8]}}, "known keys: ray_targets, static_thresho"),
        ({**CONFIG, "seeds": []}, "seeds: Tuple should have at least 1 item"),
        ({**CONFIG, "seeds": [0, -1]}, "seeds.1: Input should be greater than or equal to 0"),
        ({**CONFIG, "measured_from_s": 10}, "measured_from_s: 10 is later than the trace's last"),
    ],
)
def test_a_mistake_in_the_config_is_named(change, message, tmp_path, capsys):
    base = {} if "frontier" in change else {"frontier_file": str(tmp_path), "slots_per_replica": 16}
    assert run_simulate(tmp_path, {**base, **change}, trace=[TraceRequest(0.0, 1, 1)]) == 2
    assert message in capsys.readouterr().err
