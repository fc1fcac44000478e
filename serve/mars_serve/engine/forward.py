"""One forward pass over the work of a step, and the proposals read from it.

Turns `Work` into tensors, runs the model on them once and applies the acceptance rule on the
device. Knows nothing of queues or text.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint import SpecialTokens
from mars_platform.method import confidence, num_accepted
from mars_serve.engine.attention import ATTENTION_NAME, PagedKeyValues, PagedStep, build_group
from mars_serve.engine.scheduler import Work


@dataclass(frozen=True)
class _Reads:
    """Which logits a step reads: depths 0..masks of each row that reaches its cursor."""

    places: Tensor  # int64 [reads], places in the step
    row: Tensor  # int64 [reads]
    depth: Tensor  # int64 [reads]
    num_proposed: Tensor  # int64 [rows]
    thresholds: Tensor  # float32 [rows]


class ModelRunner:
    """Owns the model and its key/value pages."""

    def __init__(
        self,
        model: PreTrainedModel,
        special: SpecialTokens,
        mask_token_id: int | None,
        *,
        num_pages: int,
        page_size: int,
    ) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        self.page_size = page_size
        self.mask_token_id = mask_token_id
        self.storage = PagedKeyValues(model.config, num_pages, page_size, model.dtype, model.device)
        self._banned = torch.tensor(
            sorted(special.never_emitted), dtype=torch.long, device=model.device
        )

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[list[int]]:
        """Run one step.

        Returns:
            Accepted tokens of each work: at least one where it reads logits, none elsewhere.
        """
        ids, positions, starts = self._inputs(works)
        reads = self._reads(works, starts)
        if reads.places.numel() == 0:
            self._forward(works, ids, positions, starts, keep=torch.zeros(1, dtype=torch.long))
            return [[] for _ in works]
        logits = self._forward(works, ids, positions, starts, keep=reads.places)
        accepted = iter(self._accept(logits, reads))
        return [next(accepted) if work.reads_logits else [] for work in works]

    def _inputs(self, works: list[Work]) -> tuple[Tensor, Tensor, list[int]]:
        ids: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        for work in works:
            starts.append(len(ids))
            begin = work.request.num_stored
            ids += work.request.tokens[begin : begin + work.num_tokens]
            if work.num_masks:
                assert self.mask_token_id is not None
                ids += [self.mask_token_id] * work.num_masks
            positions += range(begin, begin + work.num_tokens + work.num_masks)
        return torch.tensor([ids]), torch.tensor([positions]), starts

    def _reads(self, works: list[Work], starts: list[int]) -> _Reads:
        rows = [(s, w) for s, w in zip(starts, works, strict=True) if w.reads_logits]
        counts = [work.num_masks + 1 for _, work in rows]
        cursors = [start + work.num_tokens - 1 for start, work in rows]
        depth = [d for count in counts for d in range(count)]
        row = [index for index, count in enumerate(counts) for _ in range(count)]
        device = self.model.device
        return _Reads(
            places=torch.tensor(
                [cursors[r] + d for r, d in zip(row, depth, strict=True)],
                dtype=torch.long,
                device=device,
            ),
            row=torch.tensor(row, dtype=torch.long, device=device),
            depth=torch.tensor(depth, dtype=torch.long, device=device),
            num_proposed=torch.tensor(counts, dtype=torch.long, device=device),
            thresholds=torch.tensor([w.request.options.threshold for _, w in rows], device=device),
        )

    def _forward(
        self, works: list[Work], ids: Tensor, positions: Tensor, starts: list[int], keep: Tensor
    ) -> Tensor:
        """Logits at the places in ``keep``: [places, vocabulary]."""
        device = self.model.device
        output = self.model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            use_cache=False,
            logits_to_keep=keep.to(device),
            step=self._paged_step(works, starts),
        )
        logits: Tensor = output.logits[0]
        return logits

    def _accept(self, logits: Tensor, reads: _Reads) -> list[list[int]]:
        proposed = logits.index_fill(-1, self._banned, -torch.inf).argmax(-1)
        shape = (len(reads.num_proposed), int(reads.depth.max()) + 1)
        sure = logits.new_zeros(shape, dtype=torch.float32)
        sure[reads.row, reads.depth] = confidence(logits, proposed)
        tokens = proposed.new_zeros(shape)
        tokens[reads.row, reads.depth] = proposed
        counts = num_accepted(sure, reads.thresholds, reads.num_proposed)
        packed = torch.cat([counts[:, None], tokens], dim=1).tolist()  # one copy to the host
        return [row[1 : 1 + row[0]] for row in packed]

    def _paged_step(self, works: list[Work], starts: list[int]) -> PagedStep:
        lengths = [work.num_tokens + work.num_masks for work in works]
        members = defaultdict[int, list[int]](list)
        for index, length in enumerate(lengths):
            members[(length - 1).bit_length()].append(index)  # similar lengths: little padding
        groups = [
            build_group(
                [starts[i] for i in indices],
                [works[i].request.num_stored for i in indices],
                [lengths[i] for i in indices],
                [works[i].request.pages for i in indices],
                self.page_size,
            )
            for indices in members.values()
        ]
        device = self.model.device
        return PagedStep(
            storage=self.storage,
            committed=self._committed(works, starts).to(device),
            slots=self._slots(works).to(device),
            groups=[group.to(device) for group in groups],
            places=_flat_places([group.positions for group in groups], members, lengths).to(device),
        )

    @staticmethod
    def _committed(works: list[Work], starts: list[int]) -> Tensor:
        return torch.cat(
            [torch.arange(s, s + w.num_tokens) for s, w in zip(starts, works, strict=True)]
        )

    def _slots(self, works: list[Work]) -> Tensor:
        slots = []
        for work in works:
            token = torch.arange(work.request.num_stored, work.request.num_stored + work.num_tokens)
            page = torch.tensor(work.request.pages)[token // self.page_size]
            slots.append(page * self.page_size + token % self.page_size)
        return torch.cat(slots)


def _flat_places(
    rectangles: list[Tensor], members: dict[int, list[int]], lengths: list[int]
) -> Tensor:
    """For each place of the step in order, its index in the groups' rectangles laid flat."""
    offsets = [0, *accumulate(rectangle.numel() for rectangle in rectangles)]
    where: dict[int, Tensor] = {}
    for offset, rectangle, indices in zip(offsets, rectangles, members.values(), strict=False):
        for row, index in enumerate(indices):
            begin = offset + row * rectangle.shape[1]
            where[index] = torch.arange(begin, begin + lengths[index])
    return torch.cat([where[index] for index in range(len(lengths))])
