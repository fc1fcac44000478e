"""The engine: requests in, steps, accepted tokens out. Knows nothing of Ray, HTTP or text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import Checkpoint, load_model
from mars_platform.errors import UserError
from mars_platform.method.live import LiveDecoding
from mars_serve.engine.adaptive.pacing import Pacer
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.adaptive.window_choice import WindowChooser
from mars_serve.engine.admission import Deadlines, Limits
from mars_serve.engine.attention.gathered import KeyValueShape
from mars_serve.engine.attention.selection import choose_attention
from mars_serve.engine.attention.sizing import num_pages
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.drafter import Drafter
from mars_serve.engine.execution.fault_isolation import Step, launch, wait
from mars_serve.engine.execution.forward import Accepted, ModelRunner
from mars_serve.engine.execution.graphs import CudaCapture, GraphSizes
from mars_serve.engine.execution.step_sampling import commit
from mars_serve.engine.execution.warm_up import REPEATS, measure_prefill, measure_steps
from mars_serve.engine.outputs import EngineStatus, StepOutput
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarCompiler
from mars_serve.engine.scheduled_row import Masks, ScheduledRow
from mars_serve.engine.scheduler import Scheduler
from mars_serve.engine.settings import EngineSettings

_MAX_FAILURES = 3
"""Steps in a row that may fail altogether before the engine itself is held to be broken."""

_DEFAULT = LiveDecoding(0.95)


@dataclass
class _Counts:
    """What an engine has done since its start; see `EngineStatus`."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    forward_passes: int = 0
    row_passes: int = 0


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
        drafter: Drafter | None = None,
        pacer: Pacer | None = None,
        live: LiveDecoding = _DEFAULT,
    ) -> None:
        """Load a checkpoint's weights (or take over ``model``) and reserve its pages.

        Args:
            checkpoint: what to decode with.
            settings: sizes.
            model: a model to take over instead of loading; its attention and linear layers change.
            dtype: of the weights to load.
            device: where to run.
            draw_accepted: given a request and how many tokens are proposed for it, says how many
                are accepted, instead of the method's rule. For measuring steps with untrained
                weights.
            drafter: a second model, which proposes tokens for requests that are not in mode ar.
            pacer: holds each step back, for a rehearsal.
            live: see the attribute.

        Raises:
            UserError: the weights cannot be loaded, the model cannot be served, or the pages do not
                fit.
        """
        metadata, calibration = checkpoint.metadata, checkpoint.calibration
        self.checkpoint = checkpoint
        self.window = metadata.block_size if metadata else 0
        weights = (model or load_model(checkpoint.path, dtype=dtype)).to(device)
        shape = KeyValueShape.of(weights.config)
        self.settings = settings
        self.page_size = settings.page_size_on(weights.device.type)
        self.num_pages = num_pages(settings, shape, weights)
        self._vocabulary = weights.get_input_embeddings().weight.shape[0]
        if metadata is not None and metadata.mask_token_id >= self._vocabulary:
            raise UserError(
                f"mars.json: mask_token_id is {metadata.mask_token_id}, but the model has "
                f"{self._vocabulary} embeddings; use one checkpoint's files"
            )
        self._drafter = drafter
        self._pacer = pacer
        max_drafts = max(self.window, drafter.num_drafts if drafter else 0)
        self._pool = PagePool(self.num_pages, self.page_size)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            window=self.window,
            max_drafts=max_drafts,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        self._attention = choose_attention(
            weights,
            settings,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_masks=self.window * (max_drafts + 1),  # a group for each outcome
        )
        self._runner = ModelRunner(
            weights,
            self._attention,
            checkpoint.special,
            metadata.mask_token_id if metadata else None,
            batch_invariant=settings.batch_invariant,
            compiled=settings.compile,
            draw_accepted=draw_accepted,
            temperatures=calibration.temperatures if calibration else None,
        )
        self._grammars = GrammarCompiler(
            checkpoint.tokenizer, self._vocabulary, checkpoint.special.eos
        )
        self.live = live
        """For requests that give no τ, from the next step on. Any thread may set it."""
        self._live = live
        """What the step at hand has."""
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._overdue: list[StepOutput] = []
        """Of requests that ended at the start of this step."""
        self._counts = _Counts()
        self._chooser: WindowChooser | None = None
        self._num_failures = 0
        self._finished_at: float | None = None
        """When the step before ended, if this one follows at once."""

    @property
    def overlaps(self) -> bool:
        """Whether the caller has time to use between `begin_step` and `finish_step`."""
        return bool(self._runner.model.device.type == "cuda")

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def status(self) -> EngineStatus:
        """How full the engine is."""
        num_running = len(self._scheduler.running)
        return EngineStatus(
            num_requests=len(self._requests),
            num_running=num_running,
            num_waiting=len(self._requests) - num_running,
            num_pages=self._pool.num_pages,
            num_free_pages=self._pool.num_free,
            num_prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._counts.prompt_tokens,
            num_generated_tokens=self._counts.generated_tokens,
            num_forward_passes=self._counts.forward_passes,
            num_row_passes=self._counts.row_passes,
            compute_share=self._pacer.compute_share if self._pacer else None,
        )

    @property
    def max_length(self) -> int:
        """Tokens of a request, prompt and output together, at the most."""
        return min(self.checkpoint.max_length, self.num_pages * self.page_size)

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> StepTimes:
        """Run steps of the sizes to come and, by their times, let windows adapt to the batch; a
        pacer's times stand in for theirs.

        Args:
            on_progress: called with the steps that are done and their number.

        Returns:
            Those times.
        """
        times = self.measure_step_times(on_progress=on_progress)
        if self._pacer is not None:
            times = self._pacer.times
        if self.window and self.settings.adaptive_windows:
            self._chooser = WindowChooser(times, self.window)
        return times

    def measure_step_times(
        self,
        *,
        widest_row: int | None = None,
        repeats: int = REPEATS,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> StepTimes:
        """Seconds of steps over positions and stored tokens, of steps as they will be run.

        Args:
            widest_row: see `measure_steps`.
            repeats: see `measure_steps`.
            on_progress: called with the steps that are done and their number.
        """
        assert not self.has_work, "steps are timed before the first request"
        if self._drafter is not None:
            self._drafter.warm_up()
        if self.settings.cuda_graphs and self._runner.model.device.type == "cuda":
            self._runner.capture(self._graph_sizes(), CudaCapture(), on_progress)
        return measure_steps(
            self._runner.run,
            self._pool,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_length=self.max_length,
            window=self.window,
            widest_row=widest_row,
            repeats=repeats,
            on_progress=on_progress,
        )

    def measure_prefill(self, num_tokens: int, repeats: int) -> float:
        """Prompt tokens a second of steps of ``num_tokens``; see `warm_up.measure_prefill`."""
        assert not self.has_work, "steps are timed before the first request"
        return measure_prefill(
            self._runner.run,
            self._pool,
            num_tokens=num_tokens,
            max_length=self.max_length,
            repeats=repeats,
        )

    def _graph_sizes(self) -> GraphSizes:
        return GraphSizes(
            max_rows=self.settings.max_num_seqs,
            max_masks=self.window,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_pages=self._pool.pages_for(self.max_length),
        )

    def add(self, request: Request) -> None:
        """Take a request in; see `check` for what is refused."""
        self.check(request)
        assert request.id not in self._requests, "request ids are unique"
        request.has_drafter = self._drafter is not None and request.options.may_take_several
        request.follow(self._live)
        if request.arrived_at is None:
            request.arrived_at = time.monotonic()
        if request.options.grammar is not None:
            request.matcher = self._grammars.compile(request.options.grammar).matcher()
        self._requests[request.id] = request
        self._scheduler.add(request)
        self._deadlines.add(request)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run. Any thread may call it; a grammar that was not
        seen before takes a while.

        Raises:
            UserError: naming the option and the numbers.
        """
        Limits(
            self.checkpoint,
            self._vocabulary,
            self.max_length,
            gives_one=self.window == 0 and self._drafter is None,
        ).check(request)
        if request.options.grammar is not None:
            self._grammars.compile(request.options.grammar)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages; one that has ended already is no error."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.CANCELLED)

    def step(self) -> list[StepOutput]:
        """Run one forward pass for every scheduled request and commit what was accepted.

        Raises:
            RuntimeError: see `finish_step`.
        """
        return self.finish_step(self.begin_step())

    def begin_step(self) -> Step | None:
        """Schedule a step and start it; None where there is nothing to do.

        On a GPU this returns while the step runs. Until `finish_step`, requests may be added but
        not cancelled.
        """
        if self._pacer is not None:
            self._pacer.begin(follows=self._finished_at is not None)
        self._take_live()
        self._end_overdue()
        if self._drafter is not None:
            running = self._scheduler.running
            self._drafter.propose(
                [
                    item
                    for item in running
                    if item.has_drafter and item.num_uncached <= self.window + 1
                ]
            )
        works = self._scheduler.schedule(self._choose if self._chooser else None)
        if not works:
            self._finished_at = None
            return None
        self._note_begun(works)
        return launch(self._runner, works)

    def finish_step(self, step: Step | None) -> list[StepOutput]:
        """Wait for a step and commit what was accepted.

        A request whose own share of the pass fails is ended with `FinishReason.ERROR`; the others
        go on.

        Raises:
            RuntimeError: step after step fails for every request.
        """
        outputs, self._overdue = self._overdue, []
        if step is None:
            return outputs
        results = self._results(step)
        if self._pacer is not None:
            self._pacer.finish(step.works)
        self._note_time(step.works)
        for work, result in zip(step.works, results, strict=True):
            if isinstance(result, Exception):
                outputs.append(self._fail(work.request, result))
                continue
            if work.reads_logits or result.prompt_logprobs:
                outputs.append(self._commit(work, result))
            else:
                self._scheduler.stored(work)
        self._counts.forward_passes += 1
        if not self._requests:
            self._finished_at = None
        return outputs

    def check_integrity(self) -> None:
        """Prove that no page leaks or is shared by mistake.

        Raises:
            AssertionError: one does.
        """
        self._scheduler.check_integrity()

    def _take_live(self) -> None:
        """One way for the whole step, whatever is set meanwhile."""
        live = self.live
        if live == self._live:
            return
        self._live = live
        for request in self._requests.values():
            request.follow(live)
        if self._chooser is not None:
            self._chooser.expire()

    def _end_overdue(self) -> None:
        for request in self._deadlines.pop_overdue(time.monotonic()):
            self._end(request, FinishReason.TIMEOUT)
            self._overdue.append(StepOutput(request.id, [], request.finish_reason))

    def _note_begun(self, works: Sequence[ScheduledRow]) -> None:
        for work in works:
            request = work.request
            if request.queue_s is None:
                assert request.arrived_at is not None
                request.queue_s = time.monotonic() - request.arrived_at
                self._counts.prompt_tokens += request.num_prompt

    def _choose(self, rows: list[Request]) -> list[Masks]:
        """Masks of the rows that leave them to the engine, beside all others that run."""
        assert self._chooser is not None
        asked, running = set(rows), self._scheduler.running
        others = [request for request in running if request not in asked]
        prompts = sum(max(0, request.num_uncached - self.window - 1) for request in running)
        windows = self._chooser.choose(
            rows + others, other_positions=min(prompts, self.settings.max_num_batched_tokens)
        )
        return windows[: len(rows)]

    def _note_time(self, works: Sequence[ScheduledRow]) -> None:
        now = time.perf_counter()
        # a pacer adds prompts to a step's time at another rate than the table's
        is_told = self._pacer is None or not self._pacer.load(works).prompt_tokens
        if self._chooser is not None and self._finished_at is not None and is_told:
            positions = sum(work.num_positions for work in works)
            stored = sum(work.request.num_cached for work in works)
            self._chooser.observe_step(positions, stored, now - self._finished_at)
        self._finished_at = now

    def _results(self, step: Step) -> list[Accepted | Exception]:
        """What a step gave; where it raises, whose share does."""
        results = wait(self._runner, step)
        if all(isinstance(result, Exception) for result in results):
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                raise RuntimeError("the forward pass fails for every request") from results[0]  # type: ignore[misc]
        else:
            self._num_failures = 0
        return results

    def _commit(self, work: ScheduledRow, result: Accepted) -> StepOutput:
        """Enter what a pass gave: tokens, log-probabilities of the prompt, or both."""
        request = work.request
        is_first = request.num_output == request.num_scored == 0
        request.num_scored += len(result.prompt_logprobs)
        if not work.reads_logits:
            self._scheduler.stored(work)
            output = StepOutput(request.id, [], None)
        else:
            output = self._commit_tokens(work, result)
        output.num_masks, output.num_positions = work.num_masks, work.num_positions
        output.threshold = request.threshold
        output.prompt_logprobs = result.prompt_logprobs
        if is_first:
            output.num_prefix_hit_tokens, output.queue_s = (
                request.num_prefix_hit_tokens,
                request.queue_s or 0.0,
            )
        return output

    def _commit_tokens(self, work: ScheduledRow, result: Accepted) -> StepOutput:
        request, num_right = work.request, 0
        tokens, confidences = self._accepted(work, result)
        accepted = tokens[: request.num_left]
        end_tokens = self.checkpoint.special.eos
        if request.options.stop_ids:
            end_tokens |= request.options.stop_ids
        ends = [i for i, token in enumerate(accepted) if token in end_tokens]
        if ends:
            accepted = accepted[: ends[0] + 1]
        if not commit(request, accepted):
            return self._fail(request, ValueError("the grammar allows no token of this model"))
        request.tokens += accepted
        self._counts.generated_tokens += len(accepted)
        self._counts.row_passes += bool(accepted)
        if request.checks_drafts:
            num_right = min(len(result.tokens) - 1, len(accepted))
            request.drafts = [] if request.accepts_by_confidence else list(result.drafts)
            request.num_own_drafts = len(request.drafts)
        self._scheduler.stored(work, num_right)
        if ends:
            self._end(request, FinishReason.STOP)
        elif request.num_left == 0:
            self._end(request, FinishReason.LENGTH)
        return StepOutput(
            request.id,
            accepted,
            request.finish_reason,
            confidences=confidences[: len(accepted)],
            logprobs=result.logprobs[: len(accepted)],
        )

    def _accepted(self, work: ScheduledRow, result: Accepted) -> tuple[list[int], list[float]]:
        """What a pass gave, with the tokens that masks behind checked drafts add to it, and their
        confidences.
        """
        request, tokens, confidences = work.request, result.tokens, result.confidences
        num_asked, num_given = work.num_proposed - 1, len(tokens)
        if request.checks_drafts:
            num_asked = min(work.num_drafts, request.num_own_drafts)
            num_given = min(num_given, num_asked + 1)
            if request.accepts_by_confidence:
                limit = request.threshold
                sure = list(takewhile(lambda draft: draft.confidence >= limit, result.drafts))
                num_asked, num_given = len(result.drafts), len(sure) + 1
                tokens = [*tokens, *(draft.token for draft in sure)]
                confidences = [*confidences, *(draft.confidence for draft in sure)]
        if self._chooser is not None:
            self._chooser.observe(request, num_asked, min(num_given, num_asked + 1))
        return tokens, confidences

    def _fail(self, request: Request, error: Exception) -> StepOutput:
        self._attention.recover()
        self._end(request, FinishReason.ERROR)
        return StepOutput(request.id, [], request.finish_reason, error=str(error))

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.id]
        if reason is FinishReason.ERROR:
            self._scheduler.discard(request)
        else:
            self._scheduler.finish(request)
        if self._chooser is not None:
            self._chooser.forget(request.id)
        if self._drafter is not None:
            self._drafter.forget(request.id)
