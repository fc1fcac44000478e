"""Measures autoscaling of a live server beside Ray Serve's own policy, and beside the simulator.

    python -m bench.autoscaling.run burst MODEL --data eval.jsonl --json out.json
    python -m bench.autoscaling.run check MODEL --data eval.jsonl --json out.json

The model needs a frontier.json. Its points are kept, and its step times are replaced by those of a
larger model, `t0 * (1 + positions / K)`. Replicas then wait for most of the time, so that several
of them share a small machine as if each had its own. Each replica also has a cold start. A run
whose computing took half of the paced time, or whose sender was late, is shown but does not count.

`burst` replays a trace with a multiple of its load for a minute. In each round every policy gets a
server of its own, in rotating order. Ray Serve's delays are its defaults, 30 s up and 600 s down.
`check` replays a smooth trace with two bursts against the joint policy, and then simulates the same
requests with their real lengths.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from bench.autoscaling.live import (
    NUM_WARM_UP,
    OBJECTIVE_TTFT_S,
    Bench,
    Contender,
    Pace,
    Run,
    paced_copy,
    run,
)
from bench.autoscaling.watch import replica_s
from rich.console import Console

from mars_autoscale.model.frontier import Frontier
from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.simulation import figures as simulated_figures
from mars_autoscale.simulation.policies import Joint
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.run import Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import Lengths, Spike, SyntheticTrace, generate
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.cli.report import Column, figure_column, output_console, table_of, write_json
from mars_platform.data.conversations import parse_conversation
from mars_serve.bench.load.figures import client_figures
from mars_serve.bench.load.report import figures_json, lateness_warning

_JOINT = Contender("joint", "joint", 1.0)
_CONTENDERS = (
    _JOINT,
    Contender("Ray Serve, ar", "ongoing_requests", 1.0),
    Contender("Ray Serve, exact", "ongoing_requests", 1.0, "exact"),
    Contender("Ray Serve, τ = .95", "ongoing_requests", 0.95),
)
_NAMES = tuple(each.name for each in _CONTENDERS)
_NUM_SIZED = 200
"""Number of conversations from which the mean output length is estimated."""
_SPECS = {"attainment": ".1%", "burst_attainment": ".1%", "accuracy": ".1%", "threshold": ".3f"}


@dataclass(frozen=True)
class Figures:
    """Figures of a server's or a simulator's run; None if there is nothing to measure."""

    attainment: float | None
    """Share of requests whose first token came within the objective."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    """Infinite if one request in a hundred was not served."""
    threshold: float | None
    """Mean of the live τ over time and replicas."""
    replica_s: float
    """Replica-seconds during the trace, counted from each replica's order to its end."""
    ready_replica_s: float | None = None
    burst_attainment: float | None = None
    """The share in time of the requests that were sent during the last burst."""
    accuracy: float | None = None
    """Share of right answers among those."""
    rejected: int = 0


def live_figures(done: Run, burst: Spike, duration_s: float) -> Figures:
    """Return the figures of a server's run, and those of the requests of ``burst``.

    Replicas are counted until ``duration_s``, the end of the trace.
    """
    figures, end_s = done.load.figures, burst.at_s + burst.for_s
    inside = [each for each in done.load.replayed.sent if burst.at_s <= each.sent_s < end_s]
    burst_figures = client_figures(inside, OBJECTIVE_TTFT_S, figures.duration_s)
    live = [each.live_threshold for each in figures.samples if each.live_threshold is not None]
    billed, ready = (
        replica_s(done.seen, numbers, done.began_s, done.began_s + duration_s)
        for numbers in (
            [each.num_billed for each in done.seen],
            [each.num_ready for each in done.seen],
        )
    )
    return Figures(
        figures.all.slo_attainment,
        figures.all.ttft_p50_s,
        figures.all.ttft_p99_s,
        fmean(live) if live else None,
        billed,
        ready,
        burst_figures.slo_attainment,
        burst_figures.accuracy.value if burst_figures.accuracy else None,
        figures.all.rejected,
    )


def problems(done: Run) -> list[str]:
    """Return the reasons for which a run does not count; none if it counts."""
    found = [lateness_warning(done.load.figures)]
    found.append("computing took too much of the paced time" if done.is_too_slow else None)
    failed = done.load.figures.all.failed
    found.append(f"{failed} requests failed" if failed else None)
    return [each for each in found if each]


def simulate(done: Run, bench: Bench, frontier: Frontier) -> Figures:
    """Simulate the requests that a server got, as they were sent, under the joint policy.

    Requests that were not served get the mean length.
    """
    settings = bench.settings(_JOINT)
    autoscaling, tiers = settings.autoscaling, settings.tiers
    assert autoscaling is not None, "the model is autoscaled"
    floors = {
        "floor_threshold": max(autoscaling.floor_threshold, tiers.default_min_threshold),
        "flex_floor_threshold": max(autoscaling.flex_floor_threshold, tiers.flex_min_threshold),
    }
    outer = autoscaling.model_copy(update=floors)
    replicas = ReplicaSettings(
        min=1, max=outer.max_replicas, initial=1, cold_start_s=outer.cold_start_s
    )
    sent = done.load.replayed.sent
    usual = round(fmean(each.num_tokens for each in sent if each.num_tokens))
    trace = [
        TraceRequest(
            each.sent_s, each.request.prompt_tokens, each.num_tokens or usual, each.request.tier
        )
        for each in sent
    ]
    capacity = frontier.capacity(bench.max_num_seqs)
    result = Simulation(
        trace,
        capacity,
        replicas,
        Joint(capacity, outer, outer.inner),
        objective_ttft_s=OBJECTIVE_TTFT_S,
        lengths=counts_of([usual] * NUM_WARM_UP, num_begun=NUM_WARM_UP),
        begin_s=-10.0,  # the server was idle while the load test started
    ).run()
    found = simulated_figures.figures_of(
        result, measured_from_s=0.0, objective_ttft_s=OBJECTIVE_TTFT_S
    )
    return Figures(
        found.slo_attainment,
        found.ttft_p50_s,
        found.ttft_p99_s,
        fmean(each.threshold for each in result.samples),
        result.replica_seconds,
        rejected=round(found.rejected),
    )


def mean_output_tokens(model: Path, data: Path) -> float:
    """Return the mean length in tokens of the data's answers, which a model trained on them has."""
    tokenizer = read_checkpoint(str(model)).tokenizer
    with data.open(encoding="utf-8") as file:
        talks = [parse_conversation(line) for line in islice(file, _NUM_SIZED)]
    answers = [talk.messages[-1].content for talk in talks]
    return fmean(len(tokenizer.encode(each, add_special_tokens=False)) + 1 for each in answers)


def trace_of(
    rate_per_s: float, spikes: Sequence[Spike], duration_s: float, seed: int
) -> list[TraceRequest]:
    """Return a trace; its lengths are not used, since prompts and outputs have their own."""
    length = Lengths(mean=1, max=1)
    settings = SyntheticTrace(
        duration_s=duration_s,
        mean_rate_per_s=rate_per_s,
        spikes=tuple(spikes),
        prompt=length,
        output=length,
    )
    return generate(settings, seed)


def print_figures(rows: dict[str, list[Figures]], title: str) -> None:
    """Print the median over the rounds of each figure, with its least and largest value."""
    columns = [
        figure_column(name.replace("_", " "), lambda row, n=name: _cell(row[1], n))
        for name in (each.name for each in fields(Figures))
    ]
    columns.insert(0, Column("", lambda row: row[0]))
    output_console(160).print(table_of(columns, rows.items(), title=title))


def _cell(found: Sequence[Figures], name: str) -> str | None:
    values = [value for each in found if (value := getattr(each, name)) is not None]
    if not values:
        return None
    spec = _SPECS.get(name, ".2f" if name.startswith("ttft") else ".0f")
    middle, low, high = (f"{each:{spec}}" for each in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("command", choices=["burst", "check"])
    add("model", type=Path, help="checkpoint directory with frontier.json")
    add("--data", type=Path, required=True, help="conversations, JSONL, with answers to check")
    add("--rounds", type=int, default=3, help="number of rounds")
    add("--seconds", type=float, default=330, help="length of a run")
    add("--times", type=float, default=5, help="load of the burst over that outside")
    add("--policy", action="append", choices=_NAMES, help="policy of burst; by default all")
    add("--no-exact", action="store_true", help="leave mode exact out of the frontier")
    add("--t0-s", type=float, default=0.05, help="seconds of a step without positions")
    add("--positions-to-double", type=float, default=128, help="positions that double the time")
    add("--prefill", type=float, default=20_000, help="prompt tokens per second")
    add("--slots", type=int, default=8, help="most requests of a replica")
    add("--max-replicas", type=int, default=3, help="most replicas")
    add("--busy", type=float, default=0.55, help="load outside bursts, in replicas at τ = 1")
    add("--cold-start-s", type=float, default=30, help="seconds from order to service")
    add("--max-tokens", type=int, default=100, help="most output tokens of a request")
    add("--json", type=Path, help="JSON file for every run")
    add("--log", type=Path, default=Path("autoscaling.log"), help="file for the servers' output")
    return parser


def main() -> None:
    """Replay the rounds of a command, and print its table."""
    chosen, console = _parser().parse_args(), Console(stderr=True)
    is_check, seconds = chosen.command == "check", chosen.seconds
    length_s = min(60.0, 0.2 * seconds)
    spikes = [Spike(at_s=0.12 * seconds, for_s=length_s, times=chosen.times)]
    if is_check:
        spikes = [Spike(at_s=0.15 * seconds, for_s=length_s, times=2.5), *spikes]
        spikes[1] = spikes[1].model_copy(update={"at_s": 0.5 * seconds})
    names = ["joint"] if is_check else chosen.policy or _NAMES
    contenders = [each for each in _CONTENDERS if each.name in names]
    found, runs = defaultdict[str, list[Figures]](list), list[dict[str, object]]()
    with tempfile.TemporaryDirectory(prefix="autoscaling-") as directory:
        work, model = Path(directory), chosen.model.resolve()
        pace = Pace(chosen.t0_s, chosen.positions_to_double, chosen.prefill)
        frontier = paced_copy(model, work / "model", pace, exact=not chosen.no_exact)
        bench = Bench(
            work / "model", chosen.data.resolve(), chosen.slots, chosen.max_replicas,
            chosen.cold_start_s, chosen.max_tokens, chosen.log.resolve(),
        )  # fmt: skip
        capacity = frontier.capacity(bench.max_num_seqs)
        rate_per_s = capacity.tokens_per_s(capacity.base()) / mean_output_tokens(model, bench.data)
        rate_per_s *= chosen.busy
        for number in range(chosen.rounds):
            start = number % len(contenders)
            trace = trace_of(rate_per_s, spikes, seconds, seed=number)
            for contender in contenders[start:] + contenders[:start]:
                done = run(bench, contender, trace, work)
                figures = {contender.name: live_figures(done, spikes[-1], seconds)}
                if is_check:
                    figures["simulator"] = simulate(done, bench, frontier)
                for name, each in figures.items():
                    found[name].append(each)
                console.print(f"round {number + 1}, {figures}", soft_wrap=True)
                for problem in problems(done):
                    console.print(f"it does not count: {problem}", style="bold red")
                told = {"round": number, "figures": figures, "seen": done.seen}
                runs.append(told | {"load": figures_json(done.load)})
                if chosen.json is not None:
                    write_json(chosen.json, {"options": vars(chosen), "runs": runs})
    print_figures(found, f"{chosen.rounds} rounds at {rate_per_s:.2f} requests a second outside")


if __name__ == "__main__":
    main()
