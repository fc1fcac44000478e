import numpy as np
import pytest
import torch
from bench.beds.agreement import (
    Sampled,
    counts_by_depth,
    exact_passes,
    ideal_passes,
    likeliest,
    mask_drafts,
    right_drafts,
)

from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Outcomes, Sampling
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem

MASK, WINDOW, MAX_TOKENS = 3, 4, 45
SPECIAL = SpecialTokens(eos=frozenset({5}), never_emitted=frozenset({MASK, 7}))
PROMPTS = [(11, 12, 13), (20,), (30, 31, 32, 33, 30, 31, 32, 33), (9, 8)]


@pytest.fixture(scope="module")
def model():
    # few tokens to choose from, so that masks are often right
    return build_model(vocab_size=40, seed=1, initializer_range=0.15)


@pytest.fixture(scope="module", params=[0.0, 0.7])
def decoded(model, request):
    """Decode all prompts in modes ar and exact, by the engine."""
    metadata = MarsMetadata(block_size=WINDOW, mask_token_id=MASK)
    checkpoint = Checkpoint(None, model.config, None, metadata, SPECIAL)
    items = [
        EvalItem(str(index), prompt, None, False, index=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    engine = evaluation_engine(
        checkpoint, items, max_tokens=MAX_TOKENS, max_num_seqs=4, exact=True,
        model=build_model(vocab_size=40, seed=1, initializer_range=0.15),
    )  # fmt: skip
    sampling = Sampling(temperature=request.param)
    ar = DecodingSetting(Mode.AR, 1.0, sampling=sampling) if request.param else ONE_TOKEN
    exact = DecodingSetting(
        Mode.EXACT, 1.0, outcomes=Outcomes.ALL, window=WINDOW, sampling=sampling
    )
    outputs = [run_setting(engine, items, each, max_tokens=MAX_TOKENS) for each in (ar, exact)]
    return request.param, items, outputs


def drafts_of(model, item, tokens, temperature):
    choose = Sampled(temperature, item.index) if temperature else likeliest
    return mask_drafts(
        model,
        item.prompt,
        tokens,
        mask_token_id=MASK,
        window=WINDOW,
        never_emitted=SPECIAL.never_emitted,
        choose=choose,
    )


def test_drafts_are_those_of_a_pass_behind_each_prefix(model, decoded):
    temperature, items, (outputs, _) = decoded
    choose = Sampled(temperature, 2) if temperature else likeliest
    item, tokens = items[2], outputs[2].tokens
    expected = []
    for cursor in range(len(tokens)):
        ids = [*item.prompt, *tokens[:cursor], *[MASK] * WINDOW]
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -WINDOW:].clone()
            logits[:, sorted(SPECIAL.never_emitted)] = -torch.inf
        positions = len(item.prompt) + cursor + torch.arange(1, WINDOW + 1)
        expected.append(choose(logits, positions).tolist())
    assert drafts_of(model, item, tokens, temperature).tolist() == expected


def test_passes_are_those_of_the_engine(model, decoded):
    temperature, items, (one_token, exact) = decoded
    total = 0
    for item, ours, theirs in zip(items, one_token, exact, strict=True):
        assert ours.tokens == theirs.tokens
        right = right_drafts(drafts_of(model, item, ours.tokens, temperature), ours.tokens)
        assert exact_passes(right) == theirs.num_passes
        total += right.sum()
    assert total > 0, "a model whose masks are never right shows nothing"


def test_no_draft_past_the_end_is_right():
    drafts = np.full((3, 2), 7)
    assert right_drafts(drafts, [7, 7, 7]).tolist() == [[True, True], [True, False], [False] * 2]
    counts = counts_by_depth(right_drafts(drafts, [7, 7, 8]))
    assert counts.tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize("num", range(1, 14))
def test_an_ideal_drafter_takes_the_passes_of_drafts_that_are_all_right(num):
    tokens = [7] * num
    right = right_drafts(np.full((num, 4), 7), tokens)
    assert exact_passes(right) == ideal_passes(num, 4)
    assert exact_passes(np.zeros((num, 4), bool)) == num
