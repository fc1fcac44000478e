"""Turns the fields of a request body into decoding options and stop rules."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from mars_platform.method.mode import Confidence, Mode
from mars_platform.tier import Tier
from mars_serve.api.errors import ApiError, check_token_ids, invalid_value, unsupported_value
from mars_serve.api.incoming.prompts import BadWords
from mars_serve.api.keys import Caller
from mars_serve.api.protocol import CompletionRequest, GenerationRequest, ServiceTier
from mars_serve.api.text import StopRules
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    GrammarSpec,
    Sampling,
    Spans,
    Thinking,
    token_set,
)

NUM_SEEDS = 2**63
"""Seeds lie in ``range(NUM_SEEDS)``."""
_SAMPLING_FIELDS = {
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}
"""Fields with the same name and meaning in `Sampling`, whose defaults stand for absent ones."""


def tier_of(body: GenerationRequest, caller: Caller) -> ServiceTier:
    """Return the tier that a request is served in.

    A request that names none gets ``default``, or else one that its key allows.

    Raises:
        ApiError: status 403: the caller's key does not allow it.
    """
    tier = body.service_tier or ServiceTier.AUTO
    if tier is ServiceTier.AUTO:
        order = (ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY)
        return next(tier for tier in order if tier in caller.tiers)
    if tier not in caller.tiers:
        allowed = ", ".join(sorted(caller.tiers))
        raise ApiError(
            403,
            f"service_tier: {tier.value!r} is not allowed for this key; use one of: {allowed}",
            param="service_tier",
            code="tier_not_allowed",
        )
    return tier


def decoding_options(
    body: GenerationRequest,
    model: ServedModel,
    caller: Caller,
    limits: LimitSettings,
    *,
    spans: Spans | None = None,
    thinking: Thinking | None = None,
    max_tokens: int,
    grammar: GrammarSpec | None,
    bad_words: BadWords = (),
) -> DecodingOptions:
    """Return the engine's options for a request; absent fields get the model's settings.

    Raises:
        ApiError: status 400: a field has a value that cannot be served; 403: the key does not allow
            the tier.
    """
    tier = tier_of(body, caller)
    mode = _mode(body, model, tier)
    floors = _Floors.of(body, model, caller, mode, tier)
    vocabulary = model.checkpoint.num_tokens
    sampling = _sampling(body, vocabulary, max_tokens, bad_words)
    stop_ids = frozenset(body.stop_token_ids or ())
    check_token_ids("stop_token_ids", stop_ids, vocabulary)
    return DecodingOptions(
        max_tokens=max_tokens,
        mode=mode,
        threshold=floors.threshold(body),
        min_threshold=floors.live if floors.follows_live(body) else 0.0,
        confidence=body.confidence or Confidence.PROBABILITY,
        window=_window(body, model, mode),
        tier=Tier(tier),
        sampling=sampling,
        grammar=grammar,
        thinking=thinking,
        stop_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=_num_prompt_logprobs(body),
        calibrated=bool(body.calibrated),
        max_queue_s=limits.queue_wait_s,
        spans=floors.raised(spans),
        reports_rejected=bool(body.return_passes),
    )


def with_seed_of(options: DecodingOptions, index: int) -> DecodingOptions:
    """Return the options of choice number ``index``, whose seed is the first choice's plus
    ``index``.
    """
    seed = (options.sampling.seed + index) % NUM_SEEDS
    return replace(options, sampling=replace(options.sampling, seed=seed))


def draw_seed() -> int:
    """Draw a seed for a request that samples and gives none."""
    return secrets.randbelow(NUM_SEEDS)


def stop_rules(
    body: GenerationRequest, limits: LimitSettings, ends: frozenset[int] = frozenset()
) -> StopRules:
    """Return the strings and tokens that end the output.

    ``ends`` are the model's end tokens, if their text is not left out anyway.

    Raises:
        ApiError: status 400: there are too many strings, or one is too long for this server.
    """
    strings = tuple(body.stop or ())
    if len(strings) > limits.stop_strings:
        reason = f"{len(strings)} strings exceed this server's limit of {limits.stop_strings}"
        raise invalid_value("stop", f"{reason}; leave some out")
    longest = max(map(len, strings), default=0)
    if longest > limits.stop_characters:
        limit = limits.stop_characters
        reason = f"a string of {longest} characters exceeds this server's limit of {limit}"
        raise invalid_value("stop", f"{reason}; shorten it")
    return StopRules(
        strings=strings,
        tokens=frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else ends),
        in_output=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
    )


def modes_of(model: ServedModel) -> list[Mode]:
    """Return the modes of a model; the text alone may draft for one that knows no masks."""
    if model.checkpoint.metadata is not None:
        return list(Mode)
    return [Mode.EXACT, Mode.AR] if model.settings.engine.num_lookup_drafts else [Mode.AR]


def _mode(body: GenerationRequest, model: ServedModel, tier: ServiceTier) -> Mode:
    """Return the request's mode: its own, else its tier's, that of its τ, or the model's."""
    plain = model.checkpoint.metadata is None
    lossless = modes_of(model)
    is_chosen = body.mode is not None or _lowest_threshold(body) < 1.0
    if plain and is_chosen and body.mode not in lossless:
        others = " or ".join(f"'{mode}'" for mode in lossless)
        reason = f"{model.settings.name} is a plain AR checkpoint without mars.json"
        raise unsupported_value(
            "mode" if body.mode else "confidence_threshold",
            f"{reason} and proposes no tokens by masks; use mode {others}",
        )
    if plain:
        return body.mode or Mode.AR
    if tier is not ServiceTier.PRIORITY:
        asks_threshold = body.confidence_threshold is not None
        return body.mode or (Mode.THRESHOLD if asks_threshold else model.default_mode)
    if body.mode is Mode.THRESHOLD:
        reason = "'threshold' may lose quality and service_tier 'priority' may not"
        raise invalid_value("mode", f"{reason}; use 'exact' or 'ar', or another tier")
    return body.mode or Mode.EXACT


def _window(body: GenerationRequest, model: ServedModel, mode: Mode) -> int | None:
    """Return the masks of each pass, or None to let the engine choose them.

    Draws with a seed of the request would otherwise depend on the time that passes take.
    """
    metadata = model.checkpoint.metadata
    most = metadata.block_size if metadata else 0
    if body.window is None:
        is_repeatable = body.seed is not None and bool(body.temperature)
        return most if mode is Mode.THRESHOLD and is_repeatable else None
    if body.window > most:
        reason = f"{body.window} is more than this model's block size, which is {most}; lower it"
        raise invalid_value("window", reason)
    return body.window


@dataclass(frozen=True)
class _Floors:
    """The lowest thresholds of a request, which are thresholds of probability."""

    mode: Mode
    own: float
    """Lowest τ that the request and its key allow; 0 for none."""
    live: float
    """Lowest τ for a request that follows the live τ."""

    @classmethod
    def of(
        cls,
        body: GenerationRequest,
        model: ServedModel,
        caller: Caller,
        mode: Mode,
        tier: ServiceTier,
    ) -> _Floors:
        if mode is not Mode.THRESHOLD:
            return cls(mode, 0.0, 0.0)
        is_flex, tiers = tier is ServiceTier.FLEX, model.settings.tiers
        of_tier = tiers.flex_min_threshold if is_flex else tiers.default_min_threshold
        own = max(body.min_confidence_threshold or 0.0, caller.min_threshold)
        floors = cls(mode, own, max(own, of_tier))
        if own or floors.follows_live(body):
            _check_compared(body)
        return floors

    def follows_live(self, body: GenerationRequest) -> bool:
        asked = body.confidence_threshold
        return self.mode is Mode.THRESHOLD and (asked is None or isinstance(asked, dict))

    def threshold(self, body: GenerationRequest) -> float | None:
        """Return the request's τ by its own confidence, or None to follow the live τ."""
        asked = body.confidence_threshold
        if self.mode is not Mode.THRESHOLD:
            return 1.0
        if asked is None or isinstance(asked, dict):
            return None
        return max(asked, self.own)

    def raised(self, spans: Spans | None) -> Spans | None:
        """Return the spans if some have a τ of their own, which is never below the floor."""
        if spans is None or not spans.thresholds or self.mode is not Mode.THRESHOLD:
            return None
        raised = {span: max(value, self.own) for span, value in spans.thresholds.items()}
        return replace(spans, thresholds=raised)


def _check_compared(body: GenerationRequest) -> None:
    """Refuse a measure of confidence that floors and the live τ say nothing of."""
    other = (body.confidence or Confidence.PROBABILITY) is not Confidence.PROBABILITY
    if other or body.calibrated:
        field = "confidence" if other else "calibrated"
        raise unsupported_value(
            field,
            "the live τ or a floor (its min_confidence_threshold or its key's) holds for this "
            f"request, and these are thresholds of uncorrected probability; leave {field} out, or "
            "give one confidence_threshold for all of the output, and no floor",
        )


def _lowest_threshold(body: GenerationRequest) -> float:
    asked = body.confidence_threshold
    return min(asked.values()) if isinstance(asked, dict) else asked or 1.0


def _num_prompt_logprobs(body: GenerationRequest) -> int | None:
    echoed = None
    if isinstance(body, CompletionRequest) and body.echo:
        echoed = 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs
    wanted = [number for number in (echoed, body.prompt_logprobs) if number is not None]
    return max(wanted, default=None)


def _sampling(
    body: GenerationRequest,
    vocabulary: int,
    max_tokens: int,
    bad_words: BadWords,
) -> Sampling:
    check_token_ids("allowed_token_ids", body.allowed_token_ids or (), vocabulary)
    bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
    check_token_ids("logit_bias", bias, vocabulary)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        reason = f"{min_tokens} is more than {body.limit[0]}, which is {max_tokens}; lower it"
        raise invalid_value("min_tokens", reason)
    temperature = body.temperature or 0.0
    seed = draw_seed() if body.seed is None else body.seed % NUM_SEEDS
    return Sampling(
        temperature=temperature,
        top_k=max(body.top_k or 0, 0),
        seed=seed if temperature > 0 else 0,
        logit_bias=tuple(sorted((token, value) for token, value in bias.items() if value)),
        min_tokens=min_tokens,
        allowed_ids=None if body.allowed_token_ids is None else token_set(body.allowed_token_ids),
        bad_words=bad_words,
        **body.model_dump(include=_SAMPLING_FIELDS, exclude_none=True),
    )
