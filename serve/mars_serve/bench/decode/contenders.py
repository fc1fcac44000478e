"""Marsray's engine, and the interface of everything that is measured beside it.

A contender decodes a list of requests as fast as it can, with greedy choice. Knows no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from typing import Any

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.block_cache import ATTENTION_NAME, BlockSyncDecoder
from mars_serve.bench.decode.models import BenchModel, ModelForms
from mars_serve.bench.decode.workload import Acceptance, BenchRequest, Draws
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, Request, StepOutput
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.scoring import positions_fed, widest_row

ORDERS = ("as given", "by prompt length")
"""How static batches are made up. Output lengths stand for what nobody knows beforehand."""


@dataclass(frozen=True)
class Decoded:
    """What one run gave."""

    outputs: list[list[int]]
    """Output tokens of each request, in the order of the requests; an end token included."""
    num_passes: int
    """Forward passes, counted for each request from its first token to its last."""
    num_positions: int | None = None
    """What those passes fed, a prompt before its last token left out; None: not known."""

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.outputs))


class NotAvailable(Exception):
    """A contender cannot run here; the message says why."""


class Contender(ABC):
    """One way to decode, at one batch size."""

    choices: Mapping[str, tuple[Any, ...]] = {}
    """Settings to try and the values of each, the first as default; the fastest are measured."""

    def configure(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 - many have no settings
        """Take on a value for each of `choices`.

        Raises:
            NotAvailable: it cannot run here.
        """

    @abstractmethod
    def run(self, requests: Sequence[BenchRequest]) -> Decoded:
        """Decode all requests.

        Raises:
            NotAvailable: it cannot run here.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing but memory
        """End what it runs beside the caller."""


def build_engine(
    model: BenchModel,
    requests: Sequence[BenchRequest],
    batch: int,
    draws: Draws | None = None,
    *,
    exact: bool = False,
    compiled: bool = False,
) -> Engine:
    """Engine with the pages for any ``batch`` of the requests at once, its step times measured.

    Args:
        model: the engine gets a copy of its own.
        requests: all that will be run.
        batch: requests that run at once.
        draws: replace the acceptance rule where given.
        exact: whether it decodes in mode exact, whose steps are wider.
        compiled: see `EngineSettings.compile`.
    """
    defaults = EngineSettings()
    page_size = defaults.page_size_on(model.device)
    pages = [-(-(len(r.prompt) + r.max_tokens) // page_size) for r in requests]
    metadata = model.checkpoint.metadata
    window = metadata.block_size if metadata else 0
    settings = EngineSettings(
        num_pages=sum(nlargest(batch, pages)),
        max_num_seqs=batch,
        max_num_batched_tokens=max(
            defaults.max_num_batched_tokens, batch * widest_row(window, exact=exact)
        ),
        enable_prefix_caching=False,  # rounds repeat the same prompts
        compile=compiled,
    )
    engine = Engine(
        model.checkpoint,
        settings,
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
    """Marsray's engine with continuous batching."""

    def __init__(
        self, engine: Callable[[], Engine], options: DecodingOptions, draws: Draws | None = None
    ) -> None:
        """Decode with an engine that is made when first asked for.

        Args:
            engine: makes it.
            options: what is asked of it; a request's ``max_tokens`` are its own.
            draws: those that the engine was made with.
        """
        self._engine, self._options, self._draws = engine, options, draws

    def run(self, requests: Sequence[BenchRequest]) -> Decoded:
        """All requests are there from the start; the engine takes them in as places get free."""
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
        return Decoded(
            [request.tokens[request.num_prompt :] for request in running.values()],
            sum(map(len, passes.values())),
            sum(map(positions_fed, passes.values())),
        )

    def _request(self, request: BenchRequest) -> Request:
        options = replace(self._options, max_tokens=request.max_tokens)
        return Request(request.id, list(request.prompt), options)


def _rate_drafts(request: Request, acceptance: Acceptance) -> None:
    """Tell the engine, which goes by the confidence of drafts, how often they will be right: what
    the weights say has nothing to do with what is drawn.
    """
    request.drafts = [
        draft._replace(confidence=acceptance.chance(depth))
        for depth, draft in enumerate(request.drafts, start=1)
    ]


class BlockSync(Contender):
    """Static batches on one block-synchronised cache, with the engine's layout of the weights."""

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
        """Decode with threshold ``threshold`` in batches of ``batch``."""
        self._model, self._forms = model, forms
        self._batch, self._threshold = batch, threshold
        self._draw = partial(draws.acceptance.draw, draws.seed) if draws else None
        self._settings = {name: values[0] for name, values in self.choices.items()}

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Take on the tokens that rows store together, and the order."""
        self._settings = dict(settings)

    def run(self, requests: Sequence[BenchRequest]) -> Decoded:
        """One static batch after the other."""
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
        return Decoded([outputs[request.id] for request in requests], num_passes)


def static_batches(
    requests: Sequence[BenchRequest], batch: int, order: str
) -> list[list[BenchRequest]]:
    """Requests in batches of ``batch``, the last one maybe smaller; ``order`` is of `ORDERS`."""
    assert order in ORDERS
    ordered = list(requests)
    if order == "by prompt length":
        ordered.sort(key=lambda request: len(request.prompt))
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
