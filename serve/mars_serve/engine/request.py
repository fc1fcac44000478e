"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mars_platform.checkpoint.manifest import describe, refuse_links_out
from mars_platform.checkpoint.metadata import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, METADATA_FILE
from mars_platform.errors import UserError, one_line
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason, Span
from mars_serve.engine.decoding_plan import DecodingPlan

if TYPE_CHECKING:  # at run time these would load torch into processes that only pass requests on
    from torch import Tensor

    from mars_platform.checkpoint.adapter.lora import LoraWeights
    from mars_serve.engine.sampling.grammar import Matcher
    from mars_serve.engine.sampling.sampler import Bias, TokenHistory
    from mars_serve.engine.sampling.thinking_rules import ThinkingRules
    from mars_serve.engine.sampling.token_rules import TokenRules


MAX_AUDIT_DRAFTS = 32
"""Most drafts of an audit in a step. They have no masks, and most of them are right."""
_AUDIT_RANK = min(tier.rank for tier in Tier) - 1


class LoraReference(NamedTuple):
    """A LoRA adapter that requests name."""

    name: str
    """Name that requests give as their model."""
    path: str
    """Directory of its files, on each machine with a replica."""
    sum: str
    """SHA-256 of its weights and configuration, by which the adapter is told from others."""
    has_masks: bool = False
    """Whether it drafts by a mask row of its own."""

    @classmethod
    def to(cls, name: str, path: str | Path) -> LoraReference:
        """Return a reference to a LoRA adapter as its files are now.

        Raises:
            UserError: a file is missing, a pipe or a link to one elsewhere, or cannot be read.
        """
        directory, digest = Path(path), hashlib.sha256()
        has_masks = (directory / METADATA_FILE).exists()
        names = [ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, *([METADATA_FILE] if has_masks else [])]
        if absent := [each for each in names if not (directory / each).is_file()]:
            raise UserError(
                f"adapter: {directory} holds no file {absent[0]}; name the directory of a LoRA "
                "adapter in peft's format"
            )
        refuse_links_out(directory, "adapter")
        try:
            for each in names:
                digest.update(bytes.fromhex(describe(directory / each).sha256))
        except OSError as error:
            raise UserError(
                f"adapter: {directory} cannot be read ({one_line(error)}); let the server's user "
                "read it"
            ) from error
        return cls(name, str(path), digest.hexdigest(), has_masks)


class Draft(NamedTuple):
    """A proposed token that a later step has to check."""

    token: int
    confidence: float
    """Probability of the token, corrected if the model is calibrated."""


@dataclass(slots=True)
class RowState:
    """The slots in which a row finds and leaves the state of recurrent layers.

    A slot holds the state behind some tokens of a text and a log of the drafts behind these. Slot
    number ``num_slots``, one behind the last, is the state before any text; nobody writes to it.
    """

    read: int
    """Slot of the state before the row."""
    num_right: int
    """Leading drafts of the log of ``read`` that are tokens of the text before the row."""
    write: int
    """Slot for the state behind the row's committed tokens, and for the log of its drafts."""
    snapshots: list[tuple[int, int]]
    """Further slots to write, with an empty log: pairs of a count, of ``num_right`` and the row's
    committed tokens together, and the slot for the state behind so many of these; at least 1."""


@dataclass(eq=False)
class Request:
    """State of one request between two steps. A request is equal only to itself."""

    id: str
    tokens: list[int]
    """Committed tokens: the prompt, then the accepted output."""
    options: DecodingOptions
    tenant: str = ""
    """Name of the tenant; only requests of the same tenant share cached prefixes."""
    cache_salt: str = ""
    """Text that keeps cached prefixes apart within a tenant: only equal ones share."""
    lora: LoraReference | None = None
    """LoRA adapter that acts on the request's tokens; None for the model itself."""
    key: str = ""
    """Name of the API key, of whose share of the queue the request is served."""
    session: str | None = None
    """Name of the conversation or user, whose requests prefer one replica."""
    deadline_s: float | None = None
    """Seconds from arrival within which the request is to begin; None for the model's objective."""
    waited_s: float = 0.0
    """Seconds that the request waited before it was sent to an engine."""
    is_streamed: bool = True
    """Whether the outputs are wanted as they come; otherwise they are sent together at the end."""
    num_generated: int = 0
    """Output tokens that have come from the engine, read or not, as its sender counts them."""
    may_be_audited: bool = False
    """Whether the output may be decoded again to see what several tokens a pass have changed."""
    audited: Sequence[int] = ()
    """Output that was served before and that this request audits. It supplies the drafts as long as
    the output follows it, and the request runs only while nothing else needs the engine."""
    num_prompt: int = field(init=False)
    num_cached: int = 0
    """Leading tokens whose keys and values are in the KV cache."""
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    """Pages of layers that see the last tokens only; see `WindowPages`, as for the next."""
    state: RowState | None = None
    """Slots of recurrent layers; None for a model without any, and before the first step."""
    rolling: int = 0
    """Pages before the newest snapshot of its state that is not at a lasting border."""
    lora_slot: int = -1
    """Slot that the request's LoRA adapter is held in while it runs; -1 for none."""
    lora_weights: LoraWeights | None = None
    """Weights of the LoRA adapter, set by the engine."""
    num_shared: int = 0
    """Leading full pages that others had computed before."""
    sampling_s: float = 0.0
    """CPU seconds of choosing its tokens in its last step, without those of its grammar."""
    num_choices: int = 0
    """Positions that were read in that step, whether or not tokens had to be chosen there."""
    last_turn: int = 0
    """Number of its last step of those in which the rows of a key take turns."""
    finish_reason: FinishReason | None = None
    arrival: int = -1
    """Number in the order of arrival, set by the scheduler."""
    page_keys: list[bytes] = field(default_factory=list)
    num_prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache before the request was first preempted."""
    num_preemptions: int = 0
    drafts: list[Draft] = field(default_factory=list)
    """Drafts behind the committed tokens, to be checked."""
    num_own_drafts: int = 0
    """Leading drafts that the model's own masks gave; the others come from the request's own text,
    or from the output that it audits."""
    num_lookup_drafts: int = 0
    """Drafts at the end that come from the request's own text."""
    history: TokenHistory | None = None
    """Counts of the committed tokens, if choices need them, set by the engine."""
    rules: TokenRules | None = None
    """Tokens that may be chosen, if some may not, set by the engine."""
    bias: Bias | None = None
    """Biases of the logits, if there are any, set by the engine."""
    ends: Tensor | None = None
    """Tokens that may not be chosen before ``min_tokens``, if there are any, set by the engine."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the output, set by the engine."""
    thinking: ThinkingRules | None = None
    """Rules of the output's thinking, if that is bounded, set by the engine."""
    matcher: Matcher | None = None
    """Position of the output in the request's grammar, set by the engine."""
    num_scored: int = 0
    """Leading prompt positions whose next token's log-probability has been reported."""
    arrived_at: float | None = None
    """Time of arrival by ``time.monotonic``, set by whoever receives the request."""
    queue_s: float | None = None
    """Seconds from arrival to the first step; None before it."""
    failed_on: tuple[str, ...] = ()
    """Names of replicas that died, or did not answer, while they had the request."""
    quarantine_tokens: int = 0
    """Output tokens up to which the request is alone in its steps, because an engine died in a step
    that may have held it; 0 if none did."""
    span: Span = field(init=False)
    """Span of the next output token; always the answer if no span has a τ of its own."""
    plan: DecodingPlan = field(init=False)
    """The plan of what the rows of the request feed, and of which tokens are accepted."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.span = self.options.spans.start if self.options.spans else Span.ANSWER
        self.plan = DecodingPlan.of(self.options, self.span, LiveDecoding(1.0))

    def follow(self, live: LiveDecoding) -> None:
        """Plan the next steps by the request's own mode and τ, or ``live`` if it gives no τ."""
        before, self.plan = self.plan, DecodingPlan.of(self.options, self.span, live)
        if self.plan.checks_drafts is not before.checks_drafts:
            self.set_drafts([])

    def enter_span(self, tokens: Sequence[int], live: LiveDecoding) -> bool:
        """Plan the next steps for the span behind newly committed tokens.

        Returns:
            Whether it is another span than before the tokens.
        """
        before = self.span
        if self.options.spans is not None:
            self.span = self.options.spans.of_tokens(before, tokens)[-1]
        if self.span is not before:
            self.follow(live)
        return self.span is not before

    @property
    def cache_root(self) -> tuple[str, str, str]:
        """Texts that are equal for requests that may share cached prefixes; see `root_key`."""
        return self.tenant, self.cache_salt, self.lora.sum if self.lora else ""

    def charge(self, seconds: float) -> None:
        """Count the CPU seconds of sampling a token in the current step."""
        self.sampling_s += seconds

    @property
    def choosing_s(self) -> float:
        """CPU seconds of choosing its tokens in its last step, by its grammar, too."""
        return self.sampling_s + ((self.matcher.last_s or 0.0) if self.matcher is not None else 0.0)

    @property
    def is_audit(self) -> bool:
        """Whether this request audits another's output, and nobody waits for its own."""
        return bool(self.audited)

    @property
    def rank(self) -> int:
        """Rank by which requests are scheduled: that of the tier, or below all tiers for audits."""
        return _AUDIT_RANK if self.is_audit else self.options.tier.rank

    def take_audited_drafts(self, most: int) -> None:
        """Draft ``most`` tokens of what was served next, if the output has followed it so far."""
        start = self.num_output
        follows = self.tokens[self.num_prompt :] == list(self.audited[:start])
        if follows:
            tokens = self.audited[start : start + most]
            self.drafts, self.num_own_drafts = [Draft(token, 1.0) for token in tokens], 0

    def set_drafts(self, own: Sequence[Draft], looked_up: Sequence[Draft] = ()) -> None:
        """Replace all drafts by those of masks, then those of the request's own text, up to the
        first that would end the output.
        """
        drafts = [*own, *looked_up]
        end = next((place for place, each in enumerate(drafts, 1) if self._is_end(each)), None)
        self.drafts = drafts[:end]
        self.num_own_drafts = min(len(own), len(self.drafts))
        self.num_lookup_drafts = len(self.drafts) - self.num_own_drafts

    @property
    def drafts_end(self) -> bool:
        """Whether the output ends if all drafts are right."""
        return bool(self.drafts) and self._is_end(self.drafts[-1])

    def _is_end(self, draft: Draft) -> bool:
        return draft.token in self.end_ids

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_moves(self) -> int:
        """Number of times that the request was sent to another replica."""
        return len(self.failed_on)

    @property
    def is_quarantined(self) -> bool:
        """Whether no other request may share a step with this one."""
        return self.num_output < self.quarantine_tokens

    @property
    def num_uncached(self) -> int:
        """Committed tokens that are not in the KV cache; at least 1 while the request runs."""
        return len(self.tokens) - self.num_cached

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output together."""
        return self.num_prompt + self.options.max_tokens

    @property
    def num_left(self) -> int:
        """Output tokens that may still be accepted."""
        return self.options.max_tokens - self.num_output

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt remain to be reported."""
        wanted = self.options.num_prompt_logprobs is not None
        return wanted and self.num_scored < self.num_prompt - 1

    def in_prefill(self, window: int) -> bool:
        """Whether more tokens are uncached than a step with ``window`` masks can accept."""
        return self.num_uncached > window + 1
