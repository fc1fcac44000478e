"""The slots of LoRA adapters: which adapter lies in which, and which requests need it there."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from mars_serve.engine.request import Request


class LoraSlots:
    """A fixed number of slots, each with the adapter that was put there last.

    A running request holds the slot of its adapter. Another adapter takes the place of the least
    recently used one that nobody holds. If all are held, the request waits, and so do
    requests for the adapter that the fewest hold, until its slot is free: so no adapter waits for
    good, however many requests for others come.
    """

    def __init__(self, num_slots: int, load: Callable[[int, Any], None]) -> None:
        """Start with empty slots; ``load`` puts an adapter's weights into one."""
        self.num_slots, self._load = num_slots, load
        self._slots = OrderedDict[str, int]()  # by the adapter's sum, the next to be evicted first
        self._holders = [0] * num_slots
        self.num_loads = 0

    def may_hold(self, request: Request, drained: set[str]) -> bool:
        """Return whether there is a slot for a request's adapter.

        If not, an adapter joins ``drained``: the sums of those that get no further requests.
        """
        if request.lora is None or request.lora.sum in self._slots:
            return request.lora is None or request.lora.sum not in drained
        if len(self._slots) < self.num_slots or 0 in self._holders:
            return True
        drained.add(min(self._slots, key=lambda name: self._holders[self._slots[name]]))
        return False

    def hold(self, request: Request) -> None:
        """Let a request hold its adapter's slot, and load the adapter; see `may_hold`."""
        if request.lora is None:
            return
        name, weights = request.lora.sum, request.lora_weights
        if name not in self._slots:
            assert weights is not None, "the engine has checked the request"
            slot = len(self._slots)
            if slot == self.num_slots:
                free = next(each for each in self._slots if not self._holders[self._slots[each]])
                slot = self._slots.pop(free)
            self._load(slot, weights)
            self._slots[name] = slot
            self.num_loads += 1
        self._slots.move_to_end(name)
        request.lora_slot = self._slots[name]
        self._holders[request.lora_slot] += 1

    def release(self, request: Request) -> None:
        """Let a request give its slot back, if it holds one; the adapter stays there meanwhile."""
        if request.lora_slot >= 0:
            self._holders[request.lora_slot] -= 1
            request.lora_slot = -1

    def check_integrity(self, running: Collection[Request]) -> None:
        """Prove that each running request holds the slot of its adapter, and nobody else does."""
        for request in running:
            expected = -1 if request.lora is None else self._slots[request.lora.sum]
            assert request.lora_slot == expected, f"{request.id} holds slot {request.lora_slot}"
        held = [request.lora_slot for request in running if request.lora is not None]
        assert self._holders == [held.count(slot) for slot in range(self.num_slots)]
        assert sorted(self._slots.values()) == list(range(len(self._slots)))
