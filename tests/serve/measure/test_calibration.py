from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from conversations import read
from decoding.adapters import with_random_head
from decoding.families import build_family
from mars_platform.checkpoint.adapter.draft_head import draft_head_of
from mars_platform.checkpoint.calibration import (
    Calibration,
    DepthCalibration,
    calibrate_depth,
    log_probabilities_at,
    log_probability_curves,
    write_calibration,
)
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens, read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.metadata import DraftHeadSettings, MarsMetadata
from mars_platform.checkpoint.weights import load_model
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.calibration import collect as collection
from mars_serve.measure.calibration import observe as observing
from mars_serve.measure.calibration.collect import measure_calibration
from mars_serve.measure.calibration.observe import (
    Continuation,
    Cursor,
    Observations,
    choose_cursors,
    is_fitted,
    observe,
)

BLOCK_SIZE, MASK = 4, 3
SPECIAL = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset({0, MASK}))
PROMPT = tuple(range(5, 16))
MAX_TOKENS = 12


def engine_of(model: PreTrainedModel, special: SpecialTokens = SPECIAL) -> Engine:
    """Return an engine whose pages and steps are shorter than a text."""
    head = draft_head_of(model)
    metadata = MarsMetadata(
        block_size=BLOCK_SIZE, mask_token_id=MASK, draft_head=head and head.settings
    )
    checkpoint = Checkpoint(None, model.config, None, metadata, special)
    settings = EngineSettings(page_size=4, num_pages=40, max_num_seqs=3, max_num_batched_tokens=65)
    return Engine(checkpoint, settings, model=copy.deepcopy(model))


def observed(
    engine: Engine,
    text: Continuation,
    cursors: Iterable[int],
    on_progress: Callable[[int], None] = lambda _: None,
) -> Observations:
    places = [Cursor(text, index) for index in cursors]
    return Observations.joined(observe(engine, places, on_progress))


@torch.inference_mode()
def observe_one_by_one(
    model: PreTrainedModel,
    text: Continuation,
    cursors: Iterable[int],
    mask: int = MASK,
    special: SpecialTokens = SPECIAL,
) -> Observations:
    """Observe with a pass for each cursor over the tokens before it and all of the masks."""
    depths, curves, correct = [], [], []
    banned, masks = torch.tensor(sorted(special.never_emitted)), [mask] * BLOCK_SIZE
    for cursor in cursors:
        before = [*text.prompt, *text.output[:cursor]]
        logits = model(input_ids=torch.tensor([before + masks])).logits[0, len(before) - 1 :]
        proposed = logits.index_fill(-1, banned, -torch.inf).argmax(-1)
        there = torch.tensor(text.output[cursor : cursor + len(masks) + 1])
        depths.append(torch.arange(len(there)))
        curves.append(log_probability_curves(logits, proposed)[: len(there)])
        correct.append(proposed[: len(there)] == there)
    return Observations(*map(torch.cat, (depths, curves, correct)))


def assert_same(ours: Observations, theirs: Observations) -> None:
    assert ours.depth.equal(theirs.depth)
    assert ours.correct.equal(theirs.correct)
    torch.testing.assert_close(ours.curves, theirs.curves, rtol=1e-4, atol=1e-4)


def well_guessed_text(model: PreTrainedModel, num_tokens: int) -> Continuation:
    """Return an output that masks often guess: at every third length their guesses are taken."""
    output: list[int] = []
    while len(output) < num_tokens:
        threshold = 1e-9 if len(output) % 3 else 1.0
        decoded = reference.decode(
            model,
            [*PROMPT, *output],
            replace(SPECIAL, eos=frozenset()),
            max_tokens=BLOCK_SIZE + 1,
            threshold=threshold,
            num_masks=BLOCK_SIZE,
            mask_token_id=MASK,
        )
        output += decoded.tokens
    return Continuation(PROMPT, tuple(output[:num_tokens]))


@pytest.mark.parametrize(
    "family",
    ["qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3"],
)
def test_an_engine_observes_the_same_as_a_plain_pass_for_each_cursor(family: str) -> None:
    model = build_family(family)  # windows and chunks have 8 tokens
    text = well_guessed_text(model, 30)
    every = observe_one_by_one(model, text, list(range(30)))
    assert_same(observed(engine_of(model), text, range(30)), every)
    for depth in range(1, BLOCK_SIZE + 1):
        correct = every.at(depth).correct
        assert len(correct) == 30 - depth
        assert 0 < correct.sum() < len(correct)


def test_a_head_is_observed_as_it_drafts_behind_right_tokens() -> None:
    model = with_random_head(build_family("qwen2"), DraftHeadSettings(rank=3))
    output = reference.decode(model, PROMPT, SPECIAL, max_tokens=30).tokens
    text, engine = Continuation(PROMPT, tuple(output)), engine_of(model)
    options = DecodingOptions(
        BLOCK_SIZE + 1, Mode.THRESHOLD, 1e-9, window=BLOCK_SIZE, reports_rejected=True
    )
    num_observed = 0
    for index in range(len(output) - BLOCK_SIZE):
        ours = observed(engine, text, [index])
        engine.add(Request("served", [*PROMPT, *output[:index]], options))
        [served] = engine.step()
        assert len(served.tokens) == BLOCK_SIZE + 1
        right = [one == other for one, other in zip(served.tokens, output[index:], strict=False)]
        behind = [depth for depth in range(BLOCK_SIZE + 1) if depth == 0 or right[depth - 1]]
        assert ours.depth.tolist() == behind
        assert ours.correct.tolist() == [right[depth] for depth in behind]
        expected = torch.tensor([served.confidences[depth] for depth in behind])
        sure = log_probabilities_at(ours.curves, 1.0).exp()
        torch.testing.assert_close(sure[1:], expected[1:], rtol=1e-3, atol=1e-6, check_dtype=False)
        num_observed += len(behind)
    assert (len(output) - BLOCK_SIZE) * 2 < num_observed < len(output) * BLOCK_SIZE


def test_some_cursors_are_observed_and_their_logits_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, cursors = build_family("qwen2"), [0, 3, 4, 17, 29]
    text, seen, engine = well_guessed_text(model, 30), list[int](), engine_of(model)
    monkeypatch.setattr(observing, "_MAX_LOGITS", 10 * model.config.vocab_size)
    ours = observed(engine, text, cursors, seen.append)
    assert_same(ours, observe_one_by_one(model, text, cursors))
    assert seen == sorted(seen)
    assert seen[-1] == len(cursors)
    assert observe(engine, [], seen.append) == []


def test_a_conversation_that_the_model_fails_on_is_told() -> None:
    model = build_family("qwen2")
    engine, text = engine_of(model), Continuation(PROMPT, (20, 21, 22))
    with torch.inference_mode():
        engine._runner.model.get_input_embeddings().weight[20] = torch.nan
    assert len(observed(engine, text, [0]).depth) == 3
    with pytest.raises(UserError, match=r"a conversation of 14 tokens \(.* not a number"):
        observed(engine, text, [0, 1])


def test_tokens_that_are_never_emitted_are_never_proposed() -> None:
    model = build_family("qwen2")
    text = well_guessed_text(model, 30)
    free = observed(engine_of(model), text, range(30))
    banned = SpecialTokens(SPECIAL.eos, SPECIAL.never_emitted | {text.output[0]})
    ours = observed(engine_of(model, banned), text, range(30))
    hit = torch.tensor(text.output) == text.output[0]
    assert free.at(0).correct[hit].any()
    assert not ours.at(0).correct[hit].any()


TEXTS = [Continuation((n, n + 1), tuple(range(5 + n % 4))) for n in range(40)]


@pytest.mark.parametrize("max_cursors", [2, 3, 100])
def test_each_half_gets_its_share_of_cursors(max_cursors: int) -> None:
    chosen = choose_cursors(TEXTS, max_cursors)
    assert chosen == choose_cursors(TEXTS, max_cursors)
    halves = [is_fitted(cursor.text.prompt) for cursor in chosen]
    assert halves == [True] * (max_cursors // 2) + [False] * (max_cursors // 2)
    assert len(set(chosen)) == len(chosen)
    assert all(cursor.index < len(cursor.text.output) for cursor in chosen)
    if max_cursors == 100:  # the draw has no pattern
        assert {cursor.index for cursor in chosen} == set(range(8))


def test_the_measured_calibration_equals_a_slow_direct_computation(
    model_dir: Path, sums: Path
) -> None:
    checkpoint, model = read_checkpoint(model_dir), load_model(model_dir)
    items = read(sums, model=model_dir)
    halves: dict[bool, list[Observations]] = {True: [], False: []}
    for item in items:
        decoded = reference.decode(model, item.prompt, checkpoint.special, max_tokens=MAX_TOKENS)
        text = Continuation(item.prompt, tuple(decoded.tokens))
        every = list(range(len(text.output)))
        plain = observe_one_by_one(
            model, text, every, checkpoint.metadata.mask_token_id, checkpoint.special
        )
        halves[is_fitted(item.prompt)].append(plain)
    fitting, checking = Observations.joined(halves[True]), Observations.joined(halves[False])
    seen: list[tuple[str, int, int]] = []
    measured = measure_calibration(
        checkpoint,
        items,
        max_tokens=MAX_TOKENS,
        max_cursors=10000,
        max_num_seqs=5,
        dtype=torch.float32,
        device="cpu",
        on_progress=lambda *progress: seen.append(progress),
    )
    assert measured.num_cursors == len(fitting.at(0).correct) + len(checking.at(0).correct)
    assert measured.calibration.weights == weights_fingerprint(model_dir)
    assert measured.calibration.num_items == len(items)
    for depth, found in enumerate(measured.calibration.depths):
        expected = calibrate_depth(depth, fitting.at(depth), checking.at(depth))
        assert found.model_dump() == pytest.approx(expected.model_dump(), abs=1e-3)
        bins = measured.reliability[depth].before
        assert sum(part.num_tokens for part in bins) == found.num_checked
    assert measured.calibration.depths[0].accuracy == 1.0
    assert ("decode", 12, 12, "1.00 tokens a pass") in seen
    assert seen[-1] == ("calibrate", measured.num_cursors, measured.num_cursors)


def test_a_depth_that_no_output_reaches_keeps_temperature_one(model_dir: Path) -> None:
    def part(depths: list[int]) -> Observations:
        num = len(depths)
        curves = log_probability_curves(torch.eye(num, 9), torch.arange(num))
        return Observations(torch.tensor(depths), curves, torch.arange(num) % 2 == 0)

    checkpoint = read_checkpoint(model_dir)
    measured = collection.fit(checkpoint, part([0, 0, 1, 1]), part([0, 1, 2]), num_items=2)
    found = measured.calibration.depths
    assert [depth.num_fitted for depth in found] == [2, 2, 0, 0, 0]
    assert [depth.num_checked for depth in found] == [1, 1, 1, 0, 0]
    assert [depth.temperature for depth in found[2:]] == [1.0] * 3
    assert measured.reliability[3].after == []


def test_a_calibration_can_be_left_out_and_new_metadata_drops_it(model_dir: Path) -> None:
    depths = (DepthCalibration(temperature=1, num_fitted=0, num_checked=0),) * (BLOCK_SIZE + 1)
    weights = weights_fingerprint(model_dir)
    write_calibration(model_dir, Calibration(weights=weights, num_items=2, depths=depths))
    checkpoint = read_checkpoint(model_dir)
    assert checkpoint.calibration is not None
    assert read_checkpoint(model_dir, with_calibration=False).calibration is None
    assert checkpoint.with_metadata(checkpoint.metadata).calibration is None
