"""The benchmark of agreement counts what the engine does."""

import json

import numpy as np
import pytest
import torch
from bench.agreement import (
    counts_by_depth,
    ends_in_loop,
    exact_passes,
    main,
    mask_drafts,
    right_drafts,
)

from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Outcomes, Sampling
from mars_serve.engine.sampling.noise import gumbel_noise
from mars_serve.measure.evaluation.decoding import (
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


@pytest.fixture(scope="module")
def checkpoint(model):
    metadata = MarsMetadata(block_size=WINDOW, mask_token_id=MASK)
    return Checkpoint(None, model.config, None, metadata, SPECIAL)


@pytest.fixture(scope="module", params=[0.0, 0.7])
def decoded(checkpoint, request):
    """Decode all prompts in modes ar and exact, by the engine."""
    items = [
        EvalItem(str(index), prompt, None, False, index=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    engine = evaluation_engine(
        checkpoint, items, max_tokens=MAX_TOKENS, max_num_seqs=4, exact=True,
        model=build_model(vocab_size=40, seed=1, initializer_range=0.15),
    )  # fmt: skip
    sampling = Sampling(temperature=request.param)
    ar = DecodingSetting(Mode.AR, 1.0, sampling=sampling)
    exact = DecodingSetting(
        Mode.EXACT, 1.0, outcomes=Outcomes.ALL, window=WINDOW, sampling=sampling
    )
    outputs = [run_setting(engine, items, each, max_tokens=MAX_TOKENS) for each in (ar, exact)]
    return request.param, engine, items, outputs


def tokens_of(logits, positions, temperature, seed):
    if not temperature:
        return logits.argmax(-1)
    noise = gumbel_noise(torch.full_like(positions, seed), positions, logits.shape[-1])
    return (logits / temperature + noise).argmax(-1)


def test_drafts_are_those_of_a_pass_behind_each_prefix(model, decoded):
    temperature, engine, items, (outputs, _) = decoded
    item, tokens = items[2], outputs[2].tokens
    expected = []
    for cursor in range(len(tokens)):
        ids = [*item.prompt, *tokens[:cursor], *[MASK] * WINDOW]
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -WINDOW:].clone()
            logits[:, sorted(SPECIAL.never_emitted)] = -torch.inf
        positions = len(item.prompt) + cursor + torch.arange(1, WINDOW + 1)
        drafts = tokens_of(logits, positions, temperature, item.index).tolist()
        num_left = len(tokens) - 1 - cursor
        expected.append((drafts[:num_left] + [-1] * WINDOW)[:WINDOW])
    assert mask_drafts(engine, item, tokens, temperature).tolist() == expected


def test_passes_are_those_of_the_engine(decoded):
    temperature, engine, items, (one_token, exact) = decoded
    total = 0
    for item, ours, theirs in zip(items, one_token, exact, strict=True):
        assert ours.tokens == theirs.tokens
        right = right_drafts(mask_drafts(engine, item, ours.tokens, temperature), ours.tokens)
        assert exact_passes(right) == theirs.num_passes
        total += right.sum()
    assert total > 0, "a model whose masks are never right shows nothing"


def test_no_draft_past_the_end_is_right():
    drafts = np.full((3, 2), 7)
    drafts[2] = -1
    assert right_drafts(drafts, [7, 7, 7]).tolist() == [[True, True], [True, False], [False] * 2]
    counts = counts_by_depth(right_drafts(drafts, [7, 7, 8]))
    assert counts.tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2, 3] * 9, True),
        ([9, 8, 7, *[5] * 24], True),
        ([9, 8, 7, *[5] * 23], False),  # shorter than a loop has to be
        ([*range(20)] * 3, True),
        ([*range(20)] * 2, False),
        ([*range(40)] * 4, False),  # longer than a period may be
        ([*([1, 2] * 20), 3], False),
        ([], False),
    ],
)
def test_a_loop_is_found_at_the_end_only(tokens, loops):
    assert ends_in_loop(tokens) is loops


def test_a_checkpoint_is_measured_greedy_and_sampled(gpt_oss_dir, tmp_path, capsys):
    data, file = tmp_path / "eval.jsonl", tmp_path / "figures.json"
    turns = [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "3"},
    ]
    data.write_text(f"{json.dumps({'messages': turns})}\n" * 2)
    main(str(gpt_oss_dir), [data], items=2, max_tokens=9, threads=1, json_file=file)
    found = json.loads(file.read_text())
    assert [each["temperature"] for each in found["agreement"]] == [0, 0.7, 1]
    assert all(len(each["right"]) == len(each["drafts"]) > 0 for each in found["agreement"])
    assert "depth 1" in capsys.readouterr().out
