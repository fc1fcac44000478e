from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_serve.bench.decode.report import ratio
from mars_serve.bench.decode.run import ContenderResult, Timing, compare
from mars_serve.bench.options import DecodeOptions


def test_all_contenders_are_measured(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--untrained", str(config), "--batch", "2", "--rounds", "2"]
    sizes = ["--prompt-tokens", "2", "8", "--output-tokens", "2", "6", "--num-requests", "4"]
    command = ["bench", "decode", *options, *sizes, "--threads", "1"]
    assert run([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "step-cost measurement: accepted lengths drawn, weights untrained" in result["label"]
    assert result["machine"]["num_threads"] == 1
    (batch,) = result["batches"]
    assert (batch["batch"], batch["num_requests"]) == (2, 4)
    assert set(batch["contenders"]) == {"ar", "threshold", "exact"}
    num_tokens = set()
    for figures in batch["contenders"].values():
        assert len(figures["rounds"]) == 2
        num_tokens |= {timing["num_tokens"] for timing in figures["rounds"]}
        speed = figures["tokens_per_s"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
    assert len(num_tokens) == 1  # all contenders decode the same work
    assert batch["contenders"]["ar"]["tokens_per_forward"] == 1.0
    assert batch["ratios"]["threshold/ar"]["median"] > 0
    assert batch["contenders"]["ar"]["positions_per_forward"] == 1.0
    assert batch["contenders"]["threshold"]["positions_per_forward"] >= 1.0


def test_tables_are_printed_for_conversations(
    mars_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "x"}]}
        for n in range(3)
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sizes = ["--batch", "2", "--rounds", "1", "--max-tokens", "4", "--prompts", str(prompts)]
    command = ["bench", "decode", str(mars_dir), *sizes]
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert "threshold / ar" in printed
    assert "exact / threshold" in printed
    assert "drawn" not in printed
    assert "Sampled" not in printed
    some = ["--contender", "ar", "--contender", "exact", "--temperature", "1"]
    assert run([*command, *some]) == 0
    assert "Sampled at temperature 1, with the seeds 0, 1, ..." in capsys.readouterr().out
    assert run([*command, *some, "--json"]) == 0
    (batch,) = json.loads(capsys.readouterr().out)["batches"]
    assert {name: each["identical_to_ar"] for name, each in batch["contenders"].items()} == {
        "ar": 1.0,
        "exact": 1.0,
    }


def test_ratios_are_taken_in_each_round() -> None:
    ours = ContenderResult(timings=[Timing(1.0, n, n, n) for n in (100, 10, 3)])
    theirs = ContenderResult(timings=[Timing(1.0, n, n, n) for n in (50, 10, 1)])
    assert ratio(ours, theirs) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "some/where"}, "MODEL: name a checkpoint, or give --untrained"),
        ({"untrained": None}, "MODEL: name a checkpoint, or give --untrained"),
        ({"untrained": "qwen9"}, "--untrained: qwen9 is neither a config.json nor one of"),
        ({"prompts": Path("x.jsonl")}, "--prompts: untrained weights have no tokenizer"),
        ({"prompt_tokens": (5, 4)}, "--prompt-tokens: 5 4 is no range"),
        ({"output_tokens": (0, 2)}, "--output-tokens: 0 2 is no range"),
        (
            {"prompt_tokens": (1, 60), "output_tokens": (1, 5)},
            "up to 65 tokens do not fit .* context of 64",
        ),
    ],
)
def test_a_bad_option_is_refused(config: Path, changes: dict[str, Any], message: str) -> None:
    options = DecodeOptions(**{"untrained": str(config), **changes})
    with pytest.raises(UserError, match=message):
        compare(options, Console(stderr=True))


def test_a_plain_checkpoint_takes_no_contender_with_masks(plain_dir: Path) -> None:
    options = DecodeOptions(model=str(plain_dir))
    with pytest.raises(
        UserError, match=r"plain AR checkpoint .* leave out the contender threshold"
    ):
        compare(options, Console(stderr=True))


def test_fewer_prompts_than_a_batch_are_refused(mars_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    options = DecodeOptions(model=str(mars_dir), prompts=prompts, batches=(4,))
    with pytest.raises(UserError, match="--batch: 4 is more than the 1 prompts"):
        compare(options, Console(stderr=True))
