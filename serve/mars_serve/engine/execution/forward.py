"""One forward pass over the work of a step, and the tokens accepted from it.

Lays the work out, runs the model on it once and applies the acceptance rule on the device. Knows
nothing of queues or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.attention.gathered import ATTENTION_NAME, Attention
from mars_serve.engine.attention.varlen import VarlenAttention
from mars_serve.engine.batch import StepBatch, build_batch
from mars_serve.engine.execution.acceptance import Reads, accept, unpack, unpack_coming
from mars_serve.engine.execution.graphs import (
    Capture,
    EagerForward,
    Forward,
    GraphedForward,
    GraphSizes,
)
from mars_serve.engine.execution.linear import pack_linears, tile_linears
from mars_serve.engine.execution.prompt_logprobs import PromptScores, next_tokens, positions_at_once
from mars_serve.engine.execution.step_sampling import (
    Reports,
    first_reads,
    sampled_rows,
    temperatures,
)
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.sampling.sampler import choose_tokens
from mars_serve.engine.scheduled_row import ScheduledRow

_TILE = 16
"""Rows of every matrix product where results must not depend on neighbours."""
_MEASURES = {measure: place for place, measure in enumerate(Confidence)}


@dataclass(slots=True)
class Accepted:
    """What a pass gave one request: tokens and, of each, its confidence."""

    tokens: list[int]
    confidences: list[float]
    drafts: list[Draft] = field(default_factory=list)
    """Where drafts were checked, what the masks of the outcome propose behind the tokens."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each token, where the request wants them."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of further tokens of the prompt, where the request wants them."""


_NOTHING = Accepted([], [])


@dataclass(frozen=True)
class Launched:
    """A step that may still be running."""

    works: Sequence[ScheduledRow]
    packed: Tensor | None
    """What `accept` gave; None where no work reads logits."""
    reports: Reports
    scores: PromptScores | None
    """What is read of prompts; None where nothing is."""

    def wait(self) -> list[Accepted]:
        """For each work, at least one token where it reads logits, and none elsewhere."""
        found = self._tokens()
        if self.scores is None:
            return found
        scores = self.scores.by_request()
        return [
            replace(each, prompt_logprobs=scores.get(work.request.id, []))
            for work, each in zip(self.works, found, strict=True)
        ]

    def _tokens(self) -> list[Accepted]:
        if self.packed is None:
            return [_NOTHING] * len(self.works)
        packed = self.packed.cpu()  # the one copy to the host
        reading = [work for work in self.works if work.reads_logits]
        coming = iter(unpack_coming(packed, len(reading), sum(work.num_coming for work in reading)))
        accepted = iter(unpack(packed, len(reading)))
        return [
            self._accepted(work, *next(accepted), list(islice(coming, work.num_coming)))
            if work.reads_logits
            else _NOTHING
            for work in self.works
        ]

    def _accepted(
        self, work: ScheduledRow, tokens: list[int], confidences: list[float], coming: list[Draft]
    ) -> Accepted:
        """The drafts are those of the group that saw as many drafts as were accepted."""
        logprobs = self.reports.report(work.request, tokens)
        if not coming:
            return Accepted(tokens, confidences, logprobs=logprobs)
        outcome = len(tokens) - 1
        begin = sum(work.masks[:outcome])
        drafts = coming[begin : begin + work.masks[outcome]]
        return Accepted(tokens, confidences, drafts, logprobs)


@dataclass(frozen=True)
class FailedLaunch:
    """A step that could not be started."""

    works: Sequence[ScheduledRow]
    error: Exception

    def wait(self) -> list[Accepted]:
        """Raise what kept it from starting."""
        raise self.error


class ModelRunner:
    """Owns the model; its attention owns the pages."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: Attention,
        special: SpecialTokens,
        mask_token_id: int | None,
        *,
        batch_invariant: bool = False,
        compiled: bool = False,
        draw_accepted: Callable[[Request, int], int] | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """Take a model over: its attention and its linear layers are changed in place.

        Args:
            model: on its device and in its type.
            attention: owns the pages.
            special: tokens that end a sequence, and those never emitted.
            mask_token_id: id of the mask, where there is one.
            batch_invariant: see `EngineSettings`.
            compiled: see `EngineSettings.compile`.
            draw_accepted: see `Engine`.
            temperatures: what calibration divides logits by, from depth 0.
        """
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linears(model, timed=not batch_invariant)
        if batch_invariant:
            tile_linears(model, _TILE)
        self.model = model
        self._forward: Forward = (
            GraphedForward(model, attention, compiled=compiled)
            if isinstance(attention, VarlenAttention)
            else EagerForward(model, attention, compiled=compiled)
        )
        self.mask_token_id = mask_token_id
        self._multiple_of = _TILE if batch_invariant else 1
        self._draw_accepted = draw_accepted
        self._ends = special.eos
        self._temperatures = temperatures
        self._banned = torch.tensor(
            sorted(special.never_emitted), dtype=torch.long, device=model.device
        )

    def run(self, works: Sequence[ScheduledRow]) -> list[Accepted]:
        """Run one step: `launch`, and wait for what it gives."""
        return self.launch(works).wait()

    @torch.inference_mode()
    def launch(self, works: Sequence[ScheduledRow]) -> Launched:
        """Start one step. On a GPU this returns while it runs."""
        batch = build_batch(works, self.mask_token_id, self._multiple_of)
        reading = [work for work in works if work.reads_logits]
        extra = self._reads_on_host(reading) if reading else []
        logits, tensors, scores = self._run_model(works, batch, extra)  # the one copy from the host
        if not reading:
            return Launched(works, None, Reports({}), scores)
        reads = _reads_on_device(reading, tensors)
        reports = Reports.of(logits, reading)  # before they are overwritten
        rows = sampled_rows(reading, self._ends)
        choose = partial(choose_tokens, rows=rows) if rows else None
        packed = accept(logits, reads, self._banned, self._drawn(reading), choose)
        return Launched(works, packed, reports, scores)

    def _run_model(
        self, works: Sequence[ScheduledRow], batch: StepBatch, extra: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], PromptScores | None]:
        """Logits, ``extra`` on the device, and what is read of prompts."""
        if not batch.scored:
            return *self._forward(batch, extra), None
        tokens = torch.tensor(next_tokens(works))
        logits, (tokens, *tensors), hidden = self._forward.with_scored(batch, [tokens, *extra])
        at_once = positions_at_once(logits.shape[1], logits.device)
        scores = PromptScores.of(works, hidden, tokens, self._forward.logits, at_once)
        return logits, tensors, scores

    def capture(
        self,
        sizes: GraphSizes,
        capture: Capture,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """See `GraphedForward.capture`; without paged attention there is nothing to do."""
        if isinstance(self._forward, GraphedForward):
            self._forward.capture(sizes, capture, on_progress)

    def _reads_on_host(self, works: Sequence[ScheduledRow]) -> list[Tensor]:
        """The tensors of `Reads`; see `_reads_on_device`."""
        counts = [work.num_proposed for work in works]
        sizes = [work.num_proposed + work.num_coming for work in works]
        found = temperatures(works, self._temperatures)
        return [
            torch.tensor([row for row, size in enumerate(sizes) for _ in range(size)]),
            torch.tensor([depth for count in counts for depth in range(count)]),
            torch.tensor(counts),
            torch.tensor([work.request.threshold for work in works]),
            torch.tensor([_MEASURES[_measure(work)] for work in works]),
            torch.tensor(found or [], dtype=torch.float32),
            *(torch.tensor(part, dtype=torch.long) for part in _checks(works)),
        ]

    def _drawn(self, works: Sequence[ScheduledRow]) -> Tensor | None:
        if self._draw_accepted is None:
            return None
        counts = [self._draw_accepted(work.request, work.num_proposed) for work in works]
        return torch.tensor(counts, device=self.model.device)


def _checks(works: Sequence[ScheduledRow]) -> list[list[int]]:
    """`Reads.now`, `Reads.coming` and `Reads.drafts`, or nothing where all reads are of this step
    and no draft is fed.
    """
    if not any(work.num_drafts or work.num_coming for work in works):
        return []
    starts = first_reads(works)
    counts = [work.num_proposed for work in works]
    now = [start + i for start, count in zip(starts, counts, strict=False) for i in range(count)]
    coming = sorted(set(range(starts[-1])) - set(now))
    num_depths = max(counts) - 1
    return [now, coming, [token for work in works for token in _drafts(work, num_depths)]]


def _drafts(work: ScheduledRow, num_depths: int) -> list[int]:
    tokens = [draft.token for draft in work.request.drafts[: work.num_drafts]]
    return tokens + [-1] * (num_depths - len(tokens))


def _measure(work: ScheduledRow) -> Confidence:
    """What is taken as the confidence of a row's tokens; that of drafts is a probability."""
    request = work.request
    return Confidence.PROBABILITY if request.mode is Mode.EXACT else request.options.confidence


def _reads_on_device(works: Sequence[ScheduledRow], tensors: list[Tensor]) -> Reads:
    """What `ModelRunner._reads_on_host` gave, with what is known on the host."""
    row, depth, num_proposed, thresholds, measures, found, *checks = tensors
    max_depth = max(work.num_proposed for work in works)
    now, coming, drafts = checks or (None, None, None)
    return Reads(
        row=row,
        depth=depth,
        num_proposed=num_proposed,
        thresholds=thresholds,
        measures=measures,
        used=frozenset(map(_measure, works)),
        max_depth=max_depth,
        temperatures=found if len(found) else None,
        now=now,
        coming=coming,
        drafts=None if drafts is None else drafts.view(len(works), max_depth - 1),
    )
