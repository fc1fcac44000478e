"""Defines the contenders of a benchmark: marsray's engine, and the interface of all others.

A contender decodes a list of requests as fast as it can, choosing tokens greedily.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.block_cache import ATTENTION_NAME, BlockSyncDecoder
from mars_serve.bench.decode.models import BenchModel, ModelForms
from mars_serve.bench.decode.workload import AcceptanceDistribution, BenchRequest, Draws
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import decoding_positions, settings_with_room

ORDERS = ("as given", "by prompt length")
"""Orders in which requests are put into static batches; output lengths are not known beforehand."""


@dataclass(frozen=True)
class DecodedRun:
    """The result of one run over all requests."""

    outputs: list[list[int]]
    """Output tokens of each request, end token included, in the order of the requests."""
    num_passes: int
    """Number of forward passes, counted for each request from its first token to its last."""
    num_positions: int | None = None
    """Number of positions in those passes, the prompts before their last token left out; None if it
    is not known."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return sum(map(len, self.outputs))


class NotAvailable(Exception):
    """The error of a contender that cannot run here; its message says why."""


class Contender(ABC):
    """One way to decode, at one batch size."""

    choices: Mapping[str, tuple[Any, ...]] = {}
    """Settings to try, each with its values, the default first; the fastest ones are measured."""

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Set a value for each of `choices`; it comes before the first run.

        Raises:
            NotAvailable: the contender cannot run here.
        """
        self._settings = dict(settings)

    @abstractmethod
    def run(self, requests: Sequence[BenchRequest]) -> DecodedRun:
        """Decode all requests.

        Raises:
            NotAvailable: the contender cannot run here.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing but memory
        """End threads and other resources of the contender."""


def build_engine(
    model: BenchModel,
    requests: Sequence[BenchRequest],
    batch: int,
    draws: Draws | None = None,
    *,
    exact: bool = False,
    compiled: bool = False,
) -> Engine:
    """Build an engine with pages for any ``batch`` of the requests, and warm it up.

    Args:
        model: the model, of which the engine gets a copy of its own.
        requests: all requests that will be run.
        batch: number of requests that run at once.
        draws: drawn lengths that replace the acceptance rule; None keeps the rule.
        exact: whether the engine will decode in mode exact, whose steps are wider.
        compiled: see `EngineSettings.compile`.
    """
    settings = settings_with_room(
        model.checkpoint,
        [len(request.prompt) + request.max_tokens for request in requests],
        max_num_seqs=batch,
        exact=exact,
        device=model.device,
    )
    # rounds repeat the same prompts, whose keys and values must not be found again
    changes = {"enable_prefix_caching": False, "compile": compiled}
    engine = Engine(
        model.checkpoint,
        settings.model_copy(update=changes),
        model=model.create(),
        device=model.device,
        draw_accepted=partial(_draw, draws) if draws else None,
    )
    engine.warm_up()
    return engine


def _draw(draws: Draws, request: Request, num_proposed: int) -> int:
    is_exact = request.options.mode is Mode.EXACT
    acceptance = draws.exact if is_exact else draws.acceptance
    return acceptance.draw(draws.seed, request.id, request.num_output, num_proposed)


class EngineContender(Contender):
    """A contender that is marsray's engine with continuous batching."""

    def __init__(
        self, engine: Callable[[], Engine], options: DecodingOptions, draws: Draws | None = None
    ) -> None:
        """Decode with an engine that is made at first use.

        Args:
            engine: function that makes the engine.
            options: options of every request; ``max_tokens`` is replaced by the request's.
            draws: drawn lengths that the engine was made with.
        """
        self._engine, self._options, self._draws = engine, options, draws

    def run(self, requests: Sequence[BenchRequest]) -> DecodedRun:
        """Add all requests at once; the engine admits them as others end."""
        engine = self._engine()
        running = {each.id: self._request(each) for each in requests}
        passes: dict[str, list[StepOutput]] = {name: [] for name in running}
        for request in running.values():
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise NotAvailable(output.error)
                passes[output.request_id].append(output)
                if self._draws is not None:
                    _rate_drafts(running[output.request_id], self._draws.exact)
        return DecodedRun(
            outputs=[request.tokens[request.num_prompt :] for request in running.values()],
            num_passes=sum(map(len, passes.values())),
            num_positions=sum(map(decoding_positions, passes.values())),
        )

    def _request(self, request: BenchRequest) -> Request:
        options = replace(self._options, max_tokens=request.max_tokens)
        return Request(request.id, list(request.prompt), options)


def _rate_drafts(request: Request, acceptance: AcceptanceDistribution) -> None:
    """Replace the confidence of the drafts by the probability that a draw accepts them.

    The engine chooses which outcomes get masks by this confidence, and the weights do not know
    what is drawn.
    """
    request.drafts = [
        draft._replace(confidence=acceptance.chance(depth))
        for depth, draft in enumerate(request.drafts, start=1)
    ]


class BlockSync(Contender):
    """A contender with static batches on one block-synchronised cache and packed linear layers."""

    choices: Mapping[str, tuple[Any, ...]] = {
        "cache_block": (32, 4, 8, 16, 64, 128),
        "order": ORDERS,
    }

    def __init__(
        self,
        model: BenchModel,
        forms: ModelForms,
        batch: int,
        threshold: float,
        draws: Draws | None,
    ) -> None:
        """Decode in mode threshold, in batches of ``batch`` requests."""
        self._model, self._forms = model, forms
        self._batch, self._threshold = batch, threshold
        self._draw = partial(draws.acceptance.draw, draws.seed) if draws else None

    def run(self, requests: Sequence[BenchRequest]) -> DecodedRun:
        """Decode one static batch after the other."""
        checkpoint = self._model.checkpoint
        assert checkpoint.metadata is not None
        model = self._forms.packed()
        model.set_attn_implementation(ATTENTION_NAME)
        decoder = BlockSyncDecoder(
            model,
            checkpoint.special,
            block_length=self._settings["cache_block"],
            threshold=self._threshold,
            num_masks=checkpoint.metadata.block_size,
            mask_token_id=checkpoint.metadata.mask_token_id,
            draw=self._draw,
        )
        outputs: dict[str, list[int]] = {}
        num_passes = 0
        for part in static_batches(requests, self._batch, self._settings["order"]):
            for row in decoder.decode(part):
                outputs[row.request.id] = row.tokens[len(row.request.prompt) :]
                num_passes += len(row.passes) + row.num_waits
        return DecodedRun([outputs[request.id] for request in requests], num_passes)


def static_batches(
    requests: Sequence[BenchRequest], batch: int, order: str
) -> list[list[BenchRequest]]:
    """Split requests into batches of ``batch``; the last may be smaller.

    Args:
        requests: the requests.
        batch: requests of a batch.
        order: one of `ORDERS`.
    """
    assert order in ORDERS
    ordered = list(requests)
    if order == "by prompt length":
        ordered.sort(key=lambda request: len(request.prompt))
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
