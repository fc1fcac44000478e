from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from decoding.adapters import write_adapter
from mars_platform.checkpoint.adapted import read_model
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.method.mode import Confidence, Mode
from mars_platform.tier import Tier
from mars_serve.api.errors import ApiError
from mars_serve.api.incoming.options import (
    decoding_options,
    draw_seed,
    stop_rules,
    tier_of,
    with_seed_of,
)
from mars_serve.api.keys import Caller
from mars_serve.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from mars_serve.api.text import StopRules
from mars_serve.config.served import ServedModel, with_dtype
from mars_serve.config.settings import LimitSettings, ModelSettings
from mars_serve.engine.decoding_options import DecodingOptions, Sampling, Span, Spans, token_set
from mars_serve.engine.settings import EngineSettings

ANYONE, LIMITS = Caller(""), LimitSettings()


@pytest.fixture(scope="session")
def mars(mars_dir: Path) -> Checkpoint:
    return read_checkpoint(mars_dir)


@pytest.fixture(scope="session")
def plain(plain_dir: Path) -> Checkpoint:
    return read_checkpoint(plain_dir)


def body_of(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="mars", prompt="x", **fields)


def chat_of(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatCompletionRequest(model="mars", messages=messages, **fields)


def options_of(
    checkpoint: Checkpoint,
    body: GenerationRequest,
    *,
    max_tokens: int = 8,
    caller: Caller = ANYONE,
    limits: LimitSettings = LIMITS,
    spans: Spans | None = None,
    **settings: Any,
) -> DecodingOptions:
    entry = ModelSettings(name="mars", path="mars", **({"mode": "threshold"} | settings))
    model = ServedModel(entry, checkpoint, None, 0)
    return decoding_options(
        body, model, caller, limits, max_tokens=max_tokens, grammar=None, spans=spans
    )


def test_absent_fields_give_neutral_options(mars):
    expected = DecodingOptions(8, Mode.THRESHOLD, None, min_threshold=0.9, max_queue_s=120)
    assert options_of(mars, body_of()) == options_of(mars, chat_of()) == expected
    assert expected.is_plain


def test_the_number_of_allowed_tokens_is_bounded():
    assert body_of(allowed_token_ids=[5] * 2**17)
    with pytest.raises(ValidationError, match="at most 131072 items"):
        body_of(allowed_token_ids=[5] * (2**17 + 1))


@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias", "stop_token_ids"])
def test_an_adapters_mask_without_a_logit_cannot_be_named(full_dir, tmp_path, field):
    adapted = read_model(full_dir, write_adapter(full_dir, tmp_path / "adapter"))
    mask = len(adapted.tokenizer) - 1
    assert mask == adapted.metadata.mask_token_id == adapted.config.vocab_size
    value = {str(mask): 1.0} if field == "logit_bias" else [5, mask]
    with pytest.raises(ApiError, match=f"^{field}: token id {mask} is not below {mask}; "):
        options_of(adapted, body_of(**{field: value}))


@pytest.mark.parametrize("make", [body_of, chat_of])
@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0.7, "seed": 5}, Sampling(temperature=0.7, seed=5)),
        ({"temperature": 1, "seed": -1}, Sampling(temperature=1.0, seed=2**63 - 1)),
        ({"temperature": 0, "seed": 5}, Sampling()),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, Sampling(top_p=0.5, top_k=7, min_p=0.1)),
        ({"top_k": -1}, Sampling()),
        ({"top_k": 0}, Sampling()),
        ({"repetition_penalty": 1.5}, Sampling(repetition_penalty=1.5)),
        ({"presence_penalty": -2}, Sampling(presence_penalty=-2.0)),
        ({"frequency_penalty": 2}, Sampling(frequency_penalty=2.0)),
        ({"logit_bias": {"9": -100, "5": 1.5, "6": 0}}, Sampling(logit_bias=((5, 1.5), (9, -100)))),
        ({"min_tokens": 8}, Sampling(min_tokens=8)),
        ({"allowed_token_ids": [9, 5, 9]}, Sampling(allowed_ids=token_set({5, 9}))),
    ],
)
def test_sampling_fields_reach_the_engine(mars, make, fields, sampling):
    assert options_of(mars, make(**fields)).sampling == sampling


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"mode": "threshold"}, None),
        ({"mode": "threshold", "seed": 1}, None),
        ({"mode": "threshold", "temperature": 1}, None),
        ({"mode": "threshold", "temperature": 1, "seed": 1}, 4),
        ({"mode": "exact", "temperature": 1, "seed": 1}, None),
        ({"mode": "threshold", "temperature": 1, "seed": 1, "window": 0}, 0),
        ({"window": 3}, 3),
        ({"window": 4}, 4),
    ],
)
def test_a_window_is_pinned_on_request_and_for_a_seed_that_draws(mars, fields, window):
    assert options_of(mars, body_of(**fields)).window == window


def test_a_window_above_the_block_size_is_refused(mars, plain):
    with pytest.raises(ApiError, match=r"window: 5 is more than .* block size, which is 4"):
        options_of(mars, body_of(window=5))
    assert options_of(plain, body_of(window=0)).window == 0
    with pytest.raises(ApiError, match=r"window: 1 is more than .* which is 0"):
        options_of(plain, body_of(window=1))


def test_a_seed_is_drawn_if_none_is_given(mars):
    seeds = {options_of(mars, body_of(temperature=1)).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in [*seeds, *(draw_seed() for _ in range(20))])
    assert max(seeds) > 2**53, "all bits are drawn"


def test_each_output_of_a_request_has_its_own_seed(mars):
    options = options_of(mars, body_of(temperature=1, seed=2**63 - 1))
    seeds = [with_seed_of(options, index).sampling.seed for index in range(3)]
    assert seeds == [2**63 - 1, 0, 1]


JOINT = {"max_replicas": 2}


@pytest.mark.parametrize(
    ("settings", "fields", "mode"),
    [
        ({}, {}, Mode.EXACT),
        ({}, {"service_tier": "flex"}, Mode.EXACT),
        ({}, {"temperature": 1}, Mode.EXACT),
        ({}, {"confidence_threshold": 0.95}, Mode.THRESHOLD),
        ({}, {"confidence_threshold": {"thinking": 0.9}}, Mode.THRESHOLD),
        ({}, {"confidence_threshold": 0.95, "mode": "exact"}, Mode.EXACT),
        ({}, {"mode": "threshold"}, Mode.THRESHOLD),
        ({"tiers": {"flex_min_threshold": 0.5}}, {}, Mode.EXACT),
        ({"confidence_threshold": 0.95}, {}, Mode.THRESHOLD),
        ({"confidence_threshold": 0.95, "mode": "exact"}, {}, Mode.EXACT),
        ({"autoscaling": JOINT}, {}, Mode.THRESHOLD),
        ({"autoscaling": JOINT, "mode": "exact"}, {}, Mode.EXACT),
        ({"autoscaling": JOINT, "mode": "ar"}, {}, Mode.AR),
    ],
)
def test_nothing_is_lost_unless_a_request_or_the_operator_chooses_that(
    mars, plain, settings, fields, mode
):
    sent = pickle.loads(pickle.dumps(ModelSettings(name="mars", path="mars", **settings)))  # noqa: S301
    served = with_dtype(sent.model_copy(update={"dtype": "float32"}))
    model = ServedModel(served, mars, None, 0)
    found = decoding_options(body_of(**fields), model, ANYONE, LIMITS, max_tokens=8, grammar=None)
    assert found.mode is mode
    if not fields:
        assert options_of(plain, body_of(), **({"mode": None} | settings)).mode is Mode.AR


@pytest.mark.parametrize(
    ("fields", "mode", "threshold"),
    [
        ({"mode": "exact"}, Mode.EXACT, 1.0),
        ({"mode": "exact", "confidence_threshold": 0.5}, Mode.EXACT, 1.0),
        ({"mode": "ar", "min_confidence_threshold": 0.5}, Mode.AR, 1.0),
        ({"confidence_threshold": 0.5}, Mode.THRESHOLD, 0.5),
        ({"mode": "threshold", "confidence_threshold": 0.5}, Mode.THRESHOLD, 0.5),
        ({"min_confidence_threshold": 0.5}, Mode.EXACT, 1.0),
    ],
)
def test_a_request_may_change_the_mode_of_an_exact_model(mars, fields, mode, threshold):
    options = options_of(mars, body_of(**fields), mode="exact")
    assert (options.mode, options.threshold) == (mode, threshold)


@pytest.mark.parametrize(
    ("fields", "caller", "threshold", "floor"),
    [
        ({}, ANYONE, None, 0.9),
        ({"service_tier": "auto"}, ANYONE, None, 0.9),
        ({"service_tier": "flex"}, ANYONE, None, 0.7),
        ({"service_tier": "flex", "min_confidence_threshold": 0.8}, ANYONE, None, 0.8),
        ({"service_tier": "flex"}, Caller("", min_threshold=0.75), None, 0.75),
        ({"min_confidence_threshold": 0.99}, Caller("", min_threshold=0.95), None, 0.99),
        ({"confidence_threshold": 0.2}, ANYONE, 0.2, 0.0),
        ({"confidence_threshold": 0.2}, Caller("", min_threshold=0.6), 0.6, 0.0),
        ({"confidence_threshold": 0.2, "min_confidence_threshold": 0.3}, ANYONE, 0.3, 0.0),
        ({"mode": "ar"}, Caller("", min_threshold=0.6), 1.0, 0.0),
    ],
)
def test_the_threshold_respects_the_highest_floor(mars, fields, caller, threshold, floor):
    options = options_of(mars, body_of(**fields), caller=caller)
    assert (options.threshold, options.min_threshold) == (threshold, floor)


@pytest.mark.parametrize(
    ("fields", "caller", "thresholds", "floor"),
    [
        ({}, ANYONE, {Span.THINKING: 0.2, Span.ANSWER: 1.0}, 0.9),
        ({"service_tier": "flex"}, ANYONE, {Span.THINKING: 0.2, Span.ANSWER: 1.0}, 0.7),
        (
            {"min_confidence_threshold": 0.4},
            Caller("", min_threshold=0.6),
            {Span.THINKING: 0.6, Span.ANSWER: 1.0},
            0.9,
        ),
        ({"mode": "exact"}, ANYONE, None, 0.0),
        ({"service_tier": "priority"}, ANYONE, None, 0.0),
    ],
)
def test_thresholds_by_span_respect_the_floors(mars, fields, caller, thresholds, floor):
    body = body_of(confidence_threshold={"thinking": 0.2, "answer": 1}, **fields)
    spans = Spans(Span.ANSWER, {}, body.confidence_threshold)
    options = options_of(mars, body, caller=caller, spans=spans)
    assert (options.spans and options.spans.thresholds) == thresholds
    assert options.min_threshold == floor
    assert options.threshold == (None if thresholds else 1.0)


def test_a_plain_checkpoint_takes_no_low_threshold_of_a_span(plain):
    spans = Spans(Span.ANSWER, {}, {Span.ANSWER: 1.0})
    body = body_of(confidence_threshold={"answer": 1})
    assert options_of(plain, body, spans=spans).mode is Mode.AR
    with pytest.raises(ApiError, match=r"^confidence_threshold: .* use mode 'ar'"):
        options_of(plain, body_of(confidence_threshold={"answer": 1, "thinking": 0.9}))


def test_the_engine_gets_the_tier(mars):
    tiers = ("priority", "default", "auto", "flex")
    found = [options_of(mars, body_of(service_tier=tier)).tier for tier in tiers]
    assert found == [Tier.PRIORITY, Tier.DEFAULT, Tier.DEFAULT, Tier.FLEX]


def test_priority_refuses_a_mode_that_may_lose_quality(mars, plain):
    with pytest.raises(ApiError, match=r"^mode: 'threshold' .* use 'exact' or 'ar'"):
        options_of(mars, body_of(service_tier="priority", mode="threshold"))
    assert options_of(plain, body_of(service_tier="priority")).mode is Mode.AR


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize(
    ("tiers", "used"),
    [
        (("priority", "default", "flex"), "default"),
        (("priority", "flex"), "flex"),
        (("priority",), "priority"),
    ],
)
def test_without_a_tier_a_request_gets_default_or_one_that_its_key_allows(asked, tiers, used):
    assert tier_of(body_of(service_tier=asked), Caller("", tiers=frozenset(tiers))) == used


def test_the_longest_queue_time_is_a_setting(mars):
    for limit_s in (2, None):
        limits = LimitSettings(queue_wait_s=limit_s)
        assert options_of(mars, body_of(), limits=limits).max_queue_s == limit_s


@pytest.mark.parametrize("default", list(Mode))
def test_a_plain_checkpoint_decodes_one_token_per_pass(plain, default):
    assert options_of(plain, body_of(), mode=default).mode is Mode.AR
    for mode in (Mode.EXACT, Mode.THRESHOLD):
        with pytest.raises(ApiError, match=r"^mode: .* use mode 'ar'"):
            options_of(plain, body_of(mode=mode))


def test_confidence_and_calibration_reach_the_engine(mars):
    body = body_of(confidence="margin", calibrated=True, confidence_threshold=0.8)
    options = options_of(mars, body)
    assert (options.confidence, options.calibrated) == (Confidence.MARGIN, True)


# Floors are thresholds of probability


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"confidence": "margin"}, "confidence"),
        ({"confidence": "margin", "calibrated": True}, "confidence"),
        ({"calibrated": True}, "calibrated"),
        ({"calibrated": True, "confidence_threshold": {"thinking": 0.2}}, "calibrated"),
        (
            {"confidence": "margin", "confidence_threshold": 0.5, "min_confidence_threshold": 0.1},
            "confidence",
        ),
    ],
)
def test_a_confidence_that_floors_say_nothing_of_is_refused_under_one(mars, fields, param):
    pattern = rf"^{param}: the live τ or a floor .* holds .*; leave {param} out, or give one conf"
    with pytest.raises(ApiError, match=pattern) as caught:
        options_of(mars, chat_of(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_keys_floor_holds_whatever_the_confidence(mars):
    caller = Caller("k", min_threshold=0.5)
    with pytest.raises(ApiError, match=r"^calibrated: "):
        options_of(mars, body_of(calibrated=True, confidence_threshold=0.9), caller=caller)
    assert options_of(mars, body_of(confidence_threshold=0.4), caller=caller).threshold == 0.5


@pytest.mark.parametrize("mode", ["ar", "exact"])
def test_any_confidence_is_taken_where_no_threshold_is_compared(mars, mode):
    assert options_of(mars, body_of(confidence="margin", mode=mode)).threshold == 1.0


def test_stop_fields_become_stop_rules(mars):
    fields = {"stop_token_ids": [5, 7, 5], "include_stop_str_in_output": True, "min_tokens": 2}
    body = body_of(stop="end", **fields)
    expected = StopRules(("end",), frozenset({5, 7}), in_output=True, min_tokens=2)
    assert stop_rules(body, LIMITS) == expected
    assert options_of(mars, body).stop_ids == {5, 7}
    assert stop_rules(body_of(stop=["a", "b"]), LIMITS) == StopRules(("a", "b"))
    ends = frozenset({9})
    assert stop_rules(body, LIMITS, ends).tokens == {5, 7, 9}
    ignoring = body_of(**fields, ignore_eos=True)
    assert stop_rules(ignoring, LIMITS, ends).tokens == {5, 7}
    assert options_of(mars, ignoring).ignore_eos


def test_a_plain_model_may_be_drafted_for_by_its_text_alone(plain):
    engine = EngineSettings(num_lookup_drafts=16)
    with pytest.raises(ApiError, match=r"plain AR checkpoint without mars\.json .*use mode 'ar'$"):
        options_of(plain, body_of(mode=Mode.EXACT))
    assert options_of(plain, body_of(), engine=engine).mode is Mode.AR
    assert options_of(plain, body_of(mode=Mode.EXACT), engine=engine).mode is Mode.EXACT
    with pytest.raises(ApiError, match="use mode 'exact' or 'ar'"):
        options_of(plain, body_of(mode=Mode.THRESHOLD), engine=engine)
