"""Servers beside one another: programs that a test starts, and this server in its process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_serve.bench.compare.report import figures_by_level
from mars_serve.bench.compare.run import ServerComparison, levels_of, measured
from mars_serve.bench.compare.servers import servers_of
from mars_serve.bench.options import ComparedName, CompareOptions
from mars_serve.cli.options import ServeOptions
from mars_serve.cli.serve_settings import serve_settings
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from rest.rest_server import ENGINE, SingleEngineBackend, app_of, served
from web.live_server import live_server

PROGRAM = Path(__file__).parents[2] / "support" / "rest" / "other_server.py"
OWN = (ComparedName.AR, ComparedName.EXACT, ComparedName.THRESHOLD)


def other(name: str, flaws: str = "none") -> list[str]:
    return ["--other", f"{name}={sys.executable} -SE {PROGRAM} {flaws}"]


class WatchedBackend(SingleEngineBackend):
    """A backend that counts requests by their ``cache_salt``."""

    def __init__(self, loop: LocalEngineClient) -> None:
        super().__init__(loop)
        self.salts = Counter[str]()

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        self.salts[request.cache_salt] += 1
        async for output in super().stream(request):
            yield output


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} b Answer: D"},
                {"role": "assistant", "content": "Answer: D"},
            ],
            "answer": "D",
        }
        for n in range(5)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_servers_are_started_measured_and_ended_in_turn(
    mars_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "compare", str(mars_dir), "--rounds", "2", "--num-requests", "4"]
    command += ["--clients", "1", "--clients", "3", "--prompts", str(prompts), "--max-tokens", "4"]
    command += ["--contender", "vllm", "--vllm", "/no/vllm", *other("one")]
    command += [*other("two", "wrong,silent"), *other("broken", "ends")]
    command += other("strict", "refuses")
    files = {name: tmp_path / f"{name}.file" for name in ("json", "out", "log")}
    assert run([*command, *(part for n, f in files.items() for part in (f"--{n}", str(f)))]) == 0
    found = json.loads(files["json"].read_text())
    order = [(r["round"], r["contender"], r["clients"]) for r in found["runs"]]
    turns = [(0, "one"), (0, "two"), (1, "two"), (1, "one")]
    assert order == [(*turn, clients) for turn in turns for clients in (1, 3)]
    assert {each["figures"]["num_served"] for each in found["runs"]} == {4, 6}
    assert [(row["clients"], row["contender"]) for row in found["figures"]] == [
        (clients, name) for clients in (1, 3) for name in ("one", "two")
    ]
    for row in found["figures"]:
        is_first = row["contender"] == "one"
        assert (row["tokens_per_pass"] or {}).get("median") == (2.0 if is_first else None)
        assert (row["tokens_per_s"] is not None) == is_first
        assert row["accuracy"]["median"] == is_first
        assert row["as_ar"] is row["over_ar"] is None
        assert 0 < row["ttft_p50_s"]["low"] <= row["ttft_p99_s"]["high"] < 60
    printed = capsys.readouterr().out
    for text in ("vllm is not installed", "broken (see", "ended with status 1", "no such field"):
        assert text in printed
    assert "cannot start" in files["log"].read_text()
    written = files["out"].read_text()
    assert "| tokens/s by clients | 1 " in written
    assert "|       3 | one " in written


def test_a_comparison_without_a_server_is_refused(
    mars_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "compare", str(mars_dir), "--prompts", str(prompts)]
    command += ["--out", str(tmp_path / "out.md"), "--contender", "vllm", "--vllm", "/no/vllm"]
    assert run(command) == 2
    assert "no server could be measured: vllm is not installed" in capsys.readouterr().err


def test_own_contenders_are_modes_that_the_server_takes(mars_dir: Path, prompts: Path) -> None:
    checkpoint = read_checkpoint(mars_dir)
    options = CompareOptions(
        model=str(mars_dir),
        contenders=OWN,
        clients=(2,),
        num_requests=4,
        max_tokens=12,
        prompts=prompts,
    )
    (server,) = servers_of(options, mars_dir, "float32", checkpoint.metadata)
    (level,) = levels_of(options, checkpoint)
    loop = LocalEngineClient(Engine(checkpoint, ENGINE))
    backend = WatchedBackend(loop)
    app = app_of(served("mars", checkpoint, backend))
    try:
        with live_server(app) as live:
            runs = [
                asyncio.run(measured(server, name, live.address, level, options, 0)) for name in OWN
            ]
    finally:
        loop.stop()
    ar, exact, threshold = runs
    assert sorted(backend.salts.values()) == [2, 2, 2, 4, 4, 4]  # no run finds another's prompts
    assert ar.tokens_per_pass == 1.0
    assert exact.answers == ar.answers
    assert len(ar.answers) == 4
    assert [run.problems for run in runs] == [[], [], []]
    assert {run.figures.num_tokens for run in (ar, exact)} == {4 * 12}
    rows = figures_by_level(ServerComparison(options, "float32", runs))
    assert [row["contender"] for row in rows] == ["ar", "exact", "threshold"]
    assert rows[1]["as_ar"].median == 1.0
    assert rows[0]["over_ar"].median == 1.0
    assert threshold.figures.threshold_mean == 0.95


def test_own_command_is_one_of_marsray_serve(mars_dir: Path) -> None:
    options = CompareOptions(model="m", clients=(1, 64))
    metadata = read_checkpoint(mars_dir).metadata
    own, vllm, speculative, transformers = servers_of(options, mars_dir, "bfloat16", metadata)
    assert own.command[3:5] == ["serve", "--model"]
    model, *overrides = own.command[5::2]
    settings = serve_settings(ServeOptions(models=(model,), overrides=tuple(overrides)))
    (found,) = settings.models
    assert (found.name, found.dtype, found.engine.max_num_seqs) == ("mars", "bfloat16", 64)
    assert list(own.contenders) == ["ar", "exact", "threshold"]
    assert [*vllm.contenders, *speculative.contenders] == ["vllm", "vllm ngram"]
    assert speculative.command[:-2] == vllm.command
    assert "bfloat16" in transformers.command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"others": ("x",)}, "--other: 'x' is no server"),
        ({"others": ("x='",)}, "--other: .* is no server"),
        ({"others": ("x=y", "x=z")}, "--other, --contender: x is named twice"),
        ({"speculation": "[]"}, "--speculation: give vLLM's"),
        ({"speculation": "{"}, "--speculation: give vLLM's"),
        ({}, "MODEL: m is a plain AR checkpoint"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    contenders = (ComparedName.VLLM_SPECULATIVE,) if options else OWN
    with pytest.raises(UserError, match=message):
        servers_of(
            CompareOptions(model="m", contenders=contenders, **options), Path("m"), "float32", None
        )


def test_prompts_are_shared_out_to_the_runs_in_order(mars_dir: Path, prompts: Path) -> None:
    checkpoint = read_checkpoint(mars_dir)
    options = CompareOptions(
        model="m", clients=(1, 2), num_requests=2, max_tokens=20, prompts=prompts
    )
    levels = levels_of(options, checkpoint)
    asked = [
        (request.question.source.rpartition(":")[2], request.max_tokens)
        for level in levels
        for request in [*level.warm_up, *level.requests]
        if request.question
    ]
    assert asked == [
        ("1", 16), ("2", 20), ("3", 20), ("4", 16), ("5", 16), *((n, 20) for n in "1234")
    ]  # fmt: skip


def test_random_prompts_begin_alike_where_asked(mars_dir: Path) -> None:
    def texts(**fields: int) -> list[str]:
        options = CompareOptions(model="m", clients=(1,), num_requests=2, **fields)
        (level,) = levels_of(options, read_checkpoint(mars_dir))
        requests = [*level.warm_up, *level.requests]
        return [r.question.request["messages"][0]["content"] for r in requests if r.question]

    shared = texts(prompt_tokens=12, shared_tokens=6)
    assert len({text[:4] for text in shared}) == 1
    assert len(set(shared)) == 3
    assert len({text[:4] for text in texts(prompt_tokens=12)}) == 3
    with pytest.raises(UserError, match="--shared-tokens"):
        texts(prompt_tokens=3, shared_tokens=6)
