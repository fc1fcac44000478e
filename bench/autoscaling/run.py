"""Measures autoscaling of a live server beside Ray Serve's own policy, and beside the simulator.

    python -m bench.autoscaling.run burst MODEL --data eval.jsonl --plot burst.svg --json out.json
    python -m bench.autoscaling.run check MODEL --data eval.jsonl --plot check.svg

The model needs a frontier.json. Its points are kept, and its step times are replaced by those of a
larger model, `t0 * (1 + positions / K)`. Replicas then wait for most of the time, so that several
of them share a small machine as if each had its own. Each replica also has a cold start. A run
whose computing took half of the paced time, or whose sender was late, is shown but does not count.

`burst` replays a trace with a multiple of its load for a minute. In each round every policy gets a
server of its own, in rotating order. Ray Serve's delays are its defaults, 30 s up and 600 s down.
`check` replays a smooth trace with two bursts against the joint policy, and then simulates the same
requests with their real lengths.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from bench.autoscaling.check import Side, draw_check, live_side, simulate, simulated_side
from bench.autoscaling.figures import (
    Figures,
    Window,
    draw_burst,
    figures_of,
    finite,
    json_of,
    table_of,
)
from bench.autoscaling.live import (
    Bench,
    Cluster,
    Contender,
    Pace,
    Run,
    mean_output_tokens,
    paced_copy,
    run,
)
from rich.console import Console
from rich.table import Table

from mars_autoscale.model.frontier import Frontier
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import Lengths, Spike, SyntheticTrace, generate

_JOINT = Contender("joint", "joint", 1.0)
_CONTENDERS = (
    _JOINT,
    Contender("Ray Serve, ar", "ongoing_requests", 1.0),
    Contender("Ray Serve, exact", "ongoing_requests", 1.0, "exact"),
    Contender("Ray Serve, τ = .95", "ongoing_requests", 0.95),
)
_NAMES = tuple(each.name for each in _CONTENDERS)
_WIDTH = 160


@dataclass(frozen=True)
class Stage:
    """A bench that is ready to run, with its frontier and its load."""

    bench: Bench
    frontier: Frontier
    rate_per_s: float
    """Requests per second outside of bursts."""
    work: Path
    console: Console

    def run(
        self, contender: Contender, number: int, spikes: Sequence[Spike], duration_s: float
    ) -> tuple[Run, Figures]:
        """Replay a trace whose seed is the round's number; its last spike is the burst."""
        trace = self._trace(spikes, duration_s, number)
        done = run(self.bench, contender, trace, number, self.work)
        figures = figures_of(done, _window(spikes[-1]), duration_s)
        self.console.print(f"round {number + 1}, {contender.name}: {figures}", soft_wrap=True)
        for problem in figures.problems():
            self.console.print(f"it does not count: {problem}", style="bold red")
        return done, figures

    def _trace(self, spikes: Sequence[Spike], duration_s: float, seed: int) -> list[TraceRequest]:
        """Return a trace; its lengths are not used, since prompts and outputs have their own."""
        length = Lengths(mean=1, max=1)
        settings = SyntheticTrace(
            duration_s=duration_s,
            mean_rate_per_s=self.rate_per_s,
            spikes=tuple(spikes),
            prompt=length,
            output=length,
        )
        return generate(settings, seed)

    def write(self, file: Path | None, content: dict[str, Any]) -> None:
        """Write results to a file, together with the setting in which they were measured."""
        if file is None:
            return
        told = {
            "hardware": self.frontier.hardware,
            "points": [f"{each.mode} {each.threshold:g}" for each in self.frontier.points],
            "rate_per_s": self.rate_per_s,
            **asdict(self.bench.cluster),
        }
        file.write_text(json.dumps({"setting": told, **content}, indent=1) + "\n", "utf-8")


def _stage(arguments: argparse.Namespace, work: Path, console: Console) -> Stage:
    pace = Pace(arguments.t0_s, arguments.positions_to_double, arguments.prefill)
    model, data = arguments.model.resolve(), arguments.data.resolve()
    frontier = paced_copy(model, work / "model", pace, exact=not arguments.no_exact)
    cluster = Cluster(arguments.max_num_seqs, arguments.max_replicas, arguments.cold_start_s)
    capacity = frontier.capacity(cluster.max_num_seqs)
    mean_output = mean_output_tokens(model, data)
    rate = arguments.busy * capacity.tokens_per_s(capacity.base()) / mean_output
    console.print(
        f"{rate:.2f} requests a second, of {mean_output:.1f} tokens by the data's answers"
    )
    bench = Bench(work / "model", data, cluster, arguments.max_tokens, arguments.log.resolve())
    return Stage(bench, frontier, rate, work, console)


def burst(arguments: argparse.Namespace, stage: Stage) -> Table:
    """Run each policy in each round."""
    figures, runs = defaultdict[str, list[Figures]](list), list[dict[str, Any]]()
    spike = Spike(at_s=40, for_s=60, times=arguments.times)
    chosen = [each for each in _CONTENDERS if each.name in (arguments.policy or _NAMES)]
    for number in _numbers(arguments):
        start = number % len(chosen)
        for contender in chosen[start:] + chosen[:start]:
            done, found = stage.run(contender, number, [spike], arguments.seconds)
            figures[contender.name].append(found)
            runs.append(json_of(done, found))
            stage.write(arguments.json, {"runs": runs})
            if arguments.plot is not None and contender is _JOINT and not figures[_JOINT.name][1:]:
                draw_burst(done, _window(spike), arguments.plot)
    shown = {each.name: figures[each.name] for each in chosen}
    return table_of(shown, f"{arguments.rounds} rounds: median (least-most)")


def check(arguments: argparse.Namespace, stage: Stage) -> Table:
    """Run the server, then simulate its requests."""
    sides, runs = list[tuple[Side, Side]](), list[dict[str, Any]]()
    duration_s = 60.0 * arguments.minutes
    spikes = _bursts(duration_s)
    for number in _numbers(arguments):
        done, found = stage.run(_JOINT, number, spikes, duration_s)
        simulated = simulate(done, stage.bench, _JOINT, stage.frontier)
        window = _window(spikes[-1])
        live, copy = live_side(done, window, found.replica_s), simulated_side(simulated, window)
        sides.append((live, copy))
        told = {"server": finite(asdict(live)), "simulator": finite(asdict(copy))}
        seen = [asdict(each) for each in simulated.result.samples]
        runs.append(json_of(done, found) | told | {"simulated_samples": seen})
        stage.write(arguments.json, {"runs": runs})
        if arguments.plot is not None and number == arguments.first_round - 1:
            draw_check(done, simulated, arguments.plot)
    return _check_table(sides)


def _bursts(duration_s: float) -> list[Spike]:
    """Return a smaller and a larger burst, each of at most a minute."""
    length = min(60.0, 0.2 * duration_s)
    return [
        Spike(at_s=0.15 * duration_s, for_s=length, times=2.5),
        Spike(at_s=0.5 * duration_s, for_s=length, times=5),
    ]


def _window(spike: Spike) -> Window:
    return Window(spike.at_s, spike.at_s + spike.for_s)


def _check_table(sides: Sequence[tuple[Side, Side]]) -> Table:
    table = Table("figure", "server", "simulator", "ratio of each round", title="medians of rounds")
    for name in [field.name for field in fields(Side)]:
        pairs = [(getattr(live, name), getattr(copy, name)) for live, copy in sides]
        ratios = [f"{copy / live:.2f}" if live else "" for live, copy in pairs]
        middle = [f"{median(values):.3g}" for values in zip(*pairs, strict=True)]
        table.add_row(name, *middle, " ".join(ratios))
    return table


def _numbers(arguments: argparse.Namespace) -> range:
    """Return the numbers of the rounds, from 0."""
    first: int = arguments.first_round - 1
    return range(first, first + arguments.rounds)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("model", type=Path, help="checkpoint directory with frontier.json")
    add("--data", type=Path, required=True, help="conversations, JSONL, with answers to check")
    add("--rounds", type=int, default=3, help="number of rounds")
    add("--first-round", type=int, default=1, help="number and seed of the first round")
    add("--no-exact", action="store_true", help="leave mode exact out of the frontier")
    add("--t0-s", type=float, default=0.05, help="seconds of a step without positions")
    add("--positions-to-double", type=float, default=128, help="positions that double the time")
    add("--prefill", type=float, default=20_000, help="prompt tokens per second")
    add("--slots", dest="max_num_seqs", type=int, default=8, help="most requests of a replica")
    add("--max-replicas", type=int, default=3, help="most replicas")
    add("--busy", type=float, default=0.55, help="load outside bursts, in replicas at τ = 1")
    add("--cold-start-s", type=float, default=30, help="seconds from order to service")
    add("--max-tokens", type=int, default=100, help="most output tokens of a request")
    add("--plot", type=Path, help="picture of the joint policy's first round")
    add("--json", type=Path, help="JSON file for every run")
    add("--log", type=Path, default=Path("autoscaling.log"), help="file for the servers' output")
    raw, style = argparse.RawTextHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("burst", parents=[common], formatter_class=style)
    one.add_argument("--seconds", type=float, default=330, help="length of a run")
    one.add_argument("--times", type=float, default=5, help="load of the burst over that outside")
    one.add_argument("--policy", action="append", choices=_NAMES, help="policy; by default all")
    one.set_defaults(command=burst)
    other = commands.add_parser("check", parents=[common], formatter_class=style)
    other.add_argument("--minutes", type=float, default=10, help="length of a run")
    other.set_defaults(command=check)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="autoscaling-") as directory:
        stage = _stage(arguments, Path(directory), console)
        table = arguments.command(arguments, stage)
    output = Console()
    if not output.is_terminal:
        output.width = _WIDTH
    output.print(table)


if __name__ == "__main__":
    main()
