"""Log-probabilities of prompts against transformers' own logits, however the prompt is fed."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from decoding.engines import Engines, Models, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution import prompt_logprobs as scoring
from mars_serve.engine.outputs import StepOutput, TokenLogprob
from mars_serve.engine.request import Request

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
SCORE = DecodingOptions(0, num_prompt_logprobs=3)
TALK = DecodingOptions(12, threshold=0.1)


@pytest.fixture
def model(tiny_model: Models) -> PreTrainedModel:
    return tiny_model("qwen2")


@pytest.fixture
def engine(model: PreTrainedModel, make_engine: Engines) -> Engine:
    return make_engine(model, SPECIAL)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 64) for _ in range(length)]


def scores_of(outputs: list[StepOutput]) -> list[TokenLogprob]:
    return [entry for output in outputs for entry in output.prompt_logprobs]


def assert_right(model: PreTrainedModel, request: Request, outputs: list[StepOutput]) -> None:
    """Compare the log-probabilities with an ordinary forward pass over prompt and output."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([request.tokens])).logits[0]
    expected = logits.log_softmax(-1)
    found, num_top = scores_of(outputs), request.options.num_prompt_logprobs or 0
    assert len(found) == request.num_prompt - 1
    for position, entry in enumerate(found):
        line = expected[position]
        own = line[request.tokens[position + 1]]
        assert entry.logprob == pytest.approx(float(own), abs=1e-4)
        assert entry.rank == 1 + int((line > own).sum())
        values, tokens = line.topk(num_top)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert not entry.from_mask


@pytest.mark.parametrize("length", [1, 2, 30, 200])  # the last takes four steps
@pytest.mark.parametrize("mode", list(Mode))
def test_a_prompt_is_scored_without_output(
    model: PreTrainedModel, engine: Engine, length: int, mode: Mode
) -> None:
    request = Request("one", prompt_of(length), replace(SCORE, mode=mode))
    outputs = run(engine, [request])["one"]
    assert_right(model, request, outputs)
    assert request.num_output == 0
    assert [output.tokens for output in outputs] == [[]] * len(outputs)
    reasons = [output.finish_reason for output in outputs]
    assert reasons == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    assert (len(outputs) > 1) == (length > 65)


@pytest.mark.parametrize("mode", list(Mode))
def test_prompt_and_output_are_scored_beside_other_requests(
    model: PreTrainedModel, engine: Engine, mode: Mode
) -> None:
    both = replace(TALK, mode=mode, num_prompt_logprobs=2, num_logprobs=1)
    requests = [
        Request("both", prompt_of(90, 1), both),
        Request("talk", prompt_of(40, 2), TALK),
        Request("score", prompt_of(70, 3), replace(SCORE, num_prompt_logprobs=0)),
        Request("long", prompt_of(100, 4), replace(TALK, mode=mode)),
    ]
    outputs = run(engine, requests)
    for name, request in (("both", requests[0]), ("score", requests[2])):
        assert_right(model, request, outputs[name])
    for name in ("talk", "long"):
        assert scores_of(outputs[name]) == []
        assert all(output.tokens for output in outputs[name])
    given = [entry for output in outputs["both"] for entry in output.logprobs]
    assert len(given) == requests[0].num_output == TALK.max_tokens
    plain = Request("plain", prompt_of(90, 1), replace(both, num_prompt_logprobs=None))
    run(engine, [plain])
    assert plain.tokens == requests[0].tokens


def test_a_cached_prefix_is_computed_again_for_its_scores(
    model: PreTrainedModel, engine: Engine
) -> None:
    prompt = prompt_of(60, 5)
    run(engine, [Request("first", list(prompt), TALK)])
    score, same = Request("score", list(prompt), SCORE), Request("same", [*prompt, 9], SCORE)
    outputs = run(engine, [score, same])
    assert score.num_prefix_hit_tokens == same.num_prefix_hit_tokens == 0
    assert_right(model, score, outputs["score"])
    assert_right(model, same, outputs["same"])
    new = prompt_of(60, 6)
    run(engine, [Request("stores", list(new), SCORE)])
    again = Request("again", list(new), TALK)
    first, *others = run(engine, [again])["again"]
    assert first.num_prefix_hit_tokens == again.num_prefix_hit_tokens == 56
    assert all(output.num_prefix_hit_tokens == 0 for output in others)


def test_preemption_reports_no_score_twice(model: PreTrainedModel, make_engine: Engines) -> None:
    engine = make_engine(model, SPECIAL, num_pages=40, page_size=4)
    engine.add(victim := Request("victim", prompt_of(130, 7), SCORE))
    outputs = engine.step()
    hurry = replace(TALK, tier=Tier.PRIORITY)
    urgent = [Request(f"urgent{i}", prompt_of(60, 8 + i), hurry) for i in range(3)]
    for request in urgent:
        engine.add(request)
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    assert victim.num_preemptions > 0
    assert_right(model, victim, [output for output in outputs if output.request_id == "victim"])


def test_the_size_of_parts_does_not_change_scores(
    model: PreTrainedModel, make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(make_engine(model, SPECIAL), [Request("one", prompt_of(100), SCORE)])["one"]
    monkeypatch.setattr(scoring, "_MAX_PART_CPU", 64 * 7)  # seven positions at a time
    parts = run(make_engine(model, SPECIAL), [Request("one", prompt_of(100), SCORE)])["one"]
    numbers = [[entry.logprob for entry in scores_of(outputs)] for outputs in (whole, parts)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def test_a_prompt_with_a_nan_ends_alone(model: PreTrainedModel, make_engine: Engines) -> None:
    poisoned = copy.deepcopy(model)
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[63] = torch.nan
    sound = Request("sound", [token % 60 for token in prompt_of(90)], SCORE)
    broken = Request("broken", [*sound.tokens[:70], 63, *sound.tokens[:30]], SCORE)
    outputs = run(make_engine(poisoned, SPECIAL), [broken, sound])
    assert broken.finish_reason is FinishReason.ERROR
    assert all(entry.logprob == entry.logprob for entry in scores_of(outputs["broken"]))
    assert_right(model, sound, outputs["sound"])


def test_a_request_for_neither_tokens_nor_scores_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="max_tokens: it is 0"):
        engine.check(Request("one", [5], DecodingOptions(0)))
