"""One forward pass over the work of a step, and the tokens accepted from it.

Lays the work out, runs the model on it once and applies the acceptance rule on the device. Knows
nothing of queues or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint import SpecialTokens
from mars_platform.mode import Confidence
from mars_serve.engine.acceptance import Reads, accept, unpack
from mars_serve.engine.attention import ATTENTION_NAME, Attention
from mars_serve.engine.batch import build_batch
from mars_serve.engine.graphs import Capture, EagerForward, Forward, GraphedForward, GraphSizes
from mars_serve.engine.linear import pack_linears, tile_linears
from mars_serve.engine.request import Request
from mars_serve.engine.scheduler import Work
from mars_serve.engine.varlen import VarlenAttention

_TILE = 16
"""Rows of every matrix product where results must not depend on neighbours."""
_MEASURES = {measure: place for place, measure in enumerate(Confidence)}


@dataclass(frozen=True)
class Accepted:
    """What a pass gave one request: tokens and, of each, its confidence."""

    tokens: list[int]
    confidences: list[float]


_NOTHING = Accepted([], [])


@dataclass(frozen=True)
class Launched:
    """A step that may still be running."""

    works: Sequence[Work]
    packed: Tensor | None
    """What `accept` gave; None where no work reads logits."""

    def wait(self) -> list[Accepted]:
        """For each work, at least one token where it reads logits, and none elsewhere."""
        if self.packed is None:
            return [_NOTHING] * len(self.works)
        accepted = iter(unpack(self.packed))  # the one copy to the host
        return [Accepted(*next(accepted)) if work.reads_logits else _NOTHING for work in self.works]


@dataclass(frozen=True)
class FailedLaunch:
    """A step that could not be started."""

    works: Sequence[Work]
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
        draw_accepted: Callable[[Request, int], int] | None = None,
    ) -> None:
        """Take a model over: its attention and its linear layers are changed in place."""
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linears(model, timed=not batch_invariant)
        if batch_invariant:
            tile_linears(model, _TILE)
        self.model = model
        self._forward: Forward = (
            GraphedForward(model, attention)
            if isinstance(attention, VarlenAttention)
            else EagerForward(model, attention)
        )
        self.mask_token_id = mask_token_id
        self._multiple_of = _TILE if batch_invariant else 1
        self._draw_accepted = draw_accepted
        self._banned = torch.tensor(
            sorted(special.never_emitted), dtype=torch.long, device=model.device
        )

    def run(self, works: Sequence[Work]) -> list[Accepted]:
        """Run one step: `launch`, and wait for what it gives."""
        return self.launch(works).wait()

    @torch.inference_mode()
    def launch(self, works: Sequence[Work]) -> Launched:
        """Start one step. On a GPU this returns while it runs."""
        batch = build_batch(works, self.mask_token_id, self._multiple_of)
        reading = [work for work in works if work.reads_logits]
        if not reading:
            self._forward(batch, [])
            return Launched(works, None)
        logits, tensors = self._forward(batch, _reads_on_host(reading))  # the one copy from it
        row, depth, num_proposed, thresholds, measures = tensors
        reads = Reads(
            row=row,
            depth=depth,
            num_proposed=num_proposed,
            thresholds=thresholds,
            measures=measures,
            used=frozenset(work.request.options.confidence for work in reading),
            max_depth=max(work.num_masks for work in reading) + 1,
        )
        return Launched(works, accept(logits, reads, self._banned, self._drawn(reading)))

    def capture(
        self,
        sizes: GraphSizes,
        capture: Capture,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """See `GraphedForward.capture`; without paged attention there is nothing to do."""
        if isinstance(self._forward, GraphedForward):
            self._forward.capture(sizes, capture, on_progress)

    def _drawn(self, works: Sequence[Work]) -> Tensor | None:
        if self._draw_accepted is None:
            return None
        counts = [self._draw_accepted(work.request, work.num_masks + 1) for work in works]
        return torch.tensor(counts, device=self.model.device)


def _reads_on_host(works: Sequence[Work]) -> list[Tensor]:
    """The tensors of `Reads`, in its order."""
    counts = [work.num_masks + 1 for work in works]
    options = [work.request.options for work in works]
    return [
        torch.tensor([row for row, count in enumerate(counts) for _ in range(count)]),
        torch.tensor([depth for count in counts for depth in range(count)]),
        torch.tensor(counts),
        torch.tensor([option.threshold for option in options]),
        torch.tensor([_MEASURES[option.confidence] for option in options]),
    ]
