"""From a request's body to what the engine is asked for. Knows no HTTP beyond `ApiError`."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

from mars_platform.checkpoint import Checkpoint
from mars_platform.mode import Confidence, Mode
from mars_serve.engine.request import DecodingOptions, GrammarKind, GrammarSpec, Sampling
from mars_serve.errors import ApiError, invalid_value
from mars_serve.protocol import MAX_GRAMMAR_LENGTH, GenerationRequest, StructuredOutputs
from mars_serve.settings import ModelSettings
from mars_serve.text import StopRules

NUM_SEEDS = 2**63

_ANY_OBJECT = '{"type": "object"}'
_REGEX_META = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")


@dataclass(frozen=True)
class Structure:
    """A grammar, and the field of the body that asks for it."""

    field: str
    grammar: GrammarSpec


def decoding_options(
    body: GenerationRequest,
    settings: ModelSettings,
    checkpoint: Checkpoint,
    *,
    max_tokens: int,
    grammar: GrammarSpec | None,
) -> DecodingOptions:
    """What the engine is asked for; a field that the body leaves out has the model's setting.

    Raises:
        ApiError: status 400, naming the field, its value and what it may be.
    """
    mode, threshold = _mode_and_threshold(body, settings, checkpoint)
    return DecodingOptions(
        max_tokens=max_tokens,
        mode=mode,
        threshold=threshold,
        confidence=body.confidence or Confidence.PROBABILITY,
        sampling=_sampling(body, len(checkpoint.tokenizer), max_tokens),
        grammar=grammar,
        stop_ids=_stop_ids(body, len(checkpoint.tokenizer)),
        num_logprobs=body.num_logprobs,
        calibrated=bool(body.calibrated),
    )


def with_seed_of(options: DecodingOptions, index: int) -> DecodingOptions:
    """The same options for output number ``index`` of a request."""
    seed = (options.sampling.seed + index) % NUM_SEEDS
    return replace(options, sampling=replace(options.sampling, seed=seed))


def draw_seed() -> int:
    """A seed for a request that samples and gives none."""
    return secrets.randbelow(NUM_SEEDS)


def stop_rules(body: GenerationRequest) -> StopRules:
    """What ends the text beside the model's own end tokens."""
    return StopRules(
        strings=tuple(body.stop or ()),
        tokens=frozenset(body.stop_token_ids or ()),
        in_output=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
    )


def structure_of(body: GenerationRequest) -> Structure | None:
    """The grammar that a body asks for, in whichever of the ways to ask for one.

    Raises:
        ApiError: status 400: it asks in several ways, or incompletely.
    """
    found = []
    if body.response_format is not None and body.response_format.type != "text":
        found.append(Structure("response_format", _response_grammar(body)))
    if body.structured_outputs is not None:
        grammar = _structured_grammar(body.structured_outputs)
        found.append(Structure("structured_outputs", grammar))
    for name, make in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            found.append(Structure(name, make(name, value)))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise invalid_value(second, f"{first} asks for a structure already; leave one of them out")
    return found[0] if found else None


def json_schema_grammar(field: str, schema: dict[str, Any] | str) -> GrammarSpec:
    """The grammar of a JSON schema, given as an object or as its text.

    Raises:
        ApiError: status 400: the schema is no JSON, or too long.
    """
    if isinstance(schema, str):
        return GrammarSpec(GrammarKind.JSON_SCHEMA, schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError as error:  # NaN and infinity, which Python reads as JSON
        raise invalid_value(field, "the schema has a number that is not finite") from error
    except RecursionError as error:
        raise invalid_value(field, "the schema is nested too deeply; make it flatter") from error
    if len(text) > MAX_GRAMMAR_LENGTH:
        reason = f"the schema has {len(text)} characters; shorten it to {MAX_GRAMMAR_LENGTH}"
        raise invalid_value(field, reason)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _mode_and_threshold(
    body: GenerationRequest, settings: ModelSettings, checkpoint: Checkpoint
) -> tuple[Mode, float]:
    """Effective mode and τ: the request's own, else the model's setting, never below the floor."""
    plain = checkpoint.metadata is None and settings.draft is None
    mode = body.mode or (Mode.AR if plain else settings.mode)
    asked = body.mode is not None or (body.confidence_threshold or 1.0) < 1.0
    if plain and asked and body.mode is not Mode.AR:
        param = "mode" if body.mode else "confidence_threshold"
        raise ApiError(
            400,
            f"{param}: {settings.name} is a plain AR checkpoint without mars.json and decodes one "
            "token a pass; use mode 'ar'",
            param=param,
            code="unsupported_value",
        )
    if mode is not Mode.THRESHOLD:
        return mode, 1.0
    threshold = body.confidence_threshold or settings.confidence_threshold
    return mode, max(threshold, body.min_confidence_threshold or 0.0)


def _sampling(body: GenerationRequest, vocabulary: int, max_tokens: int) -> Sampling:
    bias = body.logit_bias or {}
    _check_ids("logit_bias", bias, vocabulary)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        reason = f"{min_tokens} is more than {body.limit_field}, which is {max_tokens}; lower it"
        raise invalid_value("min_tokens", reason)
    temperature = body.temperature or 0.0
    seed = draw_seed() if body.seed is None else body.seed % NUM_SEEDS
    return Sampling(
        temperature=temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=_given(body.top_p, 1.0),
        min_p=_given(body.min_p, 0.0),
        seed=seed if temperature > 0 else 0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((token, value) for token, value in bias.items() if value)),
        min_tokens=min_tokens,
    )


def _given(value: float | None, neutral: float) -> float:
    return neutral if value is None else value


def _stop_ids(body: GenerationRequest, vocabulary: int) -> frozenset[int]:
    ids = frozenset(body.stop_token_ids or ())
    _check_ids("stop_token_ids", ids, vocabulary)
    return ids


def _check_ids(field: str, ids: dict[int, float] | frozenset[int], vocabulary: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocabulary:
        reason = f"token id {largest} is not below the {vocabulary} known; use the model's own ids"
        raise invalid_value(field, reason)


def _response_grammar(body: GenerationRequest) -> GrammarSpec:
    wanted = body.response_format
    assert wanted is not None
    if wanted.type == "json_object":
        return GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    if wanted.json_schema is None:
        raise invalid_value("response_format", "json_schema is missing; give it with its schema")
    return json_schema_grammar("response_format", wanted.json_schema.schema_)


def _structured_grammar(wanted: StructuredOutputs) -> GrammarSpec:
    name = "structured_outputs"
    found = []
    if wanted.json_ is not None:
        found.append(json_schema_grammar(name, wanted.json_))
    if wanted.json_object:
        found.append(GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT))
    if wanted.regex is not None:
        found.append(GrammarSpec(GrammarKind.REGEX, wanted.regex))
    if wanted.grammar is not None:
        found.append(GrammarSpec(GrammarKind.LARK, wanted.grammar))
    if wanted.choice is not None:
        found.append(_choice_grammar(name, wanted.choice))
    if len(found) != 1:
        names = "json, json_object, regex, grammar and choice"
        raise invalid_value(name, f"{len(found)} of {names} are given; give exactly one")
    return found[0]


def _choice_grammar(field: str, alternatives: list[str]) -> GrammarSpec:
    text = "|".join(_REGEX_META.sub(r"\\\1", each) for each in alternatives)
    if len(text) > MAX_GRAMMAR_LENGTH:
        reason = f"the choices have {len(text)} characters; shorten them to {MAX_GRAMMAR_LENGTH}"
        raise invalid_value(field, reason)
    return GrammarSpec(GrammarKind.REGEX, text)


_GUIDED = {
    "guided_json": json_schema_grammar,
    "guided_regex": lambda _, text: GrammarSpec(GrammarKind.REGEX, text),
    "guided_grammar": lambda _, text: GrammarSpec(GrammarKind.LARK, text),
    "guided_choice": _choice_grammar,
}
