"""The demo's questions and tables, over a server in this process instead of one on Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from openai import OpenAI
from rich.console import Console

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.cli.progress import progress_display
from mars_platform.demo import measure, table
from mars_platform.demo.measure import DemoResult, Item
from mars_serve.engine.engine import Engine
from rest.rest_server import ENGINE, SingleEngineBackend, app_of, served
from web.live_server import live_server

SETTINGS = table.SETTINGS[:4]
ITEMS = [Item(f"Start with {number} hats", str(number)) for number in range(10, 13)]


@pytest.fixture(scope="module")
def base_url(plain_dir: Path, mars_dir: Path) -> Iterator[str]:
    """Serve both models of the demo at a port of this machine."""
    checkpoints = {table.AR_MODEL: read_checkpoint(plain_dir), "mars": read_checkpoint(mars_dir)}
    loops = {name: LocalEngineClient(Engine(each, ENGINE)) for name, each in checkpoints.items()}
    app = app_of(
        *(served(name, checkpoints[name], SingleEngineBackend(loops[name])) for name in loops)
    )
    with live_server(app) as server:
        yield f"{server.address}/v1"
    for loop in loops.values():
        loop.stop()


def ask(base_url: str) -> list[DemoResult]:
    with progress_display(Console(file=StringIO())) as display:
        return asyncio.run(measure.measure(base_url, SETTINGS, ITEMS, display))


def test_every_setting_gets_every_question(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MAX_TOKENS", 30)
    results = ask(base_url)
    assert [result.setting for result in results] == SETTINGS
    for result in results:
        assert len(result.correct) == len(ITEMS)
        assert result.num_tokens >= result.num_passes > 0
        assert {users: len(rounds) for users, rounds in result.round_tokens_per_s.items()} == {
            16: 3,
            1: 3,
        }
    ar_model, ar, exact, *_ = results
    assert ar_model.tokens_per_forward == ar.tokens_per_forward == 1.0
    assert exact.num_tokens == ar.num_tokens
    assert table.advice(results).startswith("Choose ")


def test_the_passes_of_an_answer_add_up_to_it(base_url: str) -> None:
    setting = table.SHOWN
    with OpenAI(base_url=base_url, api_key="none") as client:
        answer = client.chat.completions.create(
            model=setting.model,
            messages=[{"role": "user", "content": ITEMS[0].question}],
            extra_body=setting.extra_body,
        )
    passes = measure.stream_passes(base_url, setting, ITEMS[0])
    assert "".join(passes) == answer.choices[0].message.content
    assert len(passes) > 1
