from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
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
from mars_serve.bench.decode.models import BenchModel
from mars_serve.bench.decode.workload import (
    AcceptanceDistribution,
    BenchRequest,
    Draws,
    RaggedShape,
    agreeing,
    generated_requests,
)
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.execution.linear import pack_linears

MASK, WINDOW = 3, 4
SPECIAL = SpecialTokens(eos=frozenset({1, 2, 9, 33}), never_emitted=frozenset({0, MASK}))
ENDLESS = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, MASK}))
FAMILIES = ("qwen2", "llama")
Models = Callable[[str], PreTrainedModel]


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


def ragged(count: int, *, seed: int = 0, most: int = 24) -> list[BenchRequest]:
    shape = RaggedShape(prompt=(1, 30), output=(1, most))
    return generated_requests(count, shape, range(4, 64), seed)


def test_static_batches_hold_each_request_once() -> None:
    requests = ragged(11)
    for order in ORDERS:
        batches = static_batches(requests, 4, order)
        assert [len(part) for part in batches] == [4, 4, 3]
        flat = [request for part in batches for request in part]
        assert sorted(flat, key=lambda r: int(r.id)) == requests
    lengths = [len(request.prompt) for request in flat]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("decoding", "passes", "positions"),
    [
        (DecodingOptions(1, Mode.AR), [1] * 13, [1] * 13),
        (  # after the first pass, two tokens and the masks that the rest has room for
            DecodingOptions(1, Mode.THRESHOLD, 0.95, window=4),
            [2] * 6 + [1],
            [1 + 4, 2 + 4, 2 + 4, 2 + 4, 2 + 4, 2 + 2, 2 + 0],
        ),
        (  # the pending token, the drafts, and for each outcome the masks that have room
            DecodingOptions(1, Mode.EXACT, outcomes=Outcomes.ALL),
            [1, 3, 3, 3, 3],
            [1 + 4, 25, 25, 1 + 4 + 4 + 3 + 2 + 1 + 0, 1 + 2],
        ),
        (  # two of four drafts are right, and the next step has no drafts; at the end one is fed
            DecodingOptions(1, Mode.EXACT, outcomes=Outcomes.LAST),
            [1, 3, 1, 3, 1, 3, 1],
            [1 + 4, 1 + 4 + 4, 1 + 4, 1 + 4 + 2, 1 + 3, 1 + 3, 1],
        ),
    ],
)
def test_drawn_lengths_and_positions_follow_the_mode(
    model: BenchModel, decoding: DecodingOptions, passes: list[int], positions: list[int]
) -> None:
    requests = [BenchRequest(str(n), (5 + n, 6, 7), 13) for n in range(6)]
    draws = Draws(fixed_length(2), fixed_length(3), seed=0)
    engine = build_engine(model, requests, 3, draws, exact=True)
    decoded = EngineContender(lambda: engine, decoding, draws).run(requests)
    assert [len(tokens) for tokens in decoded.outputs] == [13] * 6
    assert decoded.num_passes == 6 * len(passes)
    assert decoded.num_positions == 6 * sum(positions)


def fixed_length(tokens: int) -> AcceptanceDistribution:
    return AcceptanceDistribution(tokens_per_forward={tokens: 1.0})


@pytest.mark.parametrize("outcomes", [None, *Outcomes])
def test_mode_exact_equals_the_reference(model: BenchModel, outcomes: Outcomes | None) -> None:
    requests = ragged(7, seed=4)
    engine = build_engine(model, requests, 3, exact=True)
    options = DecodingOptions(1, Mode.EXACT, outcomes=outcomes)
    decoded = EngineContender(lambda: engine, options).run(requests)
    special, plain = model.checkpoint.special, model.create()
    passes = [oracle(plain, each, special) for each in requests]
    assert decoded.outputs == [[token for part in each for token in part] for each in passes]


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_have_the_drawn_probability_as_confidence(model: BenchModel, right: float) -> None:
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


@pytest.mark.parametrize(
    ("family", "special", "threshold", "block_length"),
    [
        *((family, SPECIAL, 1.0, length) for family in FAMILIES for length in (1, 4, 7, 64)),
        *((family, SPECIAL, 0.1, 24) for family in FAMILIES),
        *(
            ("qwen2", special, 0.1, length)
            for special in (SPECIAL, ENDLESS)
            for length in (1, 4, 7)
        ),
    ],
)
def test_block_sync_equals_the_reference_whose_window_the_end_of_a_block_cuts(
    tiny_model: Models, family: str, special: SpecialTokens, threshold: float, block_length: int
) -> None:
    model, requests = tiny_model(family), ragged(12, seed=2)
    rows = block_sync(model, requests, special, threshold=threshold, block_length=block_length)
    assert [row.request for row in rows] == requests
    for row in rows:
        expected = oracle(
            model, row.request, special, threshold=threshold, block_length=block_length
        )
        assert row.passes == expected
    ended = [row for row in rows if row.num_output < row.request.max_tokens]
    assert (special is SPECIAL) == (0 < len(ended) < len(rows))
    # rows wait at the end of a block that they fill at different speeds
    waits = sum(row.num_waits for row in rows)
    assert (waits > 0) == (threshold < 1.0 and block_length in (4, 7))
    assert any(len(tokens) > 1 for row in rows for tokens in row.passes) == (
        threshold < 1.0 < block_length
    )


def test_block_sync_accepts_drawn_lengths(tiny_model: Models) -> None:
    request = BenchRequest("a", (5, 6, 7), 12)
    (row,) = block_sync(
        tiny_model("qwen2"),
        [request],
        ENDLESS,
        threshold=0.95,
        block_length=8,
        draw=lambda name, num_output, num_proposed: min(3, num_proposed),
    )
    # 8 = 3 + 3 + 2, limited by the block; then 12 - 8 = 3 + 1, limited by the output
    assert [len(tokens) for tokens in row.passes] == [3, 3, 2, 3, 1]


def hf_contenders(
    model: PreTrainedModel, special: SpecialTokens, requests: list[BenchRequest]
) -> list[Contender]:
    return [
        HfGenerate(lambda: model, special, 3),
        HfContinuous(lambda: model, special, 3, requests, "cpu"),
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("special", [SPECIAL, ENDLESS])
def test_transformers_equals_the_reference_with_each_setting(
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
