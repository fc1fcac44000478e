"""An engine that is paced: the tokens of a plain one, in the time of its frontier."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paced_engine
from decoding.engine_requests import make_request
from decoding.engines import run
from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import write_frontier
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.method.mode import Mode
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings
from paced_engine import PacedEngine

SIZES = EngineSettings(page_size=8, num_pages=64, max_num_seqs=4)
STEP_S = 0.03


def paced(mars_dir: Path, work: Path, **frontier: Any) -> PacedEngine:
    """Return a paced engine of a model with steps of ``STEP_S``, whatever they hold."""
    path = shutil.copytree(mars_dir, work / "model")
    content = {"weights": weights_fingerprint(path), "seconds": STEP_S, **frontier}
    write_frontier(path, frontier_of(AR, point("threshold", 0.9, 79.0, 1.6, 4.6), **content))
    return PacedEngine(read_checkpoint(str(path)), SIZES)


@pytest.mark.parametrize("mode", [Mode.AR, Mode.EXACT])
def test_steps_take_the_frontiers_time_and_give_the_same_tokens(
    mars_dir: Path, tmp_path: Path, mode: Mode
) -> None:
    expected = run(Engine(read_checkpoint(str(mars_dir)), SIZES), [make_request("a", mode=mode)])
    engine = paced(mars_dir, tmp_path)
    begin = time.perf_counter()
    outputs = run(engine, [make_request("a", mode=mode)])
    assert time.perf_counter() - begin >= STEP_S * len(outputs["a"])
    assert outputs == expected


def test_prompts_are_read_at_the_frontiers_rate(mars_dir: Path, tmp_path: Path) -> None:
    engine = paced(mars_dir, tmp_path, prefill_tokens_per_s=100.0)
    begin = time.perf_counter()
    run(engine, [make_request("a", list(range(4, 44)), max_tokens=1, mode=Mode.AR)])
    assert time.perf_counter() - begin >= STEP_S + 0.4


def test_masks_follow_the_paced_times_behind_a_cold_start(
    mars_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_forks = list[Callable[[], None]]()  # a fork of this process itself would keep its threads
    monkeypatch.setattr(
        os, "register_at_fork", lambda *, after_in_child: in_forks.append(after_in_child)
    )
    for name, value in paced_engine.environment(cold_start_s=0.5).items():
        monkeypatch.setenv(name, value)
    engine = paced(mars_dir, tmp_path)
    engine.warm_up()
    (cold_start,) = in_forks
    begin = time.monotonic()
    cold_start()
    assert time.monotonic() - begin > 0.4
    (first, *_) = run(engine, [make_request("a", max_tokens=20, threshold=0.9)])["a"]
    assert first.num_masks == engine.window  # steps take as long with masks
