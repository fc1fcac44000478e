from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.bench.decode.block_cache import ATTENTION_NAME, BlockSyncDecoder, BlockSyncRow
from mars_serve.bench.decode.contenders import (
    ORDERS,
    Contender,
    EngineContender,
    build_engine,
    static_batches,
)
from mars_serve.bench.decode.hugging_face import HfContinuous, HfGenerate
from mars_serve.bench.decode.models import PRESETS, untrained_model
from mars_serve.bench.decode.options import CONTENDERS, DecodeOptions
from mars_serve.bench.decode.report import ratio
from mars_serve.bench.decode.run import ContenderResult, Timing, compare
from mars_serve.bench.decode.workload import (
    PAPER_ACCEPTANCE,
    AcceptanceDistribution,
    BenchRequest,
    Draws,
    RaggedShape,
    agreeing,
    generated_requests,
    read_acceptance,
    requests_in_run,
)
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.execution.linear import pack_linears

MASK, WINDOW = 3, 4
SPECIAL = SpecialTokens(eos=frozenset({1, 2, 9, 33}), never_emitted=frozenset({0, MASK}))
ENDLESS = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, MASK}))
TINY = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

Models = Callable[[str], PreTrainedModel]


def ragged(count: int, *, seed: int = 0, most: int = 24) -> list[BenchRequest]:
    shape = RaggedShape(prompt=(1, 30), output=(1, most))
    return generated_requests(count, shape, range(4, 64), seed)


def oracle(
    model: PreTrainedModel,
    request: BenchRequest,
    special: SpecialTokens,
    *,
    threshold: float = 1.0,
    block_length: int | None = None,
) -> list[list[int]]:
    """Passes of the reference, with the window cut off at the ends of blocks of tokens."""
    tokens, passes = list(request.prompt), list[list[int]]()
    while (left := request.max_tokens - sum(map(len, passes))) > 0:
        part = reference.decode(
            model,
            tokens,
            special,
            max_tokens=min(left, block_length or left),
            threshold=threshold,
            num_masks=WINDOW,
            mask_token_id=MASK,
        ).passes
        passes += part
        tokens += [token for each in part for token in each]
        if tokens[-1] in special.eos:
            break
    return passes


def block_sync(
    model: PreTrainedModel,
    requests: Sequence[BenchRequest],
    special: SpecialTokens,
    *,
    threshold: float,
    block_length: int,
    draw: Callable[[str, int, int], int] | None = None,
) -> list[BlockSyncRow]:
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(ATTENTION_NAME)
    decoder = BlockSyncDecoder(
        copied,
        special,
        block_length=block_length,
        threshold=threshold,
        num_masks=WINDOW,
        mask_token_id=MASK,
        draw=draw,
    )
    return decoder.decode(requests)


# Workload


def test_requests_lie_in_their_ranges_and_follow_from_the_seed() -> None:
    shape = RaggedShape(prompt=(3, 9), output=(2, 5))
    requests = generated_requests(400, shape, [7, 8], seed=1)
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert {request.max_tokens for request in requests} == set(range(2, 6))
    assert {token for request in requests for token in request.prompt} == {7, 8}
    assert len({request.id for request in requests}) == 400
    assert generated_requests(30, shape, [7, 8], seed=1) == requests[:30]
    assert generated_requests(400, shape, [7, 8], seed=2) != requests


@pytest.mark.parametrize(("batch", "expected"), [(1, 4), (4, 16), (16, 48), (32, 64), (60, 120)])
def test_a_run_takes_whole_batches(batch: int, expected: int) -> None:
    assert requests_in_run(batch, 48) == expected


def test_the_paper_s_mean() -> None:
    acceptance = read_acceptance(PAPER_ACCEPTANCE)
    assert acceptance.mean == pytest.approx(1.79, abs=1e-4)
    assert list(acceptance.tokens_per_forward) == [1, 2, 3, 4, 5]
    draws = [acceptance.draw(0, str(index), 3, 5) for index in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(1.79, abs=0.03)
    assert set(draws) == {1, 2, 3, 4, 5}


def test_draws_depend_on_seed_request_and_place_alone() -> None:
    acceptance = read_acceptance(PAPER_ACCEPTANCE)

    def draws(seed: int, name: str) -> list[int]:
        return [acceptance.draw(seed, name, place, 5) for place in range(60)]

    assert draws(0, "a") == draws(0, "a")
    assert draws(0, "a") != draws(0, "b")
    assert draws(0, "a") != draws(1, "a")
    assert len(set(draws(0, "a"))) > 1


def test_fewer_proposals_cut_a_draw() -> None:
    acceptance = read_acceptance(PAPER_ACCEPTANCE)
    for place in range(60):
        full = acceptance.draw(0, "a", place, 5)
        for proposed in range(1, 5):
            assert acceptance.draw(0, "a", place, proposed) == min(full, proposed)


@pytest.mark.parametrize("agreement", [0.0, 0.8, 1.0])
def test_drafts_agree_as_often_as_is_said(agreement: float) -> None:
    acceptance = agreeing(agreement, 4)
    assert sum(acceptance.tokens_per_forward.values()) == pytest.approx(1.0)
    assert acceptance.chance(1) == pytest.approx(agreement)
    for depth in (2, 3, 4):
        assert acceptance.chance(depth) == pytest.approx(agreement)
    assert acceptance.chance(5) == 0.0
    draws = [acceptance.draw(0, str(index), 3, 5) for index in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(acceptance.mean, abs=0.04)
    assert acceptance.mean == pytest.approx(sum(agreement**right for right in range(5)))


def test_chances_are_those_of_the_distribution() -> None:
    acceptance = read_acceptance(PAPER_ACCEPTANCE)
    shares = acceptance.tokens_per_forward
    assert acceptance.chance(1) == pytest.approx(1 - shares[1])
    reached = 1.0
    for depth in (1, 2, 3, 4):
        reached *= acceptance.chance(depth)
    assert reached == pytest.approx(shares[5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--acceptance: .* not valid JSON"),
        ("[1]", "--acceptance: .* must hold an object"),
        ("{}", "tokens_per_forward: required"),
        ('{"tokens_per_forward": {"0": 1.0}}', "tokens_per_forward: .* at least 1 token"),
        ('{"tokens_per_forward": {"1": 0.5}}', "tokens_per_forward: .* make them add up to 1"),
        ('{"tokens_per_forward": {"1": 2, "2": -1}}', r"tokens_per_forward: .* in \[0, 1\]"),
        ('{"tokens_per_forward": {}}', "tokens_per_forward: .* at least 1 item"),
        ('{"tokens_per_forward": {"one": 1}}', "tokens_per_forward.one"),
        ('{"tokens": {"1": 1}}', "tokens: unknown key"),
    ],
)
def test_bad_acceptance_file(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_acceptance(str(file))


def test_missing_acceptance_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--acceptance: .*absent.json cannot be read"):
        read_acceptance(str(tmp_path / "absent.json"))


def test_static_batches_hold_each_request_once() -> None:
    requests = ragged(11)
    for order in ORDERS:
        batches = static_batches(requests, 4, order)
        assert [len(part) for part in batches] == [4, 4, 3]
        flat = [request for part in batches for request in part]
        assert sorted(flat, key=lambda r: int(r.id)) == requests
    lengths = [len(request.prompt) for request in flat]
    assert lengths == sorted(lengths)


# The engine


@pytest.mark.parametrize(
    ("decoding", "passes"),
    [
        (DecodingOptions(1, Mode.AR), [1] * 13),
        (DecodingOptions(1, Mode.THRESHOLD, 0.95, window=4), [2] * 6 + [1]),
        (DecodingOptions(1, Mode.EXACT, outcomes=Outcomes.ALL), [1, 3, 3, 3, 3]),
        # two of four drafts are right: there are none for the step after; at the end one is fed
        (DecodingOptions(1, Mode.EXACT, outcomes=Outcomes.LAST), [1, 3, 1, 3, 1, 3, 1]),
    ],
)
def test_drawn_lengths_are_those_of_the_mode(
    tmp_path: Path, decoding: DecodingOptions, passes: list[int]
) -> None:
    model = untrained_model(str(config_file(tmp_path)), torch.float32, "cpu", 0)
    requests = [BenchRequest(str(n), (5 + n, 6, 7), 13) for n in range(6)]
    draws = Draws(fixed_length(2), fixed_length(3), seed=0)
    engine = build_engine(model, requests, 3, draws, exact=True)
    decoded = EngineContender(lambda: engine, decoding, draws).run(requests)
    assert [len(tokens) for tokens in decoded.outputs] == [13] * 6
    assert decoded.num_passes == 6 * len(passes)


def fixed_length(tokens: int) -> AcceptanceDistribution:
    return AcceptanceDistribution(tokens_per_forward={tokens: 1.0})


@pytest.mark.parametrize("outcomes", [None, *Outcomes])
def test_mode_exact_decodes_what_the_reference_does(
    tmp_path: Path, outcomes: Outcomes | None
) -> None:
    model = untrained_model(str(config_file(tmp_path)), torch.float32, "cpu", 0)
    requests = ragged(7, seed=4)
    engine = build_engine(model, requests, 3, exact=True)
    options = DecodingOptions(1, Mode.EXACT, outcomes=outcomes)
    decoded = EngineContender(lambda: engine, options).run(requests)
    special, plain = model.checkpoint.special, model.create()
    passes = [oracle(plain, each, special) for each in requests]
    assert decoded.outputs == [[token for part in each for token in part] for each in passes]


def test_positions_of_passes(tmp_path: Path) -> None:
    model = untrained_model(str(config_file(tmp_path)), torch.float32, "cpu", 0)
    requests = [BenchRequest("a", (5, 6, 7), 13)]
    draws = Draws(fixed_length(2), fixed_length(3), seed=0)
    engine = build_engine(model, requests, 1, draws, exact=True)

    def positions(decoding: DecodingOptions) -> int | None:
        return EngineContender(lambda: engine, decoding, draws).run(requests).num_positions

    assert positions(DecodingOptions(1, Mode.AR)) == 13
    # two tokens and the masks that the rest has room for, after the first pass
    threshold = [1 + 4, 2 + 4, 2 + 4, 2 + 4, 2 + 4, 2 + 2, 2 + 0]
    assert positions(DecodingOptions(1, Mode.THRESHOLD, 0.95, window=4)) == sum(threshold)
    # the pending token, the drafts, and for each number of right ones the masks that have room
    exact = [1 + 4, 25, 25, 1 + 4 + 4 + 3 + 2 + 1 + 0, 1 + 2]
    assert positions(DecodingOptions(1, Mode.EXACT, outcomes=Outcomes.ALL)) == sum(exact)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_the_engine_goes_by_the_rate_that_is_drawn(tmp_path: Path, right: float) -> None:
    model = untrained_model(str(config_file(tmp_path)), torch.float32, "cpu", 0)
    seen: list[list[float]] = []

    class Watched(Engine):
        def begin_step(self) -> Step | None:
            seen.extend(
                [draft.confidence for draft in request.drafts]
                for request in self._requests.values()
            )
            return super().begin_step()

    requests = [BenchRequest("a", (5, 6, 7), 12)]
    draws = Draws(fixed_length(1), agreeing(right, 4), seed=0)
    engine = build_engine(model, requests, 1, draws, exact=True)
    engine.__class__ = Watched
    decoding = DecodingOptions(1, Mode.EXACT, outcomes=Outcomes.ALL)
    EngineContender(lambda: engine, decoding, draws).run(requests)
    assert {rate for rates in seen for rate in rates} == {right}


# Block-synchronised cache


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("block_length", [1, 4, 7, 64])
def test_block_sync_equals_the_reference_at_one_token_a_pass(
    tiny_model: Models, family: str, block_length: int
) -> None:
    model, requests = tiny_model(family), ragged(9)
    rows = block_sync(model, requests, SPECIAL, threshold=1.0, block_length=block_length)
    assert [row.request for row in rows] == requests
    for row in rows:
        assert row.passes == oracle(model, row.request, SPECIAL)
    ended = [row for row in rows if row.num_output < row.request.max_tokens]
    assert 0 < len(ended) < len(rows)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_block_sync_equals_the_reference_where_one_block_holds_the_output(
    tiny_model: Models, family: str
) -> None:
    model, requests = tiny_model(family), ragged(9, seed=1)
    rows = block_sync(model, requests, SPECIAL, threshold=0.1, block_length=24)
    for row in rows:
        assert row.passes == oracle(model, row.request, SPECIAL, threshold=0.1)
        assert row.num_waits == 0
    assert any(len(tokens) > 1 for row in rows for tokens in row.passes)


@pytest.mark.parametrize("block_length", [1, 4, 7])
@pytest.mark.parametrize("special", [SPECIAL, ENDLESS])
def test_the_end_of_a_block_cuts_the_window_and_rows_wait_there(
    tiny_model: Models, special: SpecialTokens, block_length: int
) -> None:
    model, requests = tiny_model("qwen2"), ragged(12, seed=2)
    rows = block_sync(model, requests, special, threshold=0.1, block_length=block_length)
    for row in rows:
        expected = oracle(model, row.request, special, threshold=0.1, block_length=block_length)
        assert row.passes == expected
    assert (sum(row.num_waits for row in rows) > 0) == (block_length > 1)


def test_block_sync_takes_drawn_lengths(tiny_model: Models) -> None:
    request = BenchRequest("a", (5, 6, 7), 12)
    (row,) = block_sync(
        tiny_model("qwen2"),
        [request],
        ENDLESS,
        threshold=0.95,
        block_length=8,
        draw=lambda name, num_output, num_proposed: min(3, num_proposed),
    )
    # 8 = 3 + 3 + 2, cut by the block; then 12 - 8 = 3 + 1, cut by the output's end
    assert [len(tokens) for tokens in row.passes] == [3, 3, 2, 3, 1]


# Hugging Face


def hf_contenders(
    model: PreTrainedModel, special: SpecialTokens, requests: list[BenchRequest]
) -> list[Contender]:
    return [
        HfGenerate(lambda: model, special, 3),
        HfContinuous(lambda: model, special, 3, requests, "cpu"),
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("special", [SPECIAL, ENDLESS])
def test_rivals_decode_what_the_reference_does(
    tiny_model: Models, special: SpecialTokens, packed: bool
) -> None:
    model = copy.deepcopy(tiny_model("qwen2"))
    if packed:
        pack_linears(model)
    requests = ragged(8, seed=3)
    expected = [
        [token for tokens in oracle(tiny_model("qwen2"), request, special) for token in tokens]
        for request in requests
    ]
    for contender in hf_contenders(model, special, requests):
        try:
            for name, values in contender.choices.items():
                defaults = {key: each[0] for key, each in contender.choices.items()}
                contender.configure({**defaults, name: values[-1]})
                decoded = contender.run(requests)
                assert decoded.outputs == expected, (type(contender), name)
                assert decoded.num_passes == decoded.num_tokens
        finally:
            contender.close()


# Models


def test_untrained_weights_follow_from_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    model = untrained_model(str(file), torch.float32, "cpu", 5)
    first, second = model.create(), model.create()
    other = untrained_model(str(file), torch.float32, "cpu", 6).create()
    name = "model.layers.1.mlp.up_proj.weight"
    assert first.get_parameter(name).equal(second.get_parameter(name))
    assert not first.get_parameter(name).equal(other.get_parameter(name))
    first.set_attn_implementation("eager")
    assert second.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "millions"), [("qwen2-100m", 100), ("qwen2.5-0.5b", 494), ("qwen2.5-7b", 7616)]
)
def test_presets_have_their_size(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PRESETS[name]))
    assert round(model.num_parameters() / 1e6) == millions
    assert model.config.rope_parameters["rope_theta"] == 1_000_000.0


# The command


def config_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY, **changes}), encoding="utf-8")
    return file


def test_decode_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--untrained", str(config_file(tmp_path)), "--batch", "2", "--rounds", "2"]
    sizes = ["--prompt-tokens", "2", "8", "--output-tokens", "2", "6", "--num-requests", "4"]
    plot = tmp_path / "speeds.png"
    command = ["bench", "decode", *options, *sizes, "--threads", "1", "--plot", str(plot)]
    assert run([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "step-cost measurement: accepted lengths drawn, weights untrained" in result["label"]
    assert result["machine"]["num_threads"] == 1
    (batch,) = result["batches"]
    assert (batch["batch"], batch["num_requests"]) == (2, 4)
    assert set(batch["contenders"]) == set(CONTENDERS)
    num_tokens = set()
    for name, figures in batch["contenders"].items():
        assert "unavailable" not in figures, name
        assert len(figures["rounds"]) == 2
        num_tokens |= {timing["num_tokens"] for timing in figures["rounds"]}
        speed = figures["tokens_per_s"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
    assert len(num_tokens) == 1  # all decode the same work
    assert batch["contenders"]["ar"]["tokens_per_forward"] == 1.0
    assert batch["contenders"]["hf-generate"]["identical_to_ar"] == 1.0
    assert batch["contenders"]["hf-continuous"]["identical_to_ar"] == 1.0
    assert batch["ratios"]["threshold/ar"]["median"] > 0
    assert batch["ratios"]["exact/hf-generate"]["median"] > 0
    assert batch["contenders"]["ar"]["positions_per_forward"] == 1.0
    assert batch["contenders"]["exact-all"]["positions_per_forward"] > 2.0
    assert batch["contenders"]["hf-generate"]["positions_per_forward"] is None
    assert plot.stat().st_size > 0


def test_decode_prints_tables_for_conversations(
    mars_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "x"}]}
        for n in range(3)
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    wanted = ["ar", "threshold", "exact", "hf-generate", "block-sync"]
    options = [part for name in wanted for part in ("--contender", name)]
    sizes = ["--batch", "2", "--rounds", "1", "--max-tokens", "4", "--prompts", str(prompts)]
    assert run(["bench", "decode", str(mars_dir), *options, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "threshold / block-sync" in printed
    assert "exact / threshold" in printed
    assert "drawn" not in printed


def test_agreement_is_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--untrained", str(config_file(tmp_path)), "--batch", "2", "--rounds", "1"]
    sizes = ["--prompt-tokens", "2", "8", "--output-tokens", "9", "9", "--num-requests", "4"]
    wanted = ["--contender", "ar", "--contender", "exact-all"]
    command = ["bench", "decode", *options, *sizes, *wanted]
    speeds = []
    for agreement in ("0.0", "1.0"):
        assert run([*command, "--agreement", agreement, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["acceptance_exact"]["source"].startswith(
            f"each draft is right with probability {float(agreement):g}"
        )
        assert "paper" in result["acceptance"]["source"].lower()
        (batch,) = result["batches"]
        speeds.append(batch["contenders"]["exact-all"]["tokens_per_forward"])
    assert speeds == [1.0, 3.0]  # 9 tokens: one without drafts, five, then the three that are left
    assert run([*command, "--agreement", "0.8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Lengths in mode exact are drawn otherwise, 3.36 on average" in printed


def test_ratios_are_taken_in_each_round() -> None:
    ours = ContenderResult(timings=[Timing(1.0, 100, 100), Timing(1.0, 10, 10), Timing(1.0, 3, 3)])
    theirs = ContenderResult(timings=[Timing(1.0, 50, 50), Timing(1.0, 10, 10), Timing(1.0, 1, 1)])
    assert ratio(ours, theirs) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": ["vllm"]}, "--contender: there is no 'vllm'; choose from ar,"),
        ({"agreement": 1.5}, r"--agreement: 1.5 is no probability"),
        ({"agreement": 0.5, "contenders": ["ar"]}, "--agreement: only contenders in mode exact"),
        ({"batches": [4, 0]}, "--batch: 0 is no batch size"),
        ({"threshold": 0.0}, r"--threshold: 0.0 is not in \(0, 1\]"),
        ({"model": "some/where"}, "MODEL: name a checkpoint, or give --untrained"),
        ({"untrained": None}, "MODEL: name a checkpoint, or give --untrained"),
        ({"untrained": "qwen9"}, "--untrained: qwen9 is neither a config.json nor one of"),
        ({"prompts": Path("x.jsonl")}, "--prompts: untrained weights have no tokenizer"),
        ({"shape": RaggedShape((5, 4), (1, 2))}, "--prompt-tokens: 5 4 is no range"),
        ({"shape": RaggedShape((1, 4), (0, 2))}, "--output-tokens: 0 2 is no range"),
        ({"shape": RaggedShape((1, 60), (1, 5))}, "up to 65 tokens do not fit .* context of 64"),
    ],
)
def test_bad_options(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    options = DecodeOptions(**{"untrained": str(config_file(tmp_path)), **changes})
    with pytest.raises(UserError, match=message):
        compare(options, Console(stderr=True))


def test_plain_checkpoint_has_no_masks(plain_dir: Path) -> None:
    options = DecodeOptions(model=str(plain_dir), shape=RaggedShape((1, 2), (1, 2)))
    with pytest.raises(
        UserError, match=r"plain AR checkpoint .* leave out the contender threshold"
    ):
        compare(options, Console(stderr=True))


def test_fewer_prompts_than_a_batch(mars_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    options = DecodeOptions(model=str(mars_dir), prompts=prompts, batches=[4])
    with pytest.raises(UserError, match="--batch: 4 is more than the 1 prompts"):
        compare(options, Console(stderr=True))


def test_plot_file_of_no_known_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "decode", "--untrained", str(config_file(tmp_path))]
    assert run([*command, "--plot", str(tmp_path / "speeds.txt")]) == 2
    assert "--plot" in capsys.readouterr().err
