"""The engine: requests in, steps, accepted tokens out."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from mars_autoscale.model.step_times import StepTimes
from mars_autoscale.policy.reports import EngineStatus
from mars_platform.checkpoint.adapted import load_weights
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import LiveDecoding
from mars_platform.mixing.latent import absorb
from mars_platform.mixing.probe import Probe
from mars_serve.engine.adaptive.audit_room import AuditRoom
from mars_serve.engine.adaptive.position_budget import PositionBudget
from mars_serve.engine.adaptive.window_choice import WindowChooser
from mars_serve.engine.admission import Deadlines, Limits, check_mask
from mars_serve.engine.attention.interface import Attention, group_layers
from mars_serve.engine.attention.selection import choose_attention
from mars_serve.engine.attention.sizing import PoolSizes, pool_sizes
from mars_serve.engine.decoder.adapter import bytes_of_slot
from mars_serve.engine.decoder.rotation import settle_rotation
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.drafting.sources import DraftSources
from mars_serve.engine.execution.acceptance import Accepted
from mars_serve.engine.execution.fault_isolation import FaultIsolation, Step, TooLong
from mars_serve.engine.execution.forward import ModelRunner, OnLogits
from mars_serve.engine.execution.graphs import Capture, CapturedGraphs, CudaCapture, GraphSizes
from mars_serve.engine.execution.step_sampling import REFUSALS, commit, cut, prepare, refusal_of
from mars_serve.engine.execution.warm_up import (
    REPEATS,
    StepSizes,
    StepTimer,
    clock_of,
    measure_prefill,
    measure_steps,
)
from mars_serve.engine.lora_cache import LoraCache
from mars_serve.engine.lora_slots import LoraSlots
from mars_serve.engine.memory import Memory, WindowPages
from mars_serve.engine.outputs import EngineCounts, StepOutput
from mars_serve.engine.pages import PagePool
from mars_serve.engine.prompt_room import PromptRoom
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarCompiler, PutOff
from mars_serve.engine.scheduled_row import Masks, ScheduledRow
from mars_serve.engine.scheduler import Scheduler
from mars_serve.engine.settings import EngineSettings
from mars_serve.engine.state_slots import StateSlots
from mars_serve.engine.states.slots import States, slot_bytes

_DEFAULT = LiveDecoding(0.95)

_log = logging.getLogger(__name__)


class Engine:
    """Steps all its requests together; each is admitted, advanced and finished on its own.

    Not thread-safe: one thread owns it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EngineSettings,
        *,
        model: PreTrainedModel | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        draw_accepted: Callable[[Request, int], int] | None = None,
        live: LiveDecoding = _DEFAULT,
        attention_of: Callable[..., Attention] = choose_attention,
    ) -> None:
        """Load a checkpoint's weights, or take over ``model``, and reserve the KV cache.

        The attention and linear layers of ``model`` change. ``draw_accepted`` returns how many of a
        request's proposals are accepted, in place of the acceptance rules, to time untrained
        weights. ``attention_of`` chooses the attention backend, see `choose_attention`.

        Raises:
            UserError: the weights cannot be loaded, the model cannot be served, or the pages do not
                fit.
        """
        metadata, calibration = checkpoint.metadata, checkpoint.calibration
        self.checkpoint = checkpoint
        self.window = metadata.block_size if metadata else 0
        weights = (model or load_weights(checkpoint, dtype=dtype)).to(device)
        self.num_parameters = weights.num_parameters()
        self.dtype, self.device = weights.dtype, weights.device
        self.settings = settings
        probe = self._probe(weights)
        specs = absorb(weights, probe.specs)
        groups, _ = group_layers([spec.within(checkpoint.max_length) for spec in specs])
        self.token_elements = sum(group.elements_per_token for group in groups)
        """Elements of a token's keys and values over all layers."""
        layers = probe.scans, probe.convolutions
        num_lookup = settings.num_lookup_drafts
        self._drafting = DraftSources(num_lookup, self.window, has_states=probe.is_recurrent)
        max_drafts = self._drafting.max_drafts
        taken = slot_bytes(*layers, num_drafts=max_drafts, dtype=self.dtype)
        lora_bytes = 0
        if settings.max_loras:
            lora_bytes = settings.max_loras * bytes_of_slot(weights, settings.max_lora_rank)
        sizes = pool_sizes(settings, groups, weights, taken, lora_bytes)
        self.page_size, self.num_pages = sizes.page_size, sizes.num_pages
        self.specs = [spec.within(self.max_length) for spec in specs]
        """Attention of each layer, without windows that no text is long enough for."""
        vocabulary = weights.get_output_embeddings().out_features
        check_mask(checkpoint, vocabulary)
        self._limits = Limits(checkpoint, vocabulary, self.max_length, max_drafts > 0)
        self._memory = self._make_memory(sizes, has_states=probe.is_recurrent)
        self._scheduler = Scheduler(
            self._memory,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            window=self.window,
            max_drafts=max_drafts,
        )
        self.attention = attention_of(weights, self.specs, settings, **sizes._asdict())
        states = None
        if self._memory.states is not None:
            states = States(
                *layers,
                num_slots=self._memory.states.pool.num_pages,
                num_drafts=max_drafts,
                dtype=self.dtype,
                device=self.device,
            )
        self._runner = ModelRunner(
            weights,
            probe,
            self.attention,
            states,
            checkpoint.special,
            metadata.mask_token_id if metadata else None,
            max_length=self.max_length,
            batch_invariant=settings.batch_invariant,
            draw_accepted=draw_accepted,
            temperatures=calibration.temperatures if calibration else None,
            num_slots=settings.max_loras,
            max_rank=settings.max_lora_rank,
        )
        self.loras = LoraCache(checkpoint, settings)
        self.grammars = GrammarCompiler(checkpoint.tokenizer, vocabulary, checkpoint.special.eos)
        self.live = live
        """Live decoding from the next step on; any thread may set it."""
        self.captured: CapturedGraphs | None = None  # until `capture_graphs`
        self.on_launch: Callable[[Sequence[ScheduledRow]], None] | None = None
        """Called with the rows of each step before it starts."""
        self._step_live = live
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._overdue: list[StepOutput] = []
        """Outputs of requests whose time in the queue ended at the start of the current step."""
        self._counts = EngineCounts()
        self._busy_since_s = 0.0
        """Time of the last step's end or, if later, since when there are requests."""
        self._chooser: WindowChooser | None = None
        self._corrects_times = False
        """Whether masks are chosen by times measured here, which steps may prove wrong."""
        self._clock, self._launch_s = clock_of(self.device.type), 0.0
        budget = PositionBudget(settings.max_num_batched_tokens, least=self.window + 1)
        self._isolation = FaultIsolation(self._runner, self._memory, budget)
        self._audit_room = AuditRoom()
        self._num_audits = 0

    def _probe(self, model: PreTrainedModel) -> Probe:
        """Try a model as it was loaded; from then on it rotates all steps alike."""
        settle_rotation(model)
        metadata, avoided = self.checkpoint.metadata, self.checkpoint.special.never_emitted
        avoided = avoided | ({metadata.mask_token_id} if metadata else set())
        probe = Probe.of(model, avoided=avoided)
        if self.settings.max_loras and self.settings.batch_invariant:
            raise UserError(
                "engine.batch_invariant: the products of LoRA adapters are not computed in fixed "
                "shapes; leave it out, or set engine.max_loras to 0"
            )
        if probe.is_recurrent and self.settings.batch_invariant:
            raise UserError(
                f"engine.batch_invariant: the steps of recurrent layers, which {probe.family!r} "
                "has, are not computed in fixed shapes; leave it out, or take another model"
            )
        return probe

    def _make_memory(self, sizes: PoolSizes, *, has_states: bool) -> Memory:
        bounded = [group for group in group_layers(self.specs)[0] if group.is_bounded]
        windows = None
        if bounded:
            pool = PagePool(sizes.num_window_pages, sizes.page_size)
            windows = WindowPages(pool, lambda at: min(group.oldest(at) for group in bounded))
        states, settings = None, self.settings
        if has_states:
            slots = PagePool(settings.num_state_slots, sizes.page_size)
            states = StateSlots(slots, settings.num_state_snapshots)
        loras = None
        if settings.max_loras:
            loras = LoraSlots(settings.max_loras, lambda *what: self._runner.load_lora(*what))
        pool, cached = PagePool(sizes.num_pages, sizes.page_size), settings.enable_prefix_caching
        return Memory(pool, windows, states, loras, enable_prefix_caching=cached)

    @property
    def overlaps(self) -> bool:
        """Whether the caller has time to use between `begin_step` and `finish_step`."""
        return bool(self._runner.model.device.type == "cuda")

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    @property
    def max_length(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return min(self.checkpoint.max_length, self.num_pages * self.page_size)

    def status(self) -> EngineStatus:
        """Return how full the engine is, and what it has done since its start, audits left out."""
        num_running = sum(not request.is_audit for request in self._scheduler.running)
        num_requests = len(self._requests) - self._num_audits
        slots = self._memory.states.pool if self._memory.states is not None else None
        return EngineStatus(
            num_requests=num_requests,
            num_running=num_running,
            num_waiting=num_requests - num_running,
            num_pages=self.num_pages,
            num_free_pages=self._memory.pool.num_free,
            num_prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_out_of_memory=self._isolation.budget.num_out_of_memory,
            num_held_states=slots.num_pages - slots.num_free if slots is not None else 0,
            num_state_snapshots=slots.num_registered if slots is not None else 0,
            num_computed_again=self._memory.num_computed_again,
            **vars(self._counts),
        )

    def watch(self, on_logits: OnLogits | None) -> None:
        """Call a function, or none, with the logits of each step from now on."""
        self._runner.on_logits = on_logits

    # Warming up

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> StepTimes:
        """Run steps of the sizes to come, and adapt windows to their times, which are returned.

        ``on_progress`` gets the number of steps that have run, and that of all.
        """
        times = self.measure_step_times(
            masks_apart=self.checkpoint.adapter is not None, on_progress=on_progress
        )
        self.adapt_windows(times)
        self._corrects_times = True
        return times

    def adapt_windows(self, times: StepTimes) -> None:
        """From now on, bound what prompts add to steps by these times, and choose masks by them, if
        the settings and the model allow that.
        """
        self._corrects_times = False
        self._audit_room.times = times
        self._scheduler.prompt_room = PromptRoom(times, self.settings.max_num_seqs)
        if self._drafting.max_drafts and self.settings.adaptive_windows:
            # The clock of the table, so that both compare.
            self._chooser = WindowChooser(times, self.window, clock=self._clock)

    def measure_step_times(
        self,
        *,
        widest_row: int | None = None,
        repeats: int = REPEATS,
        masks_apart: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> StepTimes:
        """Measure the seconds of steps over positions and cached tokens; see `measure_steps`."""
        assert not self.has_work, "steps are timed before the first request"
        if self.settings.cuda_graphs and self._runner.model.device.type == "cuda":
            self.capture_graphs(CudaCapture(), on_progress)
        rows, positions = self.settings.max_num_seqs, self.settings.max_num_batched_tokens
        sizes = StepSizes(rows, positions, self.max_length, self.window, widest_row, masks_apart)
        return measure_steps(self._step_timer(), sizes, repeats=repeats, on_progress=on_progress)

    def measure_prefill(self, num_tokens: int, repeats: int) -> float:
        """Measure prompt tokens per second in steps of ``num_tokens``; see `warm_up`."""
        assert not self.has_work, "steps are timed before the first request"
        rows, positions = self.settings.max_num_seqs, self.settings.max_num_batched_tokens
        num_tokens = min(num_tokens, positions, rows * max(self.max_length - 1, 1))
        return measure_prefill(
            self._step_timer(), num_tokens=num_tokens, max_length=self.max_length, repeats=repeats
        )

    def _step_timer(self) -> StepTimer:
        return StepTimer(self._runner.run, self._memory, self._clock)

    def capture_graphs(
        self, capture: Capture, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Capture decoding steps; do nothing if attention does not read pages in place."""
        window, drafts = self.window, self._scheduler.max_drafts
        # Tokens accepted from masks, drafts, and a group of masks for each outcome.
        most = window + 1 + drafts + (drafts + 1) * window
        rows, positions = self.settings.max_num_seqs, self.settings.max_num_batched_tokens
        sizes = GraphSizes(rows, most, positions, self._memory.pool.pages_for(self.max_length))
        self.captured = self._runner.capture(sizes, capture, on_progress)

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request; see `check` for the requests that are refused."""
        self.check(request)
        assert request.id not in self._requests, "request ids are unique"
        request.follow(self._step_live)
        if request.is_audit:
            request.take_audited_drafts(self._drafting.max_audit_drafts)
        if request.arrived_at is None:
            request.arrived_at = time.monotonic()
        if len(self._requests) == self._num_audits:
            self._busy_since_s = time.monotonic()
        self._requests[request.id] = request
        self._num_audits += request.is_audit
        self._scheduler.add(request)
        self._deadlines.add(request)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run, and prepare its grammar, adapter and sampling.

        Any thread may call this. The first request with a grammar or a LoRA adapter takes the time
        to compile or read it, and `add` does not do again what is prepared.

        Raises:
            UserError: the message names the option and the numbers.
        """
        self._limits.check(request)
        self.loras.prepare(request)
        prepare(request, self._limits.vocabulary, self.checkpoint.special.eos)
        if request.options.grammar is not None and request.matcher is None:
            request.matcher = self.grammars.compile(request.options.grammar).matcher()

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages; do nothing if it has already ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.CANCELLED)

    # Steps

    def step(self) -> list[StepOutput]:
        """Run one forward pass over all scheduled requests and commit the accepted tokens."""
        return self.finish_step(self.begin_step())

    def begin_step(self) -> Step | None:
        """Schedule a step and start it; return None if there is nothing to run.

        On a GPU this returns while the step runs. Until `finish_step`, requests may be added but
        not cancelled.
        """
        self._take_live()
        self._end_overdue()
        if self._num_audits:
            self._scheduler.audit_positions = self._audit_room.positions(
                self._requests.values(), self._scheduler.running, self.window
            )
        self._scheduler.max_num_batched_tokens = self._isolation.budget.positions
        rows = self._scheduler.schedule(self._choose_masks if self._chooser else None)
        if not rows:
            return None
        if self.on_launch is not None:
            self.on_launch(rows)
        self._note_begun(rows)
        self._launch_s = self._clock()
        return self._isolation.launch(rows)

    def finish_step(self, step: Step | None) -> list[StepOutput]:
        """Wait for a step and commit the accepted tokens.

        A request whose own row fails ends with `FinishReason.ERROR`, one whose grammar fails, or
        that may choose no token any more, with `FinishReason.REFUSED`; the others go on.

        Raises:
            RuntimeError: see `FaultIsolation.wait`.
        """
        outputs, self._overdue = self._overdue, []
        if step is None:
            return outputs
        results = self._isolation.wait(step)
        if self._chooser is not None and self._corrects_times:
            self._chooser.note_step(step.rows, self._clock() - self._launch_s)
        self._audit_room.observe(step.rows)
        outputs += self._commit(step.rows, results)
        if any(not row.request.is_audit for row in step.rows):
            now_s = time.monotonic()
            self._counts.num_forward_passes += 1
            self._counts.busy_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        return outputs

    def check_integrity(self) -> None:
        """Prove that no page leaks or is shared by mistake."""
        self._scheduler.check_integrity()

    def _take_live(self) -> None:
        """Fix the live decoding of the whole step."""
        live = self.live
        if live == self._step_live:
            return
        self._step_live = live
        for request in self._requests.values():
            request.follow(live)
        if self._chooser is not None:
            self._chooser.expire()

    def _end_overdue(self) -> None:
        for request in self._deadlines.pop_overdue(time.monotonic()):
            self._end(request, FinishReason.TIMEOUT)
            self._overdue.append(StepOutput(request.id, [], request.finish_reason))

    def _note_begun(self, rows: Sequence[ScheduledRow]) -> None:
        for row in rows:
            request = row.request
            if request.queue_s is None:
                assert request.arrived_at is not None
                request.queue_s = time.monotonic() - request.arrived_at
                if not request.is_audit:
                    self._counts.num_prompt_tokens += request.num_prompt

    def _choose_masks(self, requests: list[Request]) -> list[Masks]:
        assert self._chooser is not None
        free = set(requests)
        running = [request for request in self._scheduler.running if not request.is_audit]
        others = [request for request in running if request not in free]
        prompts = sum(max(0, request.num_uncached - self.window - 1) for request in running)
        room = self._scheduler.prompt_room
        most = room.most if room is not None else None
        most = most or self.settings.max_num_batched_tokens
        masks = self._chooser.choose(requests + others, other_positions=min(prompts, most))
        return masks[: len(requests)]

    # Committing

    def _commit(
        self, rows: Sequence[ScheduledRow], results: Sequence[Accepted | Exception]
    ) -> Iterator[StepOutput]:
        """Enter each row's result into its request, and yield the outputs."""
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, PutOff | TooLong):
                continue
            if isinstance(result, Exception):
                yield self._fail(row.request, result)
            elif row.reads_logits or result.prompt_logprobs:
                output = self._commit_row(row, result)
                if output.tokens or output.prompt_logprobs or output.finish_reason:  # not put off
                    yield output
            else:
                self._scheduler.commit_cached(row)

    def _commit_row(self, row: ScheduledRow, result: Accepted) -> StepOutput:
        request, threshold = row.request, row.request.plan.threshold
        is_first = request.num_output == request.num_scored == 0
        request.num_scored += len(result.prompt_logprobs)
        if row.reads_logits:
            output = self._commit_tokens(row, result)
        else:
            self._scheduler.commit_cached(row)
            output = StepOutput(request.id, [], None)
        output.num_masks, output.num_positions = row.num_masks, row.num_positions
        output.threshold, output.prompt_logprobs = threshold, result.prompt_logprobs
        if is_first:
            output.num_prefix_hit_tokens = request.num_prefix_hit_tokens
            output.queue_s = request.queue_s or 0.0
        if request.enter_span(output.tokens, self._step_live) and self._chooser is not None:
            self._chooser.expire()
        return output

    def _commit_tokens(self, row: ScheduledRow, result: Accepted) -> StepOutput:
        request = row.request
        if self._chooser is not None and not request.is_audit:
            # Tokens that an end token or max_tokens cuts off below were accepted all the same.
            self._chooser.observe(request, result.num_masks_tried, result.num_masks_accepted + 1)
        tokens, reason = cut(request, result.tokens)
        try:
            num_allowed = commit(request, tokens)
        except PutOff:
            return StepOutput(request.id, [], None)
        except Exception as error:
            if not isinstance(error, REFUSALS):
                _log.exception("the tokens of request %s cannot be committed", request.id)
            return self._fail(request, error)
        if num_allowed < len(tokens):  # the next step finds that no token may follow
            tokens, reason = tokens[:num_allowed], None
            num_right = min(result.num_right, num_allowed - 1)
            result = replace(result, num_right=num_right, next_drafts=[])
        request.tokens += tokens
        if not request.is_audit:
            self._counts.num_generated_tokens += len(tokens)
            self._counts.num_row_passes += bool(tokens)
        least_chance = self._chooser.least_gain if self._chooser is not None else 0.0
        self._drafting.take(request, len(tokens), result.next_drafts, least_chance)
        self._scheduler.commit_cached(row, min(result.num_right, len(tokens)))
        if reason is not None:
            self._end(request, reason)
        has_confidences = request.options.reports_rejected
        return StepOutput(
            request.id,
            tokens,
            reason,
            confidences=result.confidences[: len(tokens)] if has_confidences else [],
            logprobs=result.logprobs[: len(tokens)],
            rejected=result.rejected if reason is None else [],
        )

    def _fail(self, request: Request, error: Exception) -> StepOutput:
        if isinstance(error, REFUSALS):
            reason, message = FinishReason.REFUSED, refusal_of(request, error)
        else:
            self.attention.recover()
            reason, message = FinishReason.ERROR, str(error)
        self._end(request, reason)
        return StepOutput(request.id, [], request.finish_reason, error=message)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.id]
        self._num_audits -= request.is_audit
        if reason is FinishReason.ERROR:
            self._scheduler.discard(request)
        else:
            self._scheduler.finish(request)
        if self._chooser is not None:
            self._chooser.forget(request.id)
        self._drafting.forget(request.id)
