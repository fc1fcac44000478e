from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason, Outcomes, Sampling
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem
from mars_serve.measure.evaluation.scoring import score

CAREFUL, HASTY = DecodingSetting(Mode.THRESHOLD, 0.3), DecodingSetting(Mode.THRESHOLD, 0.05)
SPECIAL = SpecialTokens(eos=frozenset({1, 2, 9, 33}), never_emitted=frozenset({0, 3}))
MAX_TOKENS = 24

Models = Callable[[str], PreTrainedModel]
Run = Callable[..., list[DecodedItem]]


@pytest.fixture(scope="module")
def model(tiny_model: Models) -> PreTrainedModel:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel) -> Checkpoint:
    metadata = MarsMetadata(block_size=4, mask_token_id=3)
    return Checkpoint(None, model.config, None, metadata, SPECIAL)


@pytest.fixture(scope="module")
def items() -> list[EvalItem]:
    source = random.Random(0)
    prompts = [tuple(source.choices(range(4, 64), k=source.randint(1, 90))) for _ in range(23)]
    return [EvalItem(f"x:{n}", prompt, None, False, n) for n, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def run(model: PreTrainedModel, checkpoint: Checkpoint) -> Callable[..., list[DecodedItem]]:
    def run(
        items: list[EvalItem], setting: DecodingSetting, *, max_num_seqs: int = 5, **options: Any
    ) -> list[DecodedItem]:
        fields = {"max_tokens": MAX_TOKENS, **options}
        engine = evaluation_engine(
            checkpoint,
            items,
            max_tokens=fields["max_tokens"],
            max_num_seqs=max_num_seqs,
            model=copy.deepcopy(model),
        )
        outcomes = run_setting(engine, items, setting, **fields)
        assert engine.status().num_free_pages == engine.settings.num_pages
        return outcomes

    return run


@pytest.mark.parametrize(
    "setting", [ONE_TOKEN, CAREFUL, HASTY, DecodingSetting(Mode.THRESHOLD, 1.0)]
)
def test_outputs_equal_the_reference(
    model: PreTrainedModel, items: list[EvalItem], run: Run, setting: DecodingSetting
) -> None:
    decoded = [
        reference.decode(
            model,
            item.prompt,
            SPECIAL,
            max_tokens=MAX_TOKENS,
            threshold=setting.threshold,
            num_masks=4,
            mask_token_id=3,
        )
        for item in items
    ]
    outcomes = run(items, setting)
    assert [list(outcome.tokens) for outcome in outcomes] == [each.tokens for each in decoded]
    assert [outcome.num_passes for outcome in outcomes] == [len(each.passes) for each in decoded]
    assert {outcome.finish_reason for outcome in outcomes} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    total = sum(len(each.tokens) for each in decoded) / sum(len(each.passes) for each in decoded)
    assert score(outcomes).tokens_per_forward.value == pytest.approx(total)
    assert (total == 1.0) == (setting.threshold == 1.0)


@pytest.mark.parametrize("block_size", [4, 64])
def test_the_longest_items_run_together_without_preemption(
    model: PreTrainedModel, checkpoint: Checkpoint, block_size: int
) -> None:
    metadata = MarsMetadata(block_size=block_size, mask_token_id=3)
    endless = replace(checkpoint.special, eos=frozenset())
    wide = replace(checkpoint, metadata=metadata, special=endless)
    lengths = [1, 1, 1, *range(40, 50)]
    items = [EvalItem(str(n), (4 + n,) * n, None, False) for n in lengths]  # they share no prefix
    engine = evaluation_engine(
        wide, items, max_tokens=190, max_num_seqs=10, model=copy.deepcopy(model)
    )
    accept_all = DecodingOptions(190, Mode.THRESHOLD, 1e-9)
    for index, item in enumerate(items[3:]):
        engine.add(Request(str(index), list(item.prompt), accept_all))
    for _ in range(2):
        outputs = engine.step()
        assert [len(output.tokens) for output in outputs] == [block_size + 1] * 10
    while engine.has_work:
        engine.step()
    assert engine.status().num_preemptions == 0


def test_the_context_limits_outputs(
    model: PreTrainedModel, checkpoint: Checkpoint, items: list[EvalItem], run: Run
) -> None:
    limit = checkpoint.max_length
    long = [EvalItem(str(n), (7,) * (limit - n), None, False) for n in (1, 2, 30)]
    outcomes = run([*long, *items[:2]], ONE_TOKEN)
    assert [outcome.num_tokens for outcome in outcomes[:2]] == [1, 2]
    assert outcomes[0].finish_reason is FinishReason.LENGTH
    assert outcomes[3:] == run(items[:2], ONE_TOKEN)


def test_a_draw_depends_on_the_item_and_the_seed(items: list[EvalItem], run: Run) -> None:
    setting = DecodingSetting(Mode.AR, 1.0, sampling=Sampling(temperature=1.0, seed=2**63 - 2))
    whole = run(items, setting)
    assert whole[1::3] == run(items[1::3], setting)
    assert whole == run(items, setting, max_num_seqs=2)
    other = replace(setting, sampling=replace(setting.sampling, seed=3))
    assert whole != run(items, other)
    twice = [replace(items[5], index=index, source=str(index)) for index in range(2)]
    first, second = run(twice, setting)
    assert first.tokens != second.tokens


def test_the_batch_has_room_for_all_masks(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    metadata = MarsMetadata(block_size=12, mask_token_id=3)
    wide = replace(
        checkpoint, metadata=metadata, special=replace(checkpoint.special, eos=frozenset())
    )
    items = [EvalItem(str(n), (4 + n,) * 5, None, False) for n in range(10)]
    engine = evaluation_engine(
        wide, items, max_tokens=60, max_num_seqs=10, exact=True, model=copy.deepcopy(model)
    )
    for index, item in enumerate(items):
        options = DecodingOptions(60, Mode.EXACT, outcomes=Outcomes.ALL)
        engine.add(Request(str(index), list(item.prompt), options))
    engine.step()
    assert {output.num_positions for output in engine.step()} == {13**2}
