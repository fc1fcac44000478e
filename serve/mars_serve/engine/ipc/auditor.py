"""Audits what an engine has served: it decodes a sample of the outputs again and compares.

An output that was served with several tokens a pass becomes the drafts of a request in mode exact,
which checks them several a pass and goes on by itself behind the first one that differs. The engine
steps such a request only while it has nothing else to do, or nothing that would take longer for it.
Outputs that wait to be audited are held in memory, and neither they nor prompts are ever logged.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from mars_autoscale.audit.counts import AuditOutcome, group_of
from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence, LiveDecoding, Mode
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

Check = Callable[[Sequence[int], Sequence[int]], bool | None]
"""Function from a prompt's and an output's tokens to whether the output is right, or None if it
cannot tell."""

_MAX_WAITING = 64
"""Most outputs that wait to be audited; the oldest make room for new ones."""
_MAX_WAITING_TOKENS = 2**18
"""Most tokens of those and their prompts, about 10 MB."""
_MAX_CHECKS = 16
"""Most outputs that wait for the checker; others are not checked."""
_CHECK_S = 10.0
"""Seconds for which a verdict is waited for; the checker may hang."""
_COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_FAILED = frozenset({FinishReason.ERROR, FinishReason.REFUSED, FinishReason.TIMEOUT})

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sample:
    """An output that is audited."""

    request: Request
    passes: list[tuple[float, int]] = field(default_factory=list)
    """τ and number of tokens of each pass that gave some."""
    served: tuple[int, ...] = ()
    """The output, once it is known."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.request.num_prompt + len(self.served)

    def outcome(self, diverged: int | None) -> AuditOutcome:
        """Return the outcome; ``diverged`` is the index of the first token that differs, if any."""
        options = self.request.options
        group = group_of(self.request.tenant)
        found = AuditOutcome(options.tier, options.is_plain, group=group)
        left = len(self.served) if diverged is None else diverged + 1
        for threshold, num_tokens in self.passes:
            num_compared = min(num_tokens, left)
            left -= num_compared
            if threshold < 1 and num_compared:
                found.tokens[threshold] = found.tokens.get(threshold, 0) + num_compared
                if diverged is not None and not left:
                    found.diverged_at = threshold
            if not left:
                break
        return found


@dataclass(eq=False)
class _PendingCheck:
    """An outcome that waits for the checker."""

    outcome: AuditOutcome
    verdicts: Future[tuple[bool | None, bool | None]]
    """Whether the output was right as served, and whether that of mode exact is."""
    until_s: float
    """Time by ``time.monotonic`` up to which it waits."""

    @property
    def is_over(self) -> bool:
        return self.verdicts.done() or time.monotonic() >= self.until_s

    def completed(self) -> AuditOutcome:
        """Return the outcome, with the verdicts if they have come."""
        if self.verdicts.done():
            self.outcome.was_right, self.outcome.is_right = self.verdicts.result()
        else:
            self.verdicts.cancel()  # without effect on one that runs
        return self.outcome


class Auditor:
    """Samples outputs of an engine and audits them one at a time, between the engine's steps.

    All methods belong to the thread that steps.
    """

    def __init__(
        self,
        engine: Engine,
        share: float = 0.0,
        check: Check | None = None,
        seed: int | None = None,
    ) -> None:
        """Start without any output.

        ``share``, in [0, 1], is that of the outputs to audit, of those that may be. ``check``
        judges outputs, in a thread of its own. Without a ``seed`` samples differ between starts.
        """
        self._engine = engine
        self._share = share
        self._check = check
        self._random = random.Random(seed)
        self._running: dict[str, _Sample] = {}
        """Sampled requests that are being served, by id."""
        self._waiting = deque[_Sample]()
        self._current: tuple[_Sample, Request] | None = None
        """The output that is audited now, and the request that does it."""
        self._diverged: int | None = None
        """Index of the first token of the present audit that differs; None if none has yet."""
        self._num_begun = 0
        self._outcomes = list[AuditOutcome]()
        self._pool = ThreadPoolExecutor(1, "checker")
        self._checks = list[_PendingCheck]()

    @property
    def has_work(self) -> bool:
        """Whether there is an output to audit, or an outcome to report."""
        return bool(self._waiting or self._outcomes) or any(each.is_over for each in self._checks)

    # Requests that are served

    def come(self, request: Request) -> None:
        """Decide whether a request's output will be audited."""
        if _is_auditable(request) and self._random.random() < self._share:
            self._running[request.id] = _Sample(request)

    def stepped(self, output: StepOutput) -> None:
        """Note what a pass gave a request."""
        sample = self._running.get(output.request_id)
        if sample is not None and output.tokens:
            sample.passes.append((output.threshold, len(output.tokens)))

    def gone(self, request: Request) -> None:
        """Let a request's output wait to be audited, if it was sampled and can be compared."""
        sample = self._running.pop(request.id, None)
        if sample is None or request.finish_reason in _FAILED:
            return
        if all(threshold >= 1 for threshold, _ in sample.passes):
            return
        num_served = sum(num_tokens for _, num_tokens in sample.passes)
        sample.served = tuple(request.tokens[request.num_prompt :][:num_served])
        self._waiting.append(sample)
        while len(self._waiting) > _MAX_WAITING or self._num_waiting_tokens > _MAX_WAITING_TOKENS:
            self._waiting.popleft()

    @property
    def _num_waiting_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self._waiting)

    # Audits

    def begin(self) -> None:
        """Begin the next audit if none runs; to be called between two steps."""
        if self._current is not None or not self._waiting:
            return
        sample = self._waiting.pop()  # the latest, whose pages are the likeliest to be cached
        self._num_begun += 1
        request = _again(sample, f"audit {self._num_begun}", to_the_end=self._is_checked(sample))
        try:
            self._engine.add(request)
        except UserError:  # such as one that fitted only while a setting was another
            return
        self._current, self._diverged = (sample, request), None

    def take(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Take audits' outputs out of a step's, and return the others; call it before the next."""
        if self._current is None:
            return outputs
        sample, request = self._current
        ours = [output for output in outputs if output.request_id == request.id]
        for output in ours:
            self._take_one(sample, request, output)
        return [output for output in outputs if output.request_id != request.id]

    def take_outcomes(self) -> list[AuditOutcome]:
        """Return the outcomes since the last call."""
        found, self._outcomes = self._outcomes, []
        over = [each for each in self._checks if each.is_over]
        self._checks = [each for each in self._checks if each not in over]
        return found + [each.completed() for each in over]

    def close(self) -> None:
        """Wait for no further outcome."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take_one(self, sample: _Sample, request: Request, output: StepOutput) -> None:
        has_ended = output.finish_reason is not None
        if output.finish_reason in _FAILED:
            self._current = None
            return
        if self._diverged is None:
            self._diverged = _first_difference(sample.served, request, len(output.tokens))
            if self._diverged is not None and not has_ended:
                _let_go(request)
        is_whole = request.num_output >= len(sample.served)
        is_known = is_whole if self._diverged is None else not self._is_checked(sample)
        if not (has_ended or is_known):
            return
        if not has_ended:
            self._engine.cancel(request.id)
        self._current = None
        self._conclude(sample, request)

    def _is_checked(self, sample: _Sample) -> bool:
        """Whether the checker judges an output; one that was cut short is none of mode exact's."""
        return self._check is not None and sample.request.finish_reason in _COMPLETE

    def _conclude(self, sample: _Sample, request: Request) -> None:
        outcome = sample.outcome(self._diverged)
        if not self._is_checked(sample) or len(self._checks) >= _MAX_CHECKS:
            self._outcomes.append(outcome)
            return
        prompt = request.tokens[: request.num_prompt]
        own = sample.served if self._diverged is None else request.tokens[request.num_prompt :]
        verdicts = self._pool.submit(self._judge, prompt, sample.served, own)
        self._checks.append(_PendingCheck(outcome, verdicts, time.monotonic() + _CHECK_S))

    def _judge(
        self, prompt: Sequence[int], served: Sequence[int], own: Sequence[int]
    ) -> tuple[bool | None, bool | None]:
        """Return whether an output is right as served and in mode exact; runs in a thread."""
        assert self._check is not None
        try:
            was_right = self._check(prompt, served)
            return was_right, was_right if own is served else self._check(prompt, own)
        except Exception as error:
            # its message may hold the text, and no text may be logged
            _log.error("audit.checker failed with %s; an output stays unchecked", type(error))
            return None, None


def _is_auditable(request: Request) -> bool:
    """Whether a request may be audited, and τ has the meaning that frontiers give it."""
    options = request.options
    is_usual = options.confidence is Confidence.PROBABILITY and not options.calibrated
    is_frontiers = options.mode is Mode.THRESHOLD and is_usual and request.lora is None
    return request.may_be_audited and is_frontiers


def _again(sample: _Sample, name: str, *, to_the_end: bool) -> Request:
    """Return the request, with the id ``name``, that decodes a prompt again in mode exact.

    If ``to_the_end``, the whole output of mode exact is wanted.
    """
    served, options = sample.request, sample.request.options
    exact = DecodingOptions(
        max_tokens=options.max_tokens if to_the_end else len(sample.served),
        mode=Mode.EXACT,
        threshold=1.0,
        window=0,  # what was served supplies the drafts
        tier=options.tier,
        sampling=options.sampling,
        grammar=options.grammar,
        thinking=options.thinking,
        stop_ids=options.stop_ids,
        ignore_eos=options.ignore_eos,
    )
    request = Request(
        name,
        served.tokens[: served.num_prompt],
        exact,
        tenant=served.tenant,
        cache_salt=served.cache_salt,
        audited=sample.served,
    )
    if served.matcher is not None:
        request.matcher = served.matcher.restarted()
    return request


def _let_go(request: Request) -> None:
    """Let an audit draft by the model's masks, as what was served supplies no more drafts."""
    request.options = replace(request.options, window=None)
    request.follow(LiveDecoding(1.0))


def _first_difference(served: Sequence[int], request: Request, num_new: int) -> int | None:
    """Return the index of the first token that differs among a request's latest ones."""
    start = request.num_output - num_new
    pairs = zip(served[start:], request.tokens[request.num_prompt + start :], strict=False)
    return next((start + i for i, (one, other) in enumerate(pairs) if one != other), None)
