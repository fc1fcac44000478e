"""Counts a replica's requests as its autoscaling needs them. Belongs to one event loop; other
threads may read.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

from mars_autoscale.policy.control import Totals
from mars_platform.method.mode import Mode
from mars_serve.engine.request import Request


class Group(Enum):
    """Whose τ a request has."""

    PINNED = auto()
    """Its own, or none: the live one does not move it."""
    DEFAULT = auto()
    FLEX = auto()


def group_of(request: Request) -> Group:
    """Of a request, whose priority says its tier."""
    options = request.options
    if options.mode is not Mode.THRESHOLD or options.threshold is not None:
        return Group.PINNED
    return Group.FLEX if options.priority < 0 else Group.DEFAULT


class RequestLoad:
    """What has come, what waits and what is there."""

    def __init__(self) -> None:
        self._arrived = self._prompt_tokens = self._ended = self._output_tokens = 0
        self._groups = Counter[Group]()
        self._waiting = Counter[int]()

    @property
    def totals(self) -> Totals:
        """Since the replica's start."""
        return Totals(self._arrived, self._prompt_tokens, self._ended, self._output_tokens)

    def share(self, group: Group) -> float:
        """Of the requests that are there, 0 to 1."""
        counts = {each: self._groups[each] for each in Group}
        return counts[group] / max(sum(counts.values()), 1)

    def num_ahead(self, priority: int) -> int:
        """Requests without an output so far that a new one of this priority comes behind."""
        return sum(count for each, count in list(self._waiting.items()) if each >= priority)

    def refused(self, request: Request) -> None:
        """A request has arrived, and was sent away."""
        self._arrived += 1
        self._prompt_tokens += request.num_prompt

    def come(self, request: Request) -> None:
        """A request is there."""
        self._arrived += 1
        self._prompt_tokens += request.num_prompt
        self._groups[group_of(request)] += 1
        self._waiting[request.options.priority] += 1

    def begun(self, request: Request, num_reused: int) -> None:
        """It has its first output.

        Args:
            request: which.
            num_reused: tokens of its prompt that were found stored.
        """
        self._prompt_tokens -= num_reused
        self._waiting[request.options.priority] -= 1

    def gone(self, request: Request, *, has_begun: bool, num_tokens: int) -> None:
        """It is not there any more: it got what it wanted, or was cancelled.

        Args:
            request: which.
            has_begun: whether it had an output.
            num_tokens: of its output.
        """
        self._groups[group_of(request)] -= 1
        if has_begun:
            self._ended += 1
            self._output_tokens += num_tokens
        else:
            self._waiting[request.options.priority] -= 1
