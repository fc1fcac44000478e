"""Checks of requests before an engine takes them, and the limits of their time in its queue."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.request import Request


@dataclass(frozen=True)
class Limits:
    """Limits of one engine, by which it refuses requests that it could never run."""

    checkpoint: Checkpoint
    vocabulary: int
    """Number of tokens that the model can choose from."""
    max_length: int
    """Most tokens of prompt and output together."""
    checks_drafts: bool
    """Whether a pass may check drafts, of masks or of another source."""

    def check(self, request: Request) -> None:
        """Refuse a request that could never run."""
        self._check_length(request)
        options = request.options
        self._check_ids(options)
        has_masks, checks_drafts = self.checkpoint.metadata is not None, self.checks_drafts
        if self.checkpoint.masks_are_loras:
            has_masks = checks_drafts = request.lora is not None and request.lora.has_masks
        can_run = checks_drafts if options.mode is Mode.EXACT else has_masks
        if not can_run and options.may_take_several and options.window != 0:
            others = "'ar' or 'exact'" if checks_drafts else "'ar'"
            raise UserError(
                "mode: this model is a plain AR checkpoint without mars.json and cannot decode in "
                f"mode '{options.mode}'; use mode {others}"
            )
        if options.ignore_eos and options.grammar is not None:
            raise UserError(
                "ignore_eos: the end token says that the output matches its grammar, behind which "
                "nothing may follow; leave it out, or leave out the grammar or the required tools"
            )
        if options.calibrated and self.checkpoint.calibration is None:
            raise UserError(
                "calibrated: this model has no calibration.json; run marsray calibrate on it, or "
                "leave the field out"
            )

    def _check_ids(self, options: DecodingOptions) -> None:
        named: dict[str, Iterable[int]] = {
            "stop_token_ids": options.stop_ids,
            "logit_bias": (token for token, _ in options.sampling.logit_bias),
            "bad_words": chain.from_iterable(options.sampling.bad_words),
        }
        for field, ids in named.items():
            if (largest := max(ids, default=0)) >= self.vocabulary:
                raise UserError(
                    f"{field}: token id {largest} is not below {self.vocabulary}, the number of "
                    "the model's tokens; leave it out"
                )

    def _check_length(self, request: Request) -> None:
        if not request.tokens:
            raise UserError("prompt: it has no tokens; give at least one")
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.vocabulary:
            raise UserError(
                f"prompt: token ids must lie between 0 and {self.vocabulary - 1}, the model's "
                "vocabulary; use the model's own tokenizer"
            )
        if request.options.max_tokens == 0 and request.options.num_prompt_logprobs is None:
            raise UserError(
                "max_tokens: it is 0 and no log-probabilities of the prompt are asked for; give at "
                "least 1, or ask for them"
            )
        if request.max_length > self.max_length:
            raise UserError(
                f"max_tokens: {request.num_prompt} prompt tokens and {request.options.max_tokens} "
                f"output tokens make {request.max_length}, more than the {self.max_length} that "
                "fit; shorten the prompt or lower max_tokens"
            )


def check_mask(checkpoint: Checkpoint, vocabulary: int) -> None:
    """Refuse a model without an embedding of its mask token; an adapter brings one along."""
    metadata = checkpoint.metadata
    if metadata is None or checkpoint.adapter is not None or checkpoint.masks_are_loras:
        return
    if metadata.mask_token_id >= vocabulary:
        raise UserError(
            f"mars.json: mask_token_id is {metadata.mask_token_id}, but the model has "
            f"{vocabulary} embeddings; use one checkpoint's files"
        )


_MIN_WATCHED = 64
"""Number of watched requests from which on those are dropped that wait no longer."""


class Deadlines:
    """Requests with a limit of their time in the queue, the most urgent first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._most = _MIN_WATCHED

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request that has been queued, if it sets a limit."""
        assert request.arrived_at is not None
        if request.options.max_queue_s is None:
            return
        if len(self._heap) >= self._most:  # requests hold their tokens, and most begin in time
            self._heap = [entry for entry in self._heap if _waits(entry[2])]
            heapq.heapify(self._heap)
            self._most = max(2 * len(self._heap), _MIN_WATCHED)
        end = request.arrived_at + request.options.max_queue_s
        heapq.heappush(self._heap, (end, request.arrival, request))

    def pop_overdue(self, now: float) -> list[Request]:
        """Return, once each, the requests that have neither begun nor ended in time."""
        overdue = []
        while self._heap and self._heap[0][0] < now:
            request = heapq.heappop(self._heap)[2]
            if _waits(request):
                overdue.append(request)
        return overdue


def _waits(request: Request) -> bool:
    return request.queue_s is None and request.finish_reason is None
