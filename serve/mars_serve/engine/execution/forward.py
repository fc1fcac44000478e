"""One forward pass over a step's rows, and the tokens accepted from it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.operator import ATTENTION_NAME
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.batch import build_batch
from mars_serve.engine.decoder.decoder import merge_layers, why_unmerged
from mars_serve.engine.decoder.rotation import settle_rotation
from mars_serve.engine.execution.acceptance import (
    Accepted,
    accept,
    accepted_by_row,
    rejected_by_row,
    unpack,
    unpack_groups,
)
from mars_serve.engine.execution.graphs import (
    Capture,
    EagerForward,
    Forward,
    GraphedForward,
    GraphSizes,
)
from mars_serve.engine.execution.linear import pack_linears, tile_linears
from mars_serve.engine.execution.prompt_logprobs import (
    PromptScores,
    next_tokens,
    positions_at_once,
)
from mars_serve.engine.execution.reads import Reads, build_reads
from mars_serve.engine.execution.step_sampling import Reports, sampled_rows
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar_budget import GrammarBudget, StepGrammars
from mars_serve.engine.sampling.sampler import choose_tokens
from mars_serve.engine.scheduled_row import ScheduledRow

_log = logging.getLogger(__name__)

_TILE = 16
"""Rows of every matrix product in batch-invariant mode."""
_NOTHING = Accepted([], [])


@dataclass(frozen=True)
class _StepTensors:
    """Tensors of a step beside the model's own input."""

    reads: Reads | None
    """Description of the logits; None if no row reads any."""
    next_tokens: Tensor | None
    """int64 [scored], the token behind each position that is scored; None if none is."""


@dataclass(frozen=True)
class Launched:
    """A step that may still be running."""

    rows: Sequence[ScheduledRow]
    packed: Tensor | None
    """Result of `accept`; None if no row reads logits."""
    reports: Reports
    scores: PromptScores | None
    """Log-probabilities of prompts; None if no position is scored."""
    grammars: StepGrammars

    def wait(self) -> list[Accepted | Exception]:
        """Return each row's result, with at least one token if the row reads logits.

        If a row's grammar failed or waits, the result is the exception that says so.
        """
        results, outcomes = self._results(), self.grammars.outcomes
        if self.scores is not None:
            scores = self.scores.by_request()
            results = [
                replace(result, prompt_logprobs=scores.get(row.request.id, []))
                for row, result in zip(self.rows, results, strict=True)
            ]
        return [
            outcomes.get(row.request.matcher, result)
            for row, result in zip(self.rows, results, strict=True)
        ]

    def _results(self) -> list[Accepted]:
        if self.packed is None:
            return [_NOTHING] * len(self.rows)
        packed = self.packed.cpu()  # the step's one copy to the host
        reading = [row for row in self.rows if row.reads_logits]
        num_proposals = sum(row.num_group_proposals for row in reading)
        groups = iter(unpack_groups(packed, len(reading), num_proposals))
        accepted = enumerate(unpack(packed, len(reading)))
        results = []
        for row in self.rows:
            result = _NOTHING
            if row.reads_logits:
                index, (tokens, confidences) = next(accepted)
                own_groups = list(islice(groups, row.num_group_proposals))
                result = accepted_by_row(row, tokens, confidences, own_groups)
                result.logprobs = self.reports.report(row.request, tokens)
                if row.request.options.reports_rejected:
                    result.rejected = rejected_by_row(row, packed[index], result)
            results.append(result)
        return results


class ModelRunner:
    """Runs a model, which it owns, over steps."""

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
        """Take over a model; its attention and linear layers are changed in place.

        Args:
            model: on its device and in its type.
            attention: owns the KV cache.
            special: tokens that end a sequence, and tokens that are never emitted.
            mask_token_id: id of the mask; None for a plain AR model.
            batch_invariant: see `EngineSettings`.
            compiled: see `EngineSettings.compile`.
            draw_accepted: see `Engine`.
            temperatures: divisors of the logits by calibration, from depth 0.
        """
        model.set_attn_implementation(ATTENTION_NAME)
        settle_rotation(model)
        if isinstance(attention, PagedAttention) and not compiled:
            reason = why_unmerged(model)
            if reason is None:
                merge_layers(model, attention)
            else:
                _log.info("the model keeps its own layers: %s", reason)
        pack_linears(model, timed=not batch_invariant)
        if batch_invariant:
            tile_linears(model, _TILE)
        self.model = model
        self._forward: Forward = (
            GraphedForward(model, attention, compiled=compiled)
            if isinstance(attention, PagedAttention)
            else EagerForward(model, attention, compiled=compiled)
        )
        self.mask_token_id = mask_token_id
        self._multiple_of = _TILE if batch_invariant else 1
        self._draw_accepted = draw_accepted
        self._ends = special.eos
        self._temperatures = temperatures
        self._grammars = GrammarBudget()
        self._banned = torch.tensor(
            sorted(special.never_emitted), dtype=torch.long, device=model.device
        )

    def run(self, rows: Sequence[ScheduledRow]) -> list[Accepted | Exception]:
        """Run one step and wait for its results."""
        return self.launch(rows).wait()

    @torch.inference_mode()
    def launch(self, rows: Sequence[ScheduledRow]) -> Launched:
        """Start one step; on a GPU this returns while the step runs."""
        batch = build_batch(rows, self.mask_token_id, self._multiple_of)
        reading = [row for row in rows if row.reads_logits]
        grammars = self._grammars.begin([row.request.matcher for row in rows])
        tensors = _StepTensors(
            reads=build_reads(reading, self._temperatures) if reading else None,
            next_tokens=torch.tensor(next_tokens(rows)) if batch.scored else None,
        )
        output = self._forward(batch, tensors)  # the step's one copy to the device
        reads, logits = output.extra.reads, output.logits
        scores = None
        if output.scored is not None and output.extra.next_tokens is not None:
            at_once = positions_at_once(logits.shape[1], logits.device)
            scores = PromptScores.of(
                rows, output.scored, output.extra.next_tokens, self._forward.logits, at_once
            )
        if reads is None:
            return Launched(rows, None, Reports({}), scores, grammars)
        reports = Reports.of(logits, reading)  # before `accept` overwrites the logits
        sampled = sampled_rows(reading, self._ends, grammars, logits.shape[1])
        choose = partial(choose_tokens, rows=sampled) if sampled else None
        packed = accept(logits, reads, self._banned, self._drawn(reading), choose)
        return Launched(rows, packed, reports, scores, grammars)

    def free_memory(self) -> None:
        """Free what a failed step left behind, and all that torch keeps for later."""
        gc.collect()  # modules with hooks keep their last input in a cycle of references
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def capture(
        self,
        sizes: GraphSizes,
        capture: Capture,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Capture graphs, see `GraphedForward.capture`; do nothing without paged attention."""
        if isinstance(self._forward, GraphedForward):
            self._forward.capture(sizes, capture, on_progress)

    def _drawn(self, rows: Sequence[ScheduledRow]) -> Tensor | None:
        """Draw the number of tokens that each row accepts, in place of the acceptance rules."""
        if self._draw_accepted is None:
            return None
        counts = [self._draw_accepted(row.request, row.num_proposed) for row in rows]
        return torch.tensor(counts, device=self.model.device)
