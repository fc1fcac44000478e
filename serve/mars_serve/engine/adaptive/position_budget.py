"""Bounds the positions of a step by what the device's memory has held so far."""

import logging

_FIRST_WAIT, _LONGEST_WAIT = 256, 65536
"""Fewest and most steps after which more positions are tried again."""

_log = logging.getLogger(__name__)


class PositionBudget:
    """The most positions of a step: fewer after one that ran out of memory, and more again later.

    Other processes may have taken the memory for a while, so the bound doubles after some steps
    that fit. Each further step that does not fit doubles their number.
    """

    def __init__(self, most: int, least: int) -> None:
        """Begin with ``most`` positions; the bound never falls below ``least``, with which any
        request can go on.
        """
        self.positions = most
        """Most positions of a step at present."""
        self.least = least
        """Positions with which any request can go on."""
        self.num_out_of_memory = 0
        """Number of steps that ran out of memory, counted once for each attempt."""
        self._most, self._wait, self._num_fitting = most, _FIRST_WAIT // 2, 0

    def shrink(self, num_positions: int) -> None:
        """Note that a step of so many positions ran out of memory: further ones get half of it."""
        self.num_out_of_memory += 1
        self._num_fitting = 0
        bound = max(self.least, min(self.positions, num_positions) // 2)
        if bound == self.positions:
            return
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self.positions = bound
        _log.warning(
            "a step of %d positions ran out of the device's memory; steps have at most %d positions"
            " for the next %d steps. Lower engine.memory_fraction or engine.max_num_batched_tokens"
            " if this comes again",
            num_positions,
            self.positions,
            self._wait,
        )

    def note_fitting(self) -> None:
        """Note a step that fitted; after enough of them the bound doubles."""
        if self.positions == self._most:
            return
        self._num_fitting += 1
        if self._num_fitting >= self._wait:
            self.positions, self._num_fitting = min(2 * self.positions, self._most), 0
