"""Marsray's engine, and the interface of everything that is measured beside it.

A contender decodes a list of requests as fast as it can, with greedy choice. Knows no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Any

from mars_platform.mode import Mode
from mars_serve.bench.block_cache import ATTENTION_NAME, BlockSyncDecoder
from mars_serve.bench.models import BenchModel, ModelForms
from mars_serve.bench.workload import Acceptance, BenchRequest
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, Request
from mars_serve.engine.settings import EngineSettings

ORDERS = ("as given", "by prompt length")
"""How static batches are made up. Output lengths stand for what nobody knows beforehand."""


@dataclass(frozen=True)
class Decoded:
    """What one run gave."""

    outputs: list[list[int]]
    """Output tokens of each request, in the order of the requests; an end token included."""
    num_passes: int
    """Forward passes, counted for each request from its first token to its last."""

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
    acceptance: Acceptance | None,
    seed: int,
) -> Engine:
    """Engine with the pages for any ``batch`` of the requests at once, its step times measured.

    Args:
        model: the engine gets a copy of its own.
        requests: all that will be run.
        batch: requests that run at once.
        acceptance: replaces the acceptance rule where given.
        seed: of the draws from ``acceptance``.
    """
    defaults = EngineSettings()
    page_size = defaults.page_size_on(model.device)
    pages = [-(-(len(r.prompt) + r.max_tokens) // page_size) for r in requests]
    metadata = model.checkpoint.metadata
    window = metadata.block_size if metadata else 0
    settings = EngineSettings(
        num_pages=sum(nlargest(batch, pages)),
        max_batch=batch,
        # all rows decode in one step: each feeds up to window + 1 unstored tokens and its masks
        max_positions=max(defaults.max_positions, batch * (2 * window + 1)),
        reuse_prefixes=False,  # rounds repeat the same prompts
    )
    engine = Engine(
        model.checkpoint,
        settings,
        model=model.create(),
        device=model.device,
        draw_accepted=partial(_draw, acceptance, seed) if acceptance else None,
    )
    engine.warm_up()
    return engine


def _draw(acceptance: Acceptance, seed: int, request: Request, num_proposed: int) -> int:
    return acceptance.draw(seed, request.id, request.num_output, num_proposed)


class EngineContender(Contender):
    """Marsray's engine with continuous batching."""

    def __init__(self, engine: Callable[[], Engine], mode: Mode, threshold: float) -> None:
        """Decode in ``mode`` with an engine that is made when first asked for."""
        self._engine, self._mode, self._threshold = engine, mode, threshold

    def run(self, requests: Sequence[BenchRequest]) -> Decoded:
        """All requests are there from the start; the engine takes them in as places get free."""
        engine = self._engine()
        running = [
            Request(
                request.id,
                list(request.prompt),
                DecodingOptions(request.max_tokens, self._mode, self._threshold),
            )
            for request in requests
        ]
        for request in running:
            engine.add(request)
        num_passes = 0
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise NotAvailable(output.error)
                num_passes += 1
        return Decoded([request.tokens[request.num_prompt :] for request in running], num_passes)


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
        acceptance: Acceptance | None,
        seed: int,
    ) -> None:
        """Decode with threshold ``threshold`` in batches of ``batch``."""
        self._model, self._forms = model, forms
        self._batch, self._threshold = batch, threshold
        self._draw = partial(acceptance.draw, seed) if acceptance else None
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
