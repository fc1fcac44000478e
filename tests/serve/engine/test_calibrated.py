"""Calibrated confidence in the engine: the number compared with τ, and the value of drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conftest import Trained

from decoding.engines import run as run_requests
from mars_platform.checkpoint.calibration import Calibration, DepthCalibration
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.items import read_items

MAX_TOKENS, NUM_PROMPTS = 30, 12
TEMPERATURES = (1.0, 0.5, 1.5, 3.0, 6.0)
SIZES = EngineSettings(max_num_seqs=8, num_pages=96, enable_prefix_caching=False)
THRESHOLD = DecodingOptions(MAX_TOKENS, threshold=0.9, window=4)
EXACT = DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.LAST)


@pytest.fixture(scope="module")
def plain(trained: Trained) -> Checkpoint:
    return read_checkpoint(trained.model)


@pytest.fixture(scope="module")
def checkpoint(plain: Checkpoint) -> Checkpoint:
    depths = [
        DepthCalibration(temperature=value, num_fitted=1, num_checked=0) for value in TEMPERATURES
    ]
    calibration = Calibration(weights="", num_items=1, depths=tuple(depths))
    return replace(plain, calibration=calibration)


@pytest.fixture(scope="module")
def prompts(trained: Trained, plain: Checkpoint) -> list[list[int]]:
    path = trained.data / "eval.jsonl"
    length = plain.max_length
    items = read_items([path], plain.tokenizer, max_length=length, max_items=NUM_PROMPTS)
    return [list(item.prompt) for item in items]


def run(
    engine: Engine, prompts: list[list[int]], options: list[DecodingOptions]
) -> tuple[list[Request], list[StepOutput]]:
    requests = [
        Request(str(index), list(prompt), options[index % len(options)])
        for index, prompt in enumerate(prompts)
    ]
    outputs = [output for each in run_requests(engine, requests).values() for output in each]
    assert all(output.error is None for output in outputs)
    return requests, outputs


def outputs_of(requests: list[Request]) -> list[list[int]]:
    return [request.tokens[request.num_prompt :] for request in requests]


def test_the_corrected_confidence_is_compared_with_the_threshold(
    trained: Trained, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    """Recomputed for each pass by plain transformers, with the logits divided by depth."""
    model, metadata = load_model(trained.model).eval(), checkpoint.metadata
    assert metadata is not None
    options = replace(THRESHOLD, calibrated=True, reports_rejected=True)
    [request], passes = run(Engine(checkpoint, SIZES), prompts[:1], [options])
    begin = request.num_prompt
    for output in passes:
        ids = [*request.tokens[:begin], *[metadata.mask_token_id] * output.num_masks]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, begin - 1 :]
        temperatures = torch.tensor(TEMPERATURES[: len(logits)])
        shares = (logits / temperatures[:, None]).softmax(-1)
        sure = [shares[depth, token] for depth, token in enumerate(output.tokens)]
        assert output.confidences == pytest.approx([float(each) for each in sure], abs=1e-4)
        assert all(each >= options.threshold for each in sure[1:])
        begin += len(output.tokens)
    assert any(len(output.tokens) > 1 for output in passes)


def test_only_requests_that_want_it_are_calibrated(
    plain: Checkpoint, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    calibrated = replace(THRESHOLD, calibrated=True)
    mixed, _ = run(Engine(checkpoint, SIZES), prompts, [THRESHOLD, calibrated])
    raw, passes = run(Engine(plain, SIZES), prompts, [THRESHOLD])
    asked, others = run(Engine(checkpoint, SIZES), prompts, [calibrated])
    assert outputs_of(mixed)[::2] == outputs_of(raw)[::2]
    assert outputs_of(mixed)[1::2] == outputs_of(asked)[1::2]
    assert len(others) > len(passes)  # deep masks are far less sure of themselves


def test_exact_stays_exact(
    plain: Checkpoint, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    expected, _ = run(Engine(plain, SIZES), prompts, [replace(EXACT, mode=Mode.AR)])
    layouts = [replace(EXACT, outcomes=outcomes) for outcomes in Outcomes]
    layouts += [replace(EXACT, window=0), replace(EXACT, calibrated=True)]
    requests, _ = run(Engine(checkpoint, SIZES), prompts, layouts)
    assert outputs_of(requests) == outputs_of(expected)


def test_calibration_makes_drafts_less_sure(
    plain: Checkpoint, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    confidences = []
    for each in (plain, checkpoint):
        engine, request = Engine(each, SIZES), Request("one", list(prompts[0]), EXACT)
        engine.add(request)
        engine.step()
        confidences.append([draft.confidence for draft in request.drafts])
    raw, calibrated = confidences
    assert calibrated[0] > raw[0]
    assert calibrated[3] < raw[3]


def test_without_calibration_it_is_refused(plain: Checkpoint, prompts: list[list[int]]) -> None:
    request = Request("one", list(prompts[0]), replace(THRESHOLD, calibrated=True))
    with pytest.raises(UserError, match=r"calibrated: .*marsray calibrate"):
        Engine(plain, SIZES).check(request)
