"""Running statistics of how often masks at each depth, and drafts of each confidence, are right."""

from bisect import bisect
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mars_serve.engine.request import Request

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_Key = TypeVar("_Key", bound=Hashable)

PRIOR = 0.9
"""Assumed acceptance of a depth without evidence; optimistic, because only masks that are fed give
evidence."""
_BINS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.97, 0.99, 0.997)
"""Confidences of drafts at which one bin ends and the next begins."""
_BIN_PRIORS = [(low + high) / 2 for low, high in pairwise((0.0, *_BINS, 1.0))]
"""Assumed share of right drafts of each bin without evidence: their confidence."""
_PRIOR_WEIGHT = 4.0
"""Weight of the prior against the engine's evidence, in observations."""
_ENGINE_WEIGHT = 8.0
"""Weight of the engine's estimate against a row's evidence, in observations."""
_ROW_HALF_LIFE = 20.0  # observations
_ROW_IDLE_HALF_LIFE = 200.0  # steps
_ENGINE_HALF_LIFE = 500.0  # observations
_ENGINE_IDLE_HALF_LIFE = 500.0  # steps
_INITIAL_ENTRIES = 8


class _DecayedCounts(Generic[_Key]):
    """Exponentially decayed counts of what was proposed and accepted, by key and kind."""

    def __init__(self, size: int, *, half_life: float, idle_half_life: float) -> None:
        """Start without keys.

        Older evidence weighs half after ``half_life`` observations of one of ``size`` kinds, or
        ``idle_half_life`` steps without any.
        """
        self._decay = -1.0 / half_life
        self._idle_factor = 0.5 ** (1.0 / idle_half_life)
        # [entries, accepted and proposed, size]
        self._counts = np.zeros((_INITIAL_ENTRIES, 2, size))
        self._free = list(range(_INITIAL_ENTRIES))
        self._entries: dict[_Key, int] = {}

    @property
    def keys(self) -> list[_Key]:
        """All keys with an entry."""
        return list(self._entries)

    def entry(self, key: _Key) -> int:
        """Return the index of a key's counts; an unknown key gets an empty entry."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._take_free()
        return entry

    def forget(self, key: _Key) -> None:
        """Clear and free a key's entry; an unknown key is ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._counts[entry] = 0.0
            self._free.append(entry)

    def fade(self, num_steps: int) -> None:
        """Decay all counts by the passing of ``num_steps`` steps."""
        self._counts *= self._idle_factor**num_steps

    def add(self, entries: _Ints, new: _Floats) -> None:
        """Add ``new`` ``[len(entries), 2, size]``; a kind decays by its own observations."""
        total = np.zeros_like(self._counts)
        np.add.at(total, entries, new)
        self._counts *= np.exp2(total[:, 1:] * self._decay)
        self._counts += total

    def estimate(self, entries: Sequence[int], prior: _Floats | float, weight: float) -> _Floats:
        """Return acceptance by kind, ``[len(entries), size]``, shrunk towards ``prior``."""
        counts = self._counts[entries]
        return np.asarray((counts[:, 0] + weight * prior) / (counts[:, 1] + weight))

    def _take_free(self) -> int:
        if not self._free:
            size = len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._free = list(range(size, 2 * size))
        return self._free.pop()


def bin_of(confidence: float) -> int:
    """Return the bin of a draft by the confidence of the mask that gave it."""
    return bisect(_BINS, confidence)


class AcceptanceStatistics:
    """Running estimate, for each row and depth, of the probability that a mask is accepted, and for
    each bin of confidence, of the probability that a draft is right.

    Entry d-1 is P(depth d accepted | it was proposed and all depths before it were accepted), and
    the entries of bins follow those of depths.
    A row's evidence decays with a half-life of 20 observations and is shrunk towards the estimate
    for all rows with the same adapter, confidence measure and τ (rounded to 0.05). That estimate is
    itself shrunk towards an optimistic prior. All evidence also fades with every step, which makes
    the engine try masks again that it had given up.

    The cost of trying was simulated for one row whose masks are all rejected. At worst, over many
    costs of a mask, it is the time of about six steps at the start, then 0.7 % of the time with 8
    masks and 0.6 % with 4. Rows share what is learnt: with 32 rows it is a tenth of that.
    """

    def __init__(self, max_window: int) -> None:
        self._depths = np.arange(1, max_window + 1)
        self.prior = np.array([PRIOR] * max_window + _BIN_PRIORS)
        """Estimates without evidence, as `probabilities` returns them for a row."""
        size = len(self.prior)
        self._rows = _DecayedCounts[str](
            size, half_life=_ROW_HALF_LIFE, idle_half_life=_ROW_IDLE_HALF_LIFE
        )
        self._engine = _DecayedCounts[tuple[str, int, int]](
            size, half_life=_ENGINE_HALF_LIFE, idle_half_life=_ENGINE_IDLE_HALF_LIFE
        )
        self._pending: list[tuple[int, int, int, int]] = []
        self._pending_bins: list[tuple[int, int, bool]] = []
        self._loras: dict[int, str] = {}  # sums of adapters by the slot that they taught in

    def advance(self, num_steps: int) -> None:
        """Fade all evidence by ``num_steps`` steps."""
        self._flush()
        self._rows.fade(num_steps)
        self._engine.fade(num_steps)

    def observe(self, request: Request, num_masks: int, num_accepted: int) -> None:
        """Record that a step with ``num_masks`` masks accepted ``num_accepted`` tokens.

        ``num_accepted`` is between 1 and ``num_masks`` + 1. Depths below it were accepted, and the
        depth equal to it, if proposed, was rejected. Deeper ones give no evidence.
        """
        assert 1 <= num_accepted <= num_masks + 1 <= len(self._depths) + 1
        if num_masks == 0:
            return
        entries = self._entries(request)
        if request.plan.checks_drafts:
            place, num_depths = len(self._pending), len(self._depths)
            tried = request.drafts[: min(num_masks, num_accepted)]
            self._pending_bins += [
                (place, num_depths + bin_of(draft.confidence), depth < num_accepted)
                for depth, draft in enumerate(tried, start=1)
            ]
        self._pending.append((*entries, num_masks, num_accepted))

    def forget(self, request_id: str) -> None:
        """Drop a row's own evidence; its share in the engine's evidence stays."""
        self._flush()
        self._rows.forget(request_id)

    def probabilities(self, rows: Sequence[Request]) -> _Floats:
        """Return estimates for depths 1 to the largest window, then for bins, between 0 and 1.

        Returns:
            ``[len(rows), max_window + bins]``.
        """
        self._flush()
        entries = [self._entries(request) for request in rows]
        engine_entries = [engine for _, engine in entries]
        prior = self._engine.estimate(engine_entries, self.prior, _PRIOR_WEIGHT)
        return self._rows.estimate([row for row, _ in entries], prior, _ENGINE_WEIGHT)

    def _entries(self, request: Request) -> tuple[int, int]:
        lora, slot = request.lora, request.lora_slot
        if lora is not None and slot >= 0 and self._loras.get(slot) != lora.sum:
            self._loras[slot] = lora.sum
            self._flush()  # it holds numbers of entries
            for kind in self._engine.keys:
                if kind[2] == slot:  # what the adapter before taught
                    self._engine.forget(kind)
        return self._rows.entry(request.id), self._engine.entry(_kind(request))

    def _flush(self) -> None:
        """Add the pending observations; one call for all is cheaper than one per row."""
        if not self._pending:
            return
        rows, engine, num_masks, num_accepted = np.array(self._pending).T
        accepted = self._depths < num_accepted[:, None]  # [rows, depths]
        proposed = self._depths <= np.minimum(num_accepted, num_masks)[:, None]
        new = np.zeros((len(rows), 2, len(self.prior)))
        new[..., : len(self._depths)] = np.stack([accepted, proposed], axis=1)
        if self._pending_bins:
            places, columns, is_right = np.array(self._pending_bins).T
            np.add.at(new[:, 0], (places, columns), is_right)
            np.add.at(new[:, 1], (places, columns), 1.0)
        self._pending.clear()
        self._pending_bins.clear()
        self._rows.add(rows, new)
        self._engine.add(engine, new)


def _kind(request: Request) -> tuple[str, int, int]:
    """Return the key of the requests that are assumed to have similar acceptance: no LoRA adapter
    whose masks are bad spoils what is known of others.
    """
    slot = request.lora_slot
    if request.plan.checks_drafts:
        temperature = round(request.options.sampling.temperature * 5)
        return f"drafts {request.options.grammar is not None}", temperature, slot
    return request.options.confidence, round(request.plan.threshold * 20), slot
