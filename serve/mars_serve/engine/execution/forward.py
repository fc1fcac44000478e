"""One forward pass over a step's rows, and the tokens accepted from it."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.draft_head import DraftHead, draft_head_of
from mars_platform.checkpoint.adapter.lora import LoraWeights
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.mixing.bind import ATTENTION_NAME
from mars_platform.mixing.probe import PREFIX, Probe
from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.mixed import InPlace
from mars_serve.engine.batch import COARSE, FINE, build_batch
from mars_serve.engine.decoder.adapter import adapt_layers, step_adapters
from mars_serve.engine.decoder.merged import merge_layers
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.device.transfer import HostCopy
from mars_serve.engine.execution.acceptance import Accepted, accept, num_accepted
from mars_serve.engine.execution.graphs import (
    Capture,
    CapturedGraphs,
    EagerForward,
    Forward,
    ForwardOutput,
    GraphedForward,
    GraphSizes,
)
from mars_serve.engine.execution.linear import pack_linears, tile_linears
from mars_serve.engine.execution.native_choice import NativeChoice
from mars_serve.engine.execution.prompt_logprobs import (
    PromptScores,
    next_tokens,
    positions_at_once,
)
from mars_serve.engine.execution.proposals import Reads, build_reads, propose, unpack
from mars_serve.engine.execution.step_sampling import Reports, reported, sampled_rows
from mars_serve.engine.kernels.native import LANES, native_for
from mars_serve.engine.request import Request, RowState
from mars_serve.engine.sampling.grammar_budget import GrammarBudget, StepGrammars
from mars_serve.engine.sampling.sampler import choose_tokens
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.states.slots import States

_log = logging.getLogger(__name__)

OnLogits = Callable[[Tensor, Sequence[ScheduledRow]], None]
"""Function called in each step with the logits [reads, vocabulary] before any rule of sampling,
valid during the call, and the rows that read them, in order; again if the step is repeated because
it failed. A draft head has acted on those of masks that are of use."""
_TILE = 16
"""Rows of every matrix product in batch-invariant mode."""
_NOTHING = Accepted([], [])


@dataclass(frozen=True)
class Launched:
    """A step that may still be running."""

    rows: Sequence[ScheduledRow]
    proposals: HostCopy | None
    """Table of `propose`, with the reads of all rows; None if no row reads logits."""
    counts: list[int] | None
    """Drawn numbers of direct reads that each row accepts; None for the rules. Rows that read no
    logits have none."""
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
        if self.proposals is None:
            return [_NOTHING] * len(self.rows)
        tokens, confidences = unpack(self.proposals.wait())  # the step's one copy to the host
        counts = None if self.counts is None else iter(self.counts)
        results, begin = [], 0
        for row in self.rows:
            result = _NOTHING
            if row.reads_logits:
                end = begin + row.num_reads
                own = tokens[begin:end], confidences[begin:end]
                count = num_accepted(row, *own) if counts is None else next(counts)
                result = accept(row, *own, count, is_drawn=counts is not None)
                result.logprobs = self.reports.report(row.request, count)
                begin = end
            results.append(result)
        return results


class ModelRunner:
    """Runs a model, which it owns, over steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        probe: Probe,
        attention: Attention,
        states: States | None,
        special: SpecialTokens,
        mask_token_id: int | None,
        *,
        max_length: int,
        batch_invariant: bool = False,
        draw_accepted: Callable[[Request, int], int] | None = None,
        temperatures: Sequence[float] | None = None,
        num_slots: int = 0,
        max_rank: int = 0,
    ) -> None:
        """Take over a model on its device and in its type; attention and linear layers are changed.

        ``probe`` has the model's own logits, which it has to give over pages as well; ``states``
        are the slots of recurrent layers, if there are any, and ``temperatures`` divisors of the
        logits by calibration, from depth 0.

        Raises:
            UserError: the model does not give the logits of its own forward pass over pages; the
                message names its family.
        """
        model.set_attn_implementation(ATTENTION_NAME)
        native = None if batch_invariant else native_for(model.device, model.dtype)
        if isinstance(attention, InPlace) or not batch_invariant:
            sizes = {"num_slots": num_slots, "rank": max_rank}
            is_fixed = isinstance(attention, InPlace)
            adapt_layers(model, mask_token_id, is_fixed=is_fixed, **sizes)
            if not is_fixed and states is None:
                num_merged = merge_layers(model, native)
                _log.info("layers with merged products: %d", num_merged)
        pack_linears(model, native, timed=not batch_invariant)
        if batch_invariant:
            tile_linears(model, _TILE)
        self.model, self.adapters = model, step_adapters(model)
        banned = sorted(special.never_emitted)
        # A function of C++ writes to their logits without looking.
        assert set(banned) <= set(range(probe.logits.shape[-1])), "banned tokens have logits"
        self._banned = torch.tensor(banned, dtype=torch.long, device=model.device)
        self._head = draft_head_of(model)
        if self._head is not None:
            self._head.float()  # in bfloat16, many of the likeliest tokens would tie
            self._head.widen(-self._head.previous.shape[1] % LANES)
        self._choice: NativeChoice | None = None
        if native is not None and not isinstance(attention, InPlace):
            self._choice = NativeChoice(native, self._head, self._banned)
        self._graphed: GraphedForward | None = None  # unless attention reads pages in place
        if isinstance(attention, InPlace):
            self._graphed = GraphedForward(model, attention, self._banned, states)
        self._forward: Forward = self._graphed or EagerForward(model, attention, states)
        self._states = states
        self.mask_token_id = mask_token_id
        self._padding = _TILE if batch_invariant else 1, COARSE if self._graphed else FINE
        self._draw_accepted = draw_accepted
        self._temperatures = temperatures
        self._grammars = GrammarBudget()
        self.on_logits: OnLogits | None = None
        tokens = probe.tokens[:max_length]
        probe.check("over pages", partial(self._prompt_logits, tokens, attention.page_size))

    @torch.inference_mode()
    def _prompt_logits(self, tokens: list[int], page_size: int) -> Tensor:
        """Return the logits behind a prompt's tokens but the last, computed in several steps."""
        request = Request("check", tokens, DecodingOptions(1, num_prompt_logprobs=0))
        request.pages = list(range(-(-len(tokens) // page_size)))  # nothing else holds any yet
        request.window_pages = request.pages
        found = []
        for slot, most in enumerate((PREFIX, len(tokens))):
            if not request.scores_prompt:
                break
            if self._states is not None:
                request.state = RowState(slot - 1 if slot else self._states.num_slots, 0, slot, [])
            row = ScheduledRow(request, min(most, request.num_uncached), (0,), reads_logits=False)
            batch = build_batch([row], None, *self._padding)
            output = self._forward(batch, None, next_tokens([row]))
            found.append(self._forward.logits(output.scored))
            request.num_cached += row.num_tokens
            request.num_scored = request.num_cached
        return torch.cat(found)

    def run(self, rows: Sequence[ScheduledRow]) -> list[Accepted | Exception]:
        """Run one step and wait for its results."""
        return self.launch(rows).wait()

    @torch.inference_mode()
    def launch(self, rows: Sequence[ScheduledRow]) -> Launched:
        """Start one step; on a GPU this returns while the step runs."""
        batch = build_batch(rows, self.mask_token_id, *self._padding)
        reading = [row for row in rows if row.reads_logits]
        grammars = self._grammars.begin([row.request.matcher for row in rows])
        reads = build_reads(reading, self._temperatures) if reading else None
        following = next_tokens(rows) if batch.scored else ()
        output = self._forward(batch, reads, following)  # the step's one copy to the device
        logits, scores = output.logits, None
        if batch.scored:
            at_once = positions_at_once(logits.shape[1], logits.device)
            scores = PromptScores.of(
                rows, output.scored, output.next_tokens, self._forward.logits, at_once
            )
        if output.reads is None:
            return Launched(rows, None, None, Reports({}), scores, grammars)
        logits, proposals = self._proposals(output, output.reads, reading, grammars)
        if self.on_logits is not None:
            self.on_logits(logits, reading)
        reports = Reports.of(reported(logits, reading), proposals, reading)
        copy = HostCopy(proposals)
        return Launched(rows, copy, self._drawn(reading), reports, scores, grammars)

    def _proposals(
        self,
        output: ForwardOutput,
        reads: Reads,
        rows: Sequence[ScheduledRow],
        grammars: StepGrammars,
    ) -> tuple[Tensor, Tensor]:
        """Return the table of `propose`, behind the logits, on which a draft head has acted."""
        logits, act, waits = output.logits, None, self._graphed is None
        head = self._head if any(row.has_own_masks for row in rows) else None
        is_watched = self.on_logits is not None and self._head is not None
        if self._choice is not None and not is_watched and logits.dtype is self.model.dtype:
            taken = [self._choice.takes(row) for row in rows]
            if all(taken):
                return logits, self._choice.propose(logits, output.hidden, reads, rows)
            if any(taken):
                return self._by_parts(output, rows, taken, grammars)
        sampled = sampled_rows(rows, grammars, has_head=head is not None, waits=waits)
        if output.proposals is not None and not sampled:
            return logits, output.proposals
        if head is not None:
            logits, act = logits.float(), partial(_act, head, output.hidden)
        choose = partial(choose_tokens, rows=sampled, act_head=act) if sampled else None
        return logits, propose(logits, reads, self._banned, choose)

    def _by_parts(
        self,
        output: ForwardOutput,
        rows: Sequence[ScheduledRow],
        taken: Sequence[bool],
        grammars: StepGrammars,
    ) -> tuple[Tensor, Tensor]:
        """Return what `_proposals` does by two smaller batches, of rows that functions of C++ take
        and of others.
        """
        logits, table = output.logits, torch.empty(len(output.logits), 2, dtype=torch.int32)
        num_reads = torch.tensor([row.num_reads for row in rows])
        of_read = torch.tensor(taken).repeat_interleave(num_reads)
        for is_taken in (True, False):
            part = [row for row, own in zip(rows, taken, strict=True) if own is is_taken]
            places = of_read == is_taken
            some = replace(output, logits=output.logits[places], hidden=output.hidden[places])
            reads = build_reads(part, self._temperatures)
            changed, table[places] = self._proposals(some, reads, part, grammars)
            if self._head is not None and not is_taken:  # it may have acted
                logits = logits.float()
                logits[places] = changed
        return logits, table

    def load_lora(self, slot: int, weights: LoraWeights) -> None:
        """Put a LoRA adapter into a slot."""
        assert self.adapters is not None, "there are slots"
        self.adapters.load(slot, weights)

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
    ) -> CapturedGraphs | None:
        """Capture graphs, see `GraphedForward.capture`, or return None without paged attention."""
        if self._graphed is None:
            return None
        return self._graphed.capture(sizes, capture, on_progress)

    def _drawn(self, rows: Sequence[ScheduledRow]) -> list[int] | None:
        """Draw the number of tokens that each row accepts, in place of the acceptance rules."""
        if self._draw_accepted is None:
            return None
        return [self._draw_accepted(row.request, row.num_proposed) for row in rows]


def _act(head: DraftHead, hidden: Tensor, logits: Tensor, reads: Tensor, previous: Tensor) -> None:
    """Let a draft head act on float32 logits [reads, vocabulary], in place, at int64 [n] reads
    behind int64 [n] tokens. ``hidden``, [reads, width], are what the logits were made of.
    """
    logits[reads] = head.share_out(logits[reads], hidden[reads], previous)
