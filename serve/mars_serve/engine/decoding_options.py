"""The options that a request is decoded with. Imports no Ray, torch or HTTP library."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf, log
from typing import NamedTuple

import numpy as np

from mars_platform.method.mode import Confidence, Mode
from mars_platform.tier import Tier


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    """Its own share of a forward pass failed."""
    TIMEOUT = "timeout"
    """Its first step had not begun within its ``max_queue_s``."""
    REFUSED = "refused"
    """The engine could never run it, its grammar failed, or it may choose no token any more."""


class Outcomes(StrEnum):
    """The outcomes of checking a row's drafts that get masks, in mode exact."""

    ALL = "all"
    """Every outcome, from no draft right to all of them right."""
    LAST = "last"
    """Only the outcome that all drafts are right; after any other, the next step has no drafts."""


class Span(StrEnum):
    """A part of an output that begins and ends at marker tokens of the chat template."""

    THINKING = "thinking"
    """The model thinks: it writes what helps it to find the answer."""
    ANSWER = "answer"
    """All that is in no other span."""
    TOOL_ARGUMENTS = "tool_arguments"
    """A tool call, from the token that begins it."""


@dataclass(frozen=True)
class Spans:
    """How marker tokens divide an output into spans; a marker belongs to the span that it ends."""

    start: Span
    """Span of the first output token."""
    markers: Mapping[Span, Mapping[int, Span]]
    """For each span, the tokens that end it, and the span that follows each of them."""
    thresholds: Mapping[Span, float] = field(default_factory=dict)
    """τ in (0, 1] of the spans that have their own; the others have the request's."""

    def of_tokens(self, span: Span, tokens: Sequence[int]) -> list[Span]:
        """Return the span of each token, of which the first is in ``span``, and of the next one."""
        found = [span]
        for token in tokens:
            span = self.markers.get(span, {}).get(token, span)
            found.append(span)
        return found


def token_set(ids: Collection[int]) -> bytes:
    """Return a set of tokens as bits, the lowest bit first, to be sent and read fast."""
    flags = np.zeros(max(ids, default=-1) + 1, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").tobytes()


class Limits(NamedTuple):
    """Numbers of a sampling as functions take them, where neutral ones keep all tokens."""

    top_k: int
    """Number of likeliest tokens to choose from, at least 1."""
    temperature: float
    """Divisor of the logits, a normal float32 number; 0 is greedy."""
    top_p: float
    """Probability that the likeliest tokens to choose from make up together; above 1 for all."""
    least: float
    """Least scaled logit of a token, if that of the likeliest one is 0."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the model's probabilities; the neutral values choose greedily.

    In every mode the choice is the one that one-token decoding makes behind the same tokens.
    """

    temperature: float = 0.0
    """Divisor of the logits, at least 0; 0 is greedy."""
    top_k: int = 0
    """Number of likeliest tokens to choose from; 0 for all."""
    top_p: float = 1.0
    """Probability that the likeliest tokens to choose from make up together, in (0, 1]."""
    min_p: float = 0.0
    """Least probability of a token as a share of the likeliest one's, in [0, 1]."""
    seed: int = 0
    """Seed of the noise, in [0, 2**63): the same request and seed give the same tokens."""
    repetition_penalty: float = 1.0
    """Factor above 0 that divides the positive logits of tokens in prompt and output and multiplies
    the negative ones."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Amount subtracted from the logit of a token for each time that it stands in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the amount added to its logit."""
    min_tokens: int = 0
    """Output tokens that must come before an end token or stop token may be chosen; a grammar that
    allows nothing else is excepted."""
    allowed_ids: bytes | None = None
    """Tokens that alone may be chosen, as `token_set` returns them; None for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, none of them empty, that the output may not contain."""

    @cached_property
    def limits(self) -> Limits:
        """The numbers that choose among logits, penalised and biased."""
        numbers = np.finfo(np.float32)  # some devices treat numbers below its normal ones as 0
        temperature = min(self.temperature, float(numbers.max))
        return Limits(
            top_k=self.top_k or np.iinfo(np.int64).max,
            temperature=temperature if temperature >= numbers.tiny else 0.0,
            top_p=self.top_p if self.top_p < 1.0 else 2.0,
            least=log(self.min_p) if self.min_p > 0.0 else -inf,
        )

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on how often earlier tokens stand in prompt and output."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1.0 or any(penalties)

    @property
    def limits_tokens(self) -> bool:
        """Whether some tokens may not be chosen, at all or behind certain others."""
        return self.allowed_ids is not None or bool(self.bad_words)

    @property
    def follows_output(self) -> bool:
        """Whether the choice depends on earlier tokens beyond the model's own logits."""
        return self.needs_history or any(len(word) > 1 for word in self.bad_words)

    @property
    def filters_alone(self) -> bool:
        """Whether the choice depends on logits, temperature, filters and noise alone."""
        return (
            not self.needs_history
            and not self.logit_bias
            and self.min_tokens == 0
            and not self.limits_tokens
        )


class GrammarKind(StrEnum):
    """Languages in which a grammar may be written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar that the output behind its thinking, up to its end token, has to match."""

    kind: GrammarKind
    text: str
    control_ids: frozenset[int] = frozenset()
    """Ids of the control tokens that it may ask for; those of clients may ask for none."""


@dataclass(frozen=True)
class Thinking:
    """Where an output's thinking begins and ends, for its budget or for a grammar behind it."""

    begin: int
    end: int
    has_begun: bool
    """Whether the prompt ends inside of thinking."""
    may_begin: bool = True
    """Whether the first token may begin thinking where a grammar holds; without one any token
    may."""
    budget: int | None = None
    """Tokens of thinking behind which its end is forced; None for no limit."""


@dataclass(frozen=True)
class DecodingOptions:
    """One request's decoding options, checked before they reach the engine."""

    max_tokens: int
    """Most output tokens: at least 1, or 0 for a request for ``num_prompt_logprobs`` alone."""
    mode: Mode = Mode.THRESHOLD
    threshold: float | None = 0.95
    """τ in (0, 1], in mode threshold; None follows the engine's live τ from step to step."""
    confidence: Confidence = Confidence.PROBABILITY
    window: int | None = None
    """Masks a step, in mode exact masks of each outcome; None lets the engine choose from 0 to the
    block size."""
    tier: Tier = Tier.DEFAULT
    """Service tier; requests of a higher one are scheduled first."""
    sampling: Sampling = Sampling()
    grammar: GrammarSpec | None = None
    thinking: Thinking | None = None
    """The output's thinking, if it has a budget or if a grammar holds behind it."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output, as the model's own end tokens do; they are part of it."""
    ignore_eos: bool = False
    """Whether the model's own end tokens are tokens like any other, which do not end the output."""
    num_logprobs: int | None = None
    """Number of likeliest tokens to report beside each output token, with the log-probabilities of
    all; None reports no log-probabilities."""
    calibrated: bool = False
    """Whether τ is compared with the confidence that calibration corrected."""
    outcomes: Outcomes | None = None
    """Outcomes that get masks in mode exact; None lets the engine choose, which takes only the last
    one where windows do not adapt."""
    min_threshold: float = 0.0
    """Lowest τ, in [0, 1], that following the live τ may lead to; a threshold of probability."""
    num_prompt_logprobs: int | None = None
    """Number of likeliest tokens to report beside each prompt token but the first, with the
    log-probabilities of all; None reports no log-probabilities."""
    max_queue_s: float | None = None
    """Most seconds to wait for the first step; None for no limit."""
    spans: Spans | None = None
    """Spans of the output with a τ of their own, in mode threshold; None if there are none."""

    reports_rejected: bool = False
    """Whether each output tells the confidences of its tokens and which proposals its pass
    rejected."""

    @cached_property  # since it is read for each row of each step
    def is_plain(self) -> bool:
        """Whether each token is simply the likeliest one."""
        return self.sampling.temperature == 0.0 and self.filters_alone

    @cached_property
    def filters_alone(self) -> bool:
        """Whether each choice depends on logits, temperature, filters and noise alone."""
        return self.sampling.filters_alone and self.grammar is None and self.thinking is None

    @property
    def may_take_several(self) -> bool:
        """Whether some step may give more than one token; τ = 1 is plain AR decoding."""
        if self.mode is Mode.THRESHOLD:
            return self.threshold is None or self.threshold < 1.0
        return self.mode is Mode.EXACT

    def threshold_in(self, span: Span) -> float | None:
        """Return the τ of a span; None follows the engine's live τ."""
        own = self.spans.thresholds if self.spans else {}
        return own.get(span, self.threshold)
