"""Audits what an engine has served: it decodes a sample of the outputs again and compares.

An output that was served with several tokens a pass becomes the drafts of a request in mode exact,
which checks them several a pass up to the first one that differs. The engine steps such a request
only while it has nothing else to do, or nothing that would take longer for it. Outputs that wait to
be audited are held in memory, and neither they nor prompts are ever logged.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mars_autoscale.audit.counts import AuditOutcome, group_of
from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

_MAX_WAITING = 64
"""Most outputs that wait to be audited; the oldest make room for new ones."""
_MAX_WAITING_TOKENS = 2**18
"""Most tokens of those and their prompts, about 10 MB."""
_FAILED = frozenset({FinishReason.ERROR, FinishReason.REFUSED, FinishReason.TIMEOUT})


@dataclass(eq=False)
class _Sample:
    request: Request
    passes: list[tuple[float, int]] = field(default_factory=list)
    """τ and number of tokens of each pass that gave some."""
    served: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
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


class Auditor:
    """Samples outputs of an engine and audits them one at a time, between the engine's steps.

    All methods belong to the thread that steps.
    """

    def __init__(self, engine: Engine, share: float = 0.0, seed: int | None = None) -> None:
        """Start without any output.

        ``share``, in [0, 1], is that of the outputs to audit, of those that may be. Without a
        ``seed`` samples differ between starts.
        """
        self._engine = engine
        self._share = share
        self._random = random.Random(seed)
        self._running: dict[str, _Sample] = {}
        """Sampled requests that are being served, by id."""
        self._waiting = deque[_Sample]()
        self._current: tuple[_Sample, Request] | None = None
        """The output that is audited now, and the request that does it."""
        self._num_begun = 0
        self._outcomes = list[AuditOutcome]()

    @property
    def has_work(self) -> bool:
        """Whether there is an output to audit, or an outcome to report."""
        return bool(self._waiting or self._outcomes)

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
        request = _again(sample, f"audit {self._num_begun}")
        try:
            self._engine.add(request)
        except UserError:  # such as one that fitted only while a setting was another
            return
        self._current = sample, request

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
        return found

    def _take_one(self, sample: _Sample, request: Request, output: StepOutput) -> None:
        has_ended = output.finish_reason is not None
        if output.finish_reason in _FAILED:
            self._current = None
            return
        diverged = _first_difference(sample.served, request, len(output.tokens))
        is_whole = request.num_output >= len(sample.served)
        if not (has_ended or is_whole or diverged is not None):
            return
        if not has_ended:
            self._engine.cancel(request.id)
        self._current = None
        self._outcomes.append(sample.outcome(diverged))


def _is_auditable(request: Request) -> bool:
    """Whether a request may be audited, and τ has the meaning that frontiers give it."""
    options = request.options
    is_usual = options.confidence is Confidence.PROBABILITY and not options.calibrated
    is_frontiers = options.mode is Mode.THRESHOLD and is_usual and request.lora is None
    return request.may_be_audited and is_frontiers


def _again(sample: _Sample, name: str) -> Request:
    served, options = sample.request, sample.request.options
    exact = DecodingOptions(
        max_tokens=len(sample.served),
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


def _first_difference(served: Sequence[int], request: Request, num_new: int) -> int | None:
    start = request.num_output - num_new
    pairs = zip(served[start:], request.tokens[request.num_prompt + start :], strict=False)
    return next((start + i for i, (one, other) in enumerate(pairs) if one != other), None)
