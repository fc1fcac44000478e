"""The view of a server's load, of a real server and of metrics that are written down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest
from rich.console import Console

from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_serve.cli.top.client import Away, ServerClient
from mars_serve.cli.top.load import LoadWindow
from mars_serve.cli.top.sample import Autoscaler, Decision, Live, Sample, parsed_metrics, quantile
from mars_serve.cli.top.view import line, picture

ASKED = {"model": "mars", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


def exposition(tokens: int, passes: int, within: dict[str, int], refused: int) -> str:
    """Return metrics of two replicas of the model m that have counted as much each."""
    lines = []
    for replica in "ab":
        labels = f'model="m",replica="{replica}"'
        lines += [
            f"marsray_num_requests_running{{{labels}}} 3",
            f"marsray_kv_cache_usage_ratio{{{labels}}} {0.25 if replica == 'a' else 0.5}",
            f"marsray_confidence_threshold{{{labels}}} {0.9 if replica == 'a' else 1}",
            f"marsray_exact_decoding{{{labels}}} 1",
            *(
                f'marsray_num_requests_queued{{{labels},tier="{tier}"}} {num}'
                for tier, num in {"default": 2, "flex": 0}.items()
            ),
            f"marsray_generation_tokens_total{{{labels}}} {tokens}",
            f"marsray_row_passes_total{{{labels}}} {passes}",
        ]
        lines += [
            f'marsray_time_to_first_token_seconds_bucket{{{labels},le="{end}"}} {num}'
            for end, num in within.items()
        ]
    lines.append(
        f'marsray_rejections_total{{model="m",replica="i",status="503",code="full"}} {refused}'
    )
    kinds = [
        "# TYPE marsray_num_requests_running gauge",
        "# TYPE marsray_kv_cache_usage_ratio gauge",
        "# TYPE marsray_confidence_threshold gauge",
        "# TYPE marsray_exact_decoding gauge",
        "# TYPE marsray_num_requests_queued gauge",
        "# TYPE marsray_generation_tokens_total counter",
        "# TYPE marsray_row_passes_total counter",
        "# TYPE marsray_time_to_first_token_seconds histogram",
        "# TYPE marsray_rejections_total counter",
    ]
    names = [kind.split()[2] for kind in kinds]
    return "".join(
        f"{kind}\n" + "".join(f"{each}\n" for each in lines if each.startswith(name))
        for kind, name in zip(kinds, names, strict=True)
    )


def sample(time_s: float, *counts: Any) -> Sample:
    decision = Decision(
        time_s=0, reason="load", num_replicas=3, replicas_before=2, num_ready=2, num_starting=1
    )
    return Sample(
        time_s,
        parsed_metrics(exposition(*counts), ["m"]),
        {"m": Live(confidence_threshold=0.95, is_automatic=True)},
        {"m": Autoscaler(decisions=[decision])},
    )


def test_rates_and_percentiles_are_those_between_two_samples() -> None:
    window = LoadWindow()
    window.add(sample(10.0, 1000, 500, {"0.1": 50, "0.2": 50, "+Inf": 50}, 7))
    [load] = window.add(sample(12.0, 1300, 600, {"0.1": 50, "0.2": 60, "+Inf": 60}, 11))
    assert (load.num_replicas, load.num_running, load.num_ordered) == (2, 6, 3)
    assert load.tokens_per_s == 300.0  # 300 of each of two replicas in 2 s
    assert load.tokens_per_forward == 3.0
    assert load.first_token_s == {
        "p50": pytest.approx(0.15),
        "p90": pytest.approx(0.19),
        "p99": pytest.approx(0.199),
    }
    assert (load.kv_share, load.threshold, load.way) == (0.5, pytest.approx(0.95), "threshold")
    assert (load.refused_per_s, load.refused) == (2.0, {"503 full": 11})
    assert (load.queued, load.exact_share) == ({"default": 4, "flex": 0}, 1.0)


def test_counts_that_begin_anew_are_no_negative_rate() -> None:
    window = LoadWindow()
    window.add(sample(10.0, 1000, 500, {"+Inf": 50}, 7))
    [load] = window.add(sample(11.0, 20, 10, {"+Inf": 1}, 0))
    assert load.tokens_per_s == 40.0
    assert load.refused_per_s == 0.0


def test_a_quantile_beyond_the_last_bucket_is_infinite() -> None:
    assert quantile({1.0: 0.0, math.inf: 4.0}, 0.5) == math.inf
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_a_view_has_everything_in_words() -> None:
    window = LoadWindow()
    window.add(sample(10.0, 1000, 500, {"0.1": 0, "+Inf": 0}, 7))
    loads = window.add(sample(12.0, 1300, 600, {"0.1": 5, "+Inf": 5}, 11))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(picture("http://x", loads, is_admin=False, problem="no answer"))
    for words in (
        "no answer; trying again",
        "2 of 3 ordered",
        "load",
        "11 × 503 full",
        "2 → 3",
        "4 default",
    ):
        assert words in shown.get()
    assert "τ 0.950, threshold, autoscaler; 300 tokens/s; 3.00 a pass" in line(loads[0])


def ask(url: str, key: str) -> None:
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json=ASKED,
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text


def test_a_server_is_watched_through_a_restart(
    listening: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "the key of an administrator"
    window = LoadWindow()
    with listening() as port:
        url = f"http://127.0.0.1:{port}"
        with ServerClient(url, key) as client:
            window.add(client.sample())
            ask(url, key)
            [load] = window.add(client.sample())
            assert (load.model, load.num_replicas, load.is_automatic) == ("mars", 1, False)
            assert load.threshold == 0.95
            assert client.is_admin
        with ServerClient(url, "the key of a user") as client:
            assert client.sample().lives == {}
            assert not client.is_admin
        with ServerClient(url, "none") as client, pytest.raises(UserError, match="--key-env"):
            client.sample()
    with ServerClient(url, key) as client:
        with pytest.raises(Away):
            client.sample()
        with listening(port):
            assert set(client.sample().metrics) == {"mars"}


def test_the_command_prints_lines_or_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [url, "--once", "--interval", "0.2", "--key-env", "USER_KEY"]
    assert run(["top", *options]) == 0
    assert "mars: replicas 1; running 0; waiting 0" in capsys.readouterr().out
    assert run(["top", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"] is None
    assert [each["model"] for each in found["models"]] == ["mars"]


def test_a_server_that_is_away_or_another_program_is_one_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["top", "http://127.0.0.1:1", "--once", "--interval", "0.2"]) == 2
    assert "is the server running?" in capsys.readouterr().err


def test_metrics_of_other_models_are_left_out() -> None:
    numbers = count(1)
    text = exposition(next(numbers), next(numbers), {}, 0)
    assert parsed_metrics(text, ["other"])["other"].counters == {}
