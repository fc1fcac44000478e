"""The engine: requests in, steps, accepted tokens out. Knows nothing of Ray, HTTP or text."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint import Checkpoint, load_model
from mars_platform.errors import UserError
from mars_serve.engine.forward import ModelRunner
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import EngineStatus, FinishReason, Request, StepOutput
from mars_serve.engine.scheduler import Scheduler
from mars_serve.engine.settings import EngineSettings


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
    ) -> None:
        """Load a checkpoint's weights (or take over ``model``) and reserve its pages."""
        metadata = checkpoint.metadata
        self.checkpoint = checkpoint
        self.settings = settings
        self.window = metadata.block_size if metadata else 0
        self._pool = PagePool(settings.num_pages, settings.page_size)
        self._scheduler = Scheduler(
            self._pool,
            max_batch=settings.max_batch,
            max_positions=settings.max_positions,
            window=self.window,
        )
        self._runner = ModelRunner(
            (model or load_model(checkpoint.path, dtype=dtype)).to(device),
            checkpoint.special,
            metadata.mask_token_id if metadata else None,
            num_pages=settings.num_pages,
            page_size=settings.page_size,
        )
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def status(self) -> EngineStatus:
        """How full the engine is."""
        return EngineStatus(
            num_requests=len(self._requests),
            num_pages=self._pool.num_pages,
            num_free_pages=self._pool.num_free,
        )

    @property
    def max_length(self) -> int:
        """Tokens of a request, prompt and output together, at the most."""
        return min(self.checkpoint.max_length, self.settings.capacity)

    def add(self, request: Request) -> None:
        """Take a request in; see `check` for what is refused."""
        self.check(request)
        assert request.id not in self._requests, "request ids are unique"
        self._requests[request.id] = request
        self._scheduler.add(request)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run. Reads no state, so that any thread may call it.

        Raises:
            UserError: naming the option and the numbers.
        """
        if not request.tokens:
            raise UserError("prompt: it has no tokens; give at least one")
        if request.max_length > self.max_length:
            raise UserError(
                f"max_tokens: {request.num_prompt} prompt tokens and {request.options.max_tokens} "
                f"output tokens make {request.max_length}, more than the {self.max_length} that "
                "fit; shorten the prompt or lower max_tokens"
            )
        if request.options.needs_masks and self.window == 0:
            raise UserError(
                "mode: this model is a plain AR checkpoint without mars.json and cannot decode in "
                "threshold mode; use mode 'ar'"
            )

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages; one that has ended already is no error."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.finish_reason = FinishReason.CANCELLED
            self._scheduler.finish(request)

    def step(self) -> list[StepOutput]:
        """Run one forward pass for every scheduled request and commit what was accepted."""
        works = self._scheduler.schedule()
        if not works:
            return []
        outputs = []
        for work, accepted in zip(works, self._runner.run(works), strict=True):
            work.request.num_stored += work.num_tokens
            if work.reads_logits:
                outputs.append(self._commit(work.request, accepted))
        return outputs

    def check_integrity(self) -> None:
        """Prove that no page leaks or is shared by mistake.

        Raises:
            AssertionError: one does.
        """
        self._pool.check_integrity(request.pages for request in self._requests.values())
        assert all(not request.pages for request in self._scheduler.waiting)

    def _commit(self, request: Request, accepted: list[int]) -> StepOutput:
        accepted = accepted[: request.options.max_tokens - request.num_output]
        ends = [i for i, token in enumerate(accepted) if token in self.checkpoint.special.eos]
        if ends:
            accepted = accepted[: ends[0] + 1]
        request.tokens += accepted
        if ends:
            request.finish_reason = FinishReason.STOP
        elif request.num_output >= request.options.max_tokens:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            del self._requests[request.id]
            self._scheduler.finish(request)
        return StepOutput(request.id, accepted, request.finish_reason)
