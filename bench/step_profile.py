"""Shows where the time of an engine's step goes, as a table and as a flame graph.

    python bench/step_profile.py --untrained qwen2-100m --batch 16 --flame steps.svg
    python bench/step_profile.py MODEL --batch 1 --mode ar

The table comes from clocks around the engine's own functions; an indented line is part of the line
above it. "outside the model" is the whole step without the model's forward pass. No step can be
faster than "weights read once", the bytes of the weights over the speed at which this machine sums
a large tensor. A GPU works while the host goes on, so on a GPU only the whole step and that bound
mean anything. py-spy (``pip install py-spy``) draws the flame graph from a second, longer run in a
process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.contenders import build_engine
from mars_serve.bench.decode.models import trained_model, untrained_model
from mars_serve.bench.decode.workload import (
    PAPER_ACCEPTANCE,
    Draws,
    RaggedShape,
    generated_requests,
    read_acceptance,
)
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution import forward
from mars_serve.engine.request import Request

_MODEL, _OUTPUT = "model up to its output layer", "output layer"
_SKIPPED_STEPS = 8
"""Steps that feed the prompts and prepare kernels."""
_BANDWIDTH_BYTES, _BANDWIDTH_REPEATS, _READS = 2**30, 5, 8
_SHAPE = RaggedShape(prompt=(64, 256), output=(256, 256))


class Clock:
    """Measures the seconds spent in functions, including the functions that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Add the time of each call of ``owner.name`` to a label."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[label] += time.perf_counter() - begin

        setattr(owner, name, timed)


def _engine(
    model: str | None, untrained: str | None, batch: int, device: str
) -> tuple[Engine, list[Request]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if untrained is not None:
        bench = untrained_model(untrained, dtype, device, 0)
        acceptance = read_acceptance(PAPER_ACCEPTANCE)
        draws = Draws(acceptance, acceptance, seed=0)
    else:
        assert model is not None, "name a model or give --untrained"
        bench, draws = trained_model(model, dtype, device).without_end(), None
    shape = _SHAPE
    if bench.checkpoint.max_length < 512:
        shape = replace(shape, prompt=(8, 24), output=(64, 64))
    vocabulary = range(4, bench.checkpoint.config.vocab_size - 1)
    prompts = generated_requests(batch, shape, list(vocabulary), 0)
    engine = build_engine(bench, prompts, batch, draws)
    return engine, [
        Request(each.id, list(each.prompt), DecodingOptions(each.max_tokens)) for each in prompts
    ]


def _decode(engine: Engine, requests: list[Request], mode: Mode, clock: Clock) -> tuple[int, float]:
    """Decode the requests; returns the number of measured steps and their seconds."""
    for request in requests:
        options = replace(request.options, mode=mode)
        engine.add(replace(request, tokens=list(request.tokens), options=options))
    for _ in range(_SKIPPED_STEPS):
        engine.step()
    clock.seconds.clear()
    num_steps, begin = 0, time.perf_counter()
    while engine.has_work:
        engine.step()
        num_steps += 1
    return num_steps, time.perf_counter() - begin


def _floor_s(engine: Engine) -> float:
    """Return the seconds to read once each weight that a step of one position reads."""
    config, model = engine.checkpoint.config, engine._runner.model
    with torch.device("meta"):  # packed linear layers hold no parameter
        weights = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    count = sum(weight.numel() for weight in weights.parameters())
    if not config.tie_word_embeddings:
        count -= weights.get_input_embeddings().weight.numel()  # a step reads one row of it
    return count * model.dtype.itemsize / _bytes_per_s(model.device)


def _bytes_per_s(device: torch.device) -> float:
    large = torch.ones(_BANDWIDTH_BYTES // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(_BANDWIDTH_REPEATS):
        begin = time.perf_counter()
        sums = [large.sum() for _ in range(_READS)]
        sums[-1].item()  # waits once for all, as a wait takes a good part of a read on a GPU
        seconds.append(time.perf_counter() - begin)
    return _READS * large.nbytes / min(seconds)


def _watch(engine: Engine) -> Clock:
    clock, runner = Clock(), engine._runner
    clock.watch(engine._scheduler, "schedule", "schedule, windows included")
    clock.watch(forward, "build_batch", "build the batch")
    clock.watch(engine.attention, "prepare", "prepare attention")
    clock.watch(runner._forward._function, "hidden", _MODEL)
    clock.watch(engine.attention, "attend", "  attention")
    clock.watch(runner._forward._function, "logits", _OUTPUT)
    clock.watch(forward, "propose", "propose")
    clock.watch(forward, "accept", "accept")
    clock.watch(forward, "unpack", "copy to the host")
    clock.watch(engine._scheduler, "commit_cached", "count cached tokens")
    return clock


def _print(
    clock: Clock, num_steps: int, seconds: float, floor_s: float, title: str
) -> dict[str, float]:
    per_step = {label: value / num_steps * 1e3 for label, value in clock.seconds.items()}
    step = seconds / num_steps * 1e3
    # a replayed graph calls none of the model's functions
    outside = step - per_step.get(_MODEL, 0.0) - per_step.get(_OUTPUT, 0.0)
    known = sum(value for label, value in per_step.items() if not label.startswith(" "))
    lines = {
        **per_step,
        "all else": step - known,
        "whole step": step,
        "outside the model": outside,
        "weights read once": floor_s * 1e3,
    }
    table = Table("part", "ms a step", "share", title=title)
    for label, value in lines.items():
        table.add_row(label, f"{value:.3f}", f"{value / step:.1%}")
    Console().print(table)
    return lines


def _record(path: Path, arguments: list[str]) -> None:
    command = [str(Path(sys.executable).with_name("py-spy")), "record", "--rate", "200"]
    command += ["--format", "flamegraph", "-o", str(path), "--", sys.executable]
    subprocess.run([*command, *arguments], check=True)  # noqa: S603 - own command


def main(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory or hub id.")] = None,
    untrained: Annotated[
        str | None, typer.Option(help="Size of a model with random weights, instead of MODEL.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 16,
    mode: Annotated[Mode | None, typer.Option(help="Mode; ar and threshold by default.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    device: Annotated[str, typer.Option(help="cpu, or cuda with bfloat16.")] = "cpu",
    flame: Annotated[Path | None, typer.Option(help="Draw a flame graph into this SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, too.")] = False,
) -> None:
    """Print the time of each part of a step that decodes a batch."""
    torch.set_num_threads(threads)
    engine, requests = _engine(model, untrained, batch, device)
    floor_s, clock, found = _floor_s(engine), _watch(engine), {}
    for each in [mode] if mode else [Mode.AR, Mode.THRESHOLD]:
        num_steps, seconds = _decode(engine, requests, each, clock)
        title = f"{untrained or model}, batch {batch}, {each}, {num_steps} steps"
        found[each] = _print(clock, num_steps, seconds, floor_s, title)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    if flame is not None:
        source = [model] if model else ["--untrained", str(untrained)]
        chosen = ["--mode", mode] if mode else []
        sizes = ["--batch", str(batch), "--threads", str(threads), "--device", device]
        _record(flame, [__file__, *source, *sizes, *chosen])


if __name__ == "__main__":
    typer.run(main)
