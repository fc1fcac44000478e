"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence, Mode
from mars_platform.tier import Tier

if TYPE_CHECKING:
    from mars_serve.engine.sampling.grammar import Matcher
    from mars_serve.engine.sampling.sampler import TokenHistory


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    """Its own part of a forward pass failed."""
    TIMEOUT = "timeout"
    """It waited for as long as it may and had not begun."""
    REFUSED = "refused"
    """It can never run."""


class Outcomes(StrEnum):
    """Which outcomes of a check get masks for the step after it, in mode exact."""

    ALL = "all"
    """Each number of drafts that may be accepted."""
    LAST = "last"
    """All of them accepted; after anything else a step has no drafts."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the model's probabilities; the neutral values choose greedily.

    In every mode a token is what one-token decoding would choose behind the same tokens.
    """

    temperature: float = 0.0
    """At least 0; 0 is greedy."""
    top_k: int = 0
    """Only this many likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that make up this share, in (0, 1]."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability, in [0, 1]."""
    seed: int = 0
    """Of the noise, in [0, 2**63): the same request with the same seed gives the same tokens."""
    repetition_penalty: float = 1.0
    """Above 0; divides positive logits of tokens in prompt and output, multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once for each time."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    min_tokens: int = 0
    """Output tokens before an end token or a stop token may come."""

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens before, beyond the model's own logits."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1.0 or any(penalties)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is chosen whatever came before."""
        return (
            self.temperature == 0.0
            and not self.needs_history
            and not self.logit_bias
            and self.min_tokens == 0
        )


class GrammarKind(StrEnum):
    """Languages in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class GrammarSpec:
    """What all of an output has to match, up to its end token."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True)
class DecodingOptions:
    """What a request asks of decoding; checked before it reaches the engine."""

    max_tokens: int
    """Most output tokens, at least 1; 0 where only ``num_prompt_logprobs`` are asked for."""
    mode: Mode = Mode.THRESHOLD
    threshold: float | None = 0.95
    """τ in (0, 1], in mode threshold; None follows the engine's live τ from step to step."""
    confidence: Confidence = Confidence.PROBABILITY
    """What is compared with τ."""
    window: int | None = None
    """Masks a step (in mode exact those of each outcome); None leaves the choice, from 0 to the
    block size, to the engine."""
    tier: Tier = Tier.DEFAULT
    """Requests of a higher tier go first."""
    sampling: Sampling = Sampling()
    grammar: GrammarSpec | None = None
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output beside the model's own end tokens; they are part of it."""
    num_logprobs: int | None = None
    """Report each token's log-probability and those of so many likeliest tokens; None: neither."""
    calibrated: bool = False
    """Compare the confidence that calibration corrected with τ."""
    outcomes: Outcomes | None = None
    """In mode exact; None leaves the choice to the engine, which takes the last one alone where it
    does not adapt windows."""
    min_threshold: float = 0.0
    """Where the live τ is followed: it is not taken below this, in [0, 1]."""
    num_prompt_logprobs: int | None = None
    """Report the log-probability of each prompt token but the first, and those of so many likeliest
    tokens in its place; None: neither."""
    max_queue_s: float | None = None
    """Seconds to wait for the first step at the most; None: no limit."""

    # Asked for each row of each step.

    @cached_property
    def is_plain(self) -> bool:
        """Whether each token is simply the likeliest one."""
        return self.sampling.is_plain and self.grammar is None

    @cached_property
    def may_take_several(self) -> bool:
        """Whether some step may be asked for more than one token; τ = 1 is plain AR decoding."""
        if self.mode is Mode.THRESHOLD:
            return self.threshold is None or self.threshold < 1.0
        return self.mode is Mode.EXACT


@dataclass(frozen=True)
class LiveDecoding:
    """What requests in mode threshold that give no τ of their own are decoded with."""

    threshold: float
    """τ in (0, 1]."""
    flex_threshold: float | None = None
    """τ of those of tier flex; None for the same."""
    is_exact: bool = False
    """Whether mode exact stands in for τ = 1: the same tokens, from fewer and wider passes."""

    def __post_init__(self) -> None:
        for value in (self.threshold, self.threshold_of(Tier.FLEX)):
            if not 0.0 < value <= 1.0:
                raise UserError(
                    f"confidence_threshold: {value} is not in (0, 1]; 1 is plain AR decoding"
                )

    def threshold_of(self, tier: Tier) -> float:
        """τ of a tier's requests."""
        if tier is Tier.FLEX and self.flex_threshold is not None:
            return self.flex_threshold
        return self.threshold


class Draft(NamedTuple):
    """A token proposed by a mask, to be checked."""

    token: int
    confidence: float
    """Probability that the mask gave it, corrected where the model is calibrated."""


@dataclass(eq=False)
class Request:
    """State of one request between two steps. Two requests are equal only if they are the same."""

    id: str
    tokens: list[int]
    """Committed tokens: the prompt, then what was accepted."""
    options: DecodingOptions
    tenant: str = ""
    """Requests share stored prefixes only with those of the same tenant."""
    num_prompt: int = field(init=False)
    num_cached: int = 0
    """Leading tokens whose keys and values are in pages."""
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrival: int = -1
    """Place in the order of arrival; the scheduler gives it."""
    page_keys: list[bytes] = field(default_factory=list)
    """Content keys of the leading full pages, as far as they were needed so far."""
    num_prefix_hit_tokens: int = 0
    """Prompt tokens whose keys and values were found stored, before it was ever preempted."""
    num_preemptions: int = 0
    """Times that it gave its pages up for another."""
    drafts: list[Draft] = field(default_factory=list)
    """What is proposed behind the committed tokens and has to be checked."""
    num_own_drafts: int = 0
    """Leading ones of them that the model's own masks gave."""
    has_drafter: bool = False
    """Whether a second model drafts for it; the engine says so."""
    history: TokenHistory | None = None
    """Of the committed tokens, once a choice has needed it."""
    matcher: Matcher | None = None
    """Where in its grammar the output is; the engine makes it."""
    num_scored: int = 0
    """Leading positions of the prompt whose next token's log-probability has been reported."""
    arrived_at: float | None = None
    """When it came, by ``time.monotonic``; whoever takes it in says so."""
    queue_s: float | None = None
    """Seconds from then to its first step; None before."""
    num_silent: int = 0
    """Replicas that it was sent to before, and that showed no sign of life."""
    mode: Mode = field(init=False)
    """Of the step at hand: the request's own, or exact where that stands in for τ = 1."""
    threshold: float = field(init=False)
    """τ of the step at hand; 1.0 outside mode threshold."""
    needs_masks: bool = field(init=False)
    """Whether the step at hand may take masks at all."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.mode = self.options.mode
        self.follow(LiveDecoding(1.0))

    def follow(self, live: LiveDecoding) -> None:
        """Decode by the request's own τ from the next step on or, where it gives none, by what the
        engine has.
        """
        options, mode = self.options, self.options.mode
        self.threshold = 1.0
        if mode is Mode.THRESHOLD and options.threshold is not None:
            self.threshold = options.threshold
        elif mode is Mode.THRESHOLD:
            self.threshold = max(live.threshold_of(options.tier), options.min_threshold)
            if live.is_exact and self.threshold >= 1.0:
                mode = Mode.EXACT
        if mode is not self.mode:
            self.mode = mode
            self.drafts, self.num_own_drafts = [], 0  # the other mode would take them for its own
        several = mode is Mode.EXACT or self.threshold < 1.0
        self.needs_masks = several and options.window != 0

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncached(self) -> int:
        """Committed tokens that a step still has to feed; at least 1 while running."""
        return len(self.tokens) - self.num_cached

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output at the most."""
        return self.num_prompt + self.options.max_tokens

    @property
    def num_left(self) -> int:
        """Output tokens that may still come."""
        return self.options.max_tokens - self.num_output

    @property
    def leaves_masks(self) -> bool:
        """Whether the engine chooses how many masks it gets."""
        options = self.options
        return self.needs_masks and options.window is None and options.outcomes is None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be reported."""
        wanted = self.options.num_prompt_logprobs is not None
        return wanted and self.num_scored < self.num_prompt - 1

    @property
    def checks_drafts(self) -> bool:
        """Whether a step may feed drafts, and masks for each outcome of checking them."""
        return self.mode is Mode.EXACT or self.has_drafter

    @property
    def takes_unchecked(self) -> bool:
        """Whether tokens are accepted from masks by their confidence."""
        return self.mode is Mode.THRESHOLD

    def num_masks(self, window: int, outcome: int = 0) -> int:
        """Masks to feed for an outcome, at most ``window``: none where they could not be used.

        A pass gives one token without masks, so that masks past ``max_tokens`` would be wasted.
        In mode exact what masks propose is checked in the pass after.
        """
        if not self.needs_masks or (self.has_drafter and self._needs_checked):
            return 0
        pinned = window if self.options.window is None else self.options.window
        given = outcome + (2 if self.mode is Mode.EXACT else 1)
        return max(0, min(pinned, window, self.num_left - given))

    @property
    def _needs_checked(self) -> bool:
        """Behind drafts, masks know nothing of the tokens that the choice depends on."""
        depends = self.options.sampling.needs_history or self.options.grammar is not None
        return self.takes_unchecked and (depends or self.options.num_logprobs is not None)

    def masks(self, window: int) -> tuple[int, ...]:
        """Masks of each outcome, 0 to the drafts to feed, where the engine has no choice."""
        if not self.checks_drafts:
            return (self.num_masks(window),)
        num_drafts = min(len(self.drafts), max(self.num_left, 1) - 1)
        first = 0 if self.options.outcomes is Outcomes.ALL else num_drafts
        return tuple(
            self.num_masks(window, outcome) if outcome >= first else 0
            for outcome in range(num_drafts + 1)
        )


@dataclass(frozen=True)
class EngineStatus:
    """How full an engine is, and what it has done since its start."""

    num_requests: int
    """Requests that wait or run."""
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    """Pages that no request holds, those that cache a prefix included."""
    num_prefix_hit_tokens: int
    """Tokens that were found stored instead of being computed, over all admissions."""
    num_preemptions: int
    num_prompt_tokens: int = 0
    """Of the requests that have begun, those found stored included."""
    num_generated_tokens: int = 0
    num_forward_passes: int = 0
    """Steps."""
    num_row_passes: int = 0
    """Passes of single requests that gave tokens, over all steps."""
    compute_share: float | None = None
    """Real over paced seconds of the steps of the last minute; None where steps are not paced, or
    none was yet."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, from the model's raw logits at temperature 1."""

    logprob: float
    top: list[tuple[int, float]]
    """(token, log-probability) of the likeliest tokens, likeliest first."""
    from_mask: bool
    """Whether a mask gave it, in mode threshold; else it is the exact AR value."""


@dataclass(slots=True)
class StepOutput:
    """What one forward pass gave one request."""

    request_id: str
    tokens: list[int]
    """Accepted tokens, an end token included."""
    finish_reason: FinishReason | None
    num_masks: int = 0
    """Masks that the pass fed for the request."""
    num_positions: int = field(default=0, compare=False)
    """All that it fed: committed tokens, drafts and masks."""
    confidences: list[float] = field(default_factory=list)
    """Of each accepted token, by the request's own measure."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each accepted token, where the request asks for them."""
    error: str | None = None
    """What failed, where the finish reason says so."""
    threshold: float = 1.0
    """τ that the pass used; 1.0 in modes ar and exact."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of further prompt tokens, in order, from the second one on, where the request asks for them.
    A pass that feeds only a part of the prompt may give these and no token."""
    num_prefix_hit_tokens: int = field(default=0, compare=False)
    """On the request's first output, prompt tokens that were found stored; else 0."""
    queue_s: float = field(default=0.0, compare=False)
    """On the request's first output, seconds that it waited for its first step; else 0."""
