"""Random steps of recurrent layers, and the same token by token in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mars_platform.mixing.recurrent import ConvolveCall, Recurrence, ScanCall
from mars_platform.mixing.specs import ConvSpec, ScanSpec
from mars_serve.engine.batch import BatchRow, StepBatch
from mars_serve.engine.request import RowState
from mars_serve.engine.states.packed import PackedStates
from mars_serve.engine.states.slots import States

Numbers = NDArray[np.float64]
Prepare = Callable[[StepBatch], Recurrence]
DELTA = ScanSpec(heads=2, key_dim=4, value_dim=3, is_delta=True, decay_per_channel=False)
ADDED = ScanSpec(heads=3, key_dim=2, value_dim=5, is_delta=False, decay_per_channel=False)
CHANNELS = ScanSpec(heads=2, key_dim=4, value_dim=4, is_delta=True, decay_per_channel=True)
CONVOLUTIONS = [ConvSpec(channels=5, kernel=4), ConvSpec(channels=2, kernel=3)]
MODELS = {
    "delta and added": ([DELTA, ADDED], CONVOLUTIONS),
    "by channel": ([CHANNELS, CHANNELS], CONVOLUTIONS[:1]),
    "convolutions alone": ([], CONVOLUTIONS),
    "states alone": ([DELTA], []),
}
CPU = torch.device("cpu")
NUM_TEXTS, NUM_SPARE, MOST_DRAFTS, CHUNK = 4, 6, 3, 8


class Layers:
    """Random layers, whose inputs at a position are parts of one vector."""

    def __init__(self, scans: Sequence[ScanSpec], convolutions: Sequence[ConvSpec]) -> None:
        self.scans, self.convolutions = scans, convolutions
        self.weights = [torch.randn(spec.channels, spec.kernel) for spec in convolutions]
        sizes = [spec.heads * (3 * spec.key_dim + spec.value_dim + 1) for spec in scans]
        self.sizes = [*sizes, *(spec.channels for spec in convolutions)]

    def draw(self, count: int) -> torch.Tensor:
        return torch.randn(count, sum(self.sizes))

    def calls(self, vectors: torch.Tensor) -> list[ScanCall | ConvolveCall]:
        """Return what the layers say over vectors, [positions, size]."""
        parts = iter(torch.split(vectors, self.sizes, dim=1))
        calls = list[ScanCall | ConvolveCall]()
        for spec in self.scans:
            sizes = [spec.key_dim] * 3 + [spec.value_dim, 1]
            heads = next(parts).view(1, len(vectors), spec.heads, -1)
            query, key, decay, value, rate = heads.split(sizes, dim=-1)
            key = torch.nn.functional.normalize(key, dim=-1)
            decay = -decay.abs() if spec.decay_per_channel else -decay[..., :1].abs()
            rate = rate[..., 0].sigmoid() if spec.is_delta else None
            calls.append(ScanCall(query, key, value, decay, rate))
        return calls + [ConvolveCall(next(parts)[None], weight) for weight in self.weights]

    def run(
        self, step: Recurrence, vectors: torch.Tensor, device: torch.device
    ) -> list[torch.Tensor]:
        """Return the outputs of all layers, each [positions, ...]."""
        outputs = []
        for call in self.calls(vectors):
            there = call._make(None if part is None else part.to(device) for part in call)
            mix = step.scan if isinstance(there, ScanCall) else step.convolve
            outputs.append(mix(there)[0].flatten(1).cpu())
        return outputs


class Serial(NamedTuple):
    """The states behind a text, token by token, in float64."""

    states: list[Numbers]
    """[heads, key_dim, value_dim] of each layer."""
    inputs: list[Numbers]
    """[kernel, channels] of each convolution, of the last tokens."""

    @classmethod
    def empty(cls, layers: Layers) -> Serial:
        return cls(
            [np.zeros((spec.heads, spec.key_dim, spec.value_dim)) for spec in layers.scans],
            [np.zeros((spec.kernel, spec.channels)) for spec in layers.convolutions],
        )

    def behind(self, layers: Layers, vector: torch.Tensor) -> tuple[Serial, list[Numbers]]:
        """Return the states behind one more token, and the layers' outputs at it."""
        states, inputs, outputs = [], [], []
        for call in layers.calls(vector[None].double()):
            if isinstance(call, ScanCall):
                query, key, value, decay = (part[0, 0].numpy()[..., None] for part in call[:4])
                state = np.exp(decay) * self.states[len(states)]
                learned = value.swapaxes(1, 2)
                if call.rate is not None:
                    rate = call.rate[0, 0].numpy()[:, None, None]
                    learned = rate * (learned - key.swapaxes(1, 2) @ state)
                states.append(state + key * learned)
                outputs.append((query.swapaxes(1, 2) @ states[-1]).ravel())
            else:
                last = self.inputs[len(inputs)]
                inputs.append(np.concatenate([last[1:], call.inputs[0].numpy()]))
                outputs.append((inputs[-1] * call.weight.double().numpy().T).sum(0))
        return Serial(states, inputs), outputs


@dataclass
class Text:
    """A request: where its states are, and the same states token by token."""

    slots: tuple[int, int]
    read: int
    trail: list[Serial]
    """The states behind 0, 1, ... of the right drafts of the read slot's log."""


class Planned(NamedTuple):
    """A row of a step."""

    text: Text
    row: BatchRow
    vectors: torch.Tensor
    outputs: list[list[Numbers]]
    """The layers' outputs at each position."""
    trail: list[Serial]
    """The states behind the row's tokens and 0, 1, ... of its drafts."""
    snapshots: dict[int, Serial]
    """The states that its snapshots have to hold, by their slots."""


class Schedule:
    """Random steps of some texts, each of which has two slots; further slots hold snapshots."""

    def __init__(self, layers: Layers, seed: int) -> None:
        self.layers, self.rng = layers, np.random.default_rng(seed)
        self.begin, self.num_slots = Serial.empty(layers), 2 * NUM_TEXTS + NUM_SPARE
        self.snapshots = {self.num_slots: self.begin}
        self.texts = [
            Text((2 * index, 2 * index + 1), self.num_slots, [self.begin])
            for index in range(NUM_TEXTS)
        ]

    def step(self) -> list[Planned]:
        """Plan a row for each of some texts."""
        start, planned = 0, list[Planned]()
        read = {text.read for text in self.texts}
        free = [slot for slot in range(2 * NUM_TEXTS, self.num_slots) if slot not in read]
        self.rng.shuffle(free)
        for text in self.texts:
            if self.rng.random() < 0.8 or not planned:
                planned.append(self._row(text, start, free))
                start += planned[-1].row.length
        return planned

    def _row(self, text: Text, start: int, free: list[int]) -> Planned:
        rng, num_right = self.rng, len(text.trail) - 1
        num_tokens = int(rng.choice([1, 2, CHUNK, rng.integers(1, 3 * CHUNK)]))
        num_drafts = int(rng.integers(MOST_DRAFTS + 1))
        masks = tuple(rng.integers(3, size=num_drafts + 1).tolist())
        counts = rng.integers(1, num_right + num_tokens + 1, size=rng.integers(3)).tolist()
        taken = [(count, free.pop()) for count in counts if free]
        row = BatchRow(
            start=start,
            num_cached=0,
            num_tokens=num_tokens + num_drafts,
            num_drafts=num_drafts,
            masks=masks,
            pages=[],
            reads_logits=True,
            state=RowState(text.read, num_right, text.slots[text.read == text.slots[0]], taken),
        )
        vectors, outputs, behind = self.layers.draw(row.length), [], text.trail[-1:]
        for vector in vectors[: row.num_tokens]:
            state, output = behind[-1].behind(self.layers, vector)
            behind.append(state)
            outputs.append(output)
        rest = iter(vectors[row.num_tokens :])
        for state, count in zip(behind[num_tokens:], masks, strict=True):
            for _ in range(count):
                state, output = state.behind(self.layers, next(rest))
                outputs.append(output)
        every = [*text.trail, *behind[1:]]
        snapshots = {slot: every[count] for count, slot in taken}
        return Planned(text, row, vectors, outputs, behind[num_tokens:], snapshots)

    def commit(self, planned: list[Planned]) -> None:
        """Accept some drafts of each row; some texts end, and others begin at snapshots."""
        for each in planned:
            each.text.read = each.row.state.write
            each.text.trail = each.trail[: self.rng.integers(len(each.trail)) + 1]
            self.snapshots |= each.snapshots
        for text in self.texts:
            if self.rng.random() < 0.2:
                text.read = int(self.rng.choice(list(self.snapshots)))
                text.trail = [self.snapshots[text.read]]


def packed(states: States) -> Prepare:
    """Return what lays steps out in one array of integers, in shapes that have room to spare."""
    steps, room = PackedStates(states), cycle([0, 1, 3])
    device = (states.inputs or states.scans[0])[0].device

    def prepare(batch: StepBatch) -> Recurrence:
        shape = len(batch.ids), len(batch.rows) + next(room)
        numbers = np.full(sum(steps.sizes(*shape)), 99)
        steps.pack(batch, *shape, numbers)
        return steps.unpack(torch.from_numpy(numbers).to(device), *shape)

    return prepare


def run_steps(
    model: str,
    seed: int,
    way: Callable[[States], Prepare],
    num_steps: int = 12,
    device: torch.device = CPU,
) -> None:
    """Run random steps in a way, and compare all outputs.

    Slots hold NaN until they are written, and a row that fails spreads no NaN to others.
    """
    torch.manual_seed(seed)
    layers = Layers(*MODELS[model])
    schedule = Schedule(layers, seed)
    sizes = {"num_slots": schedule.num_slots, "num_drafts": MOST_DRAFTS}
    where = {"dtype": torch.float32, "device": device}
    states = States(*MODELS[model], **sizes, **where)
    for part in (*states.inputs, *(part for scan in states.scans for part in scan)):
        part[:-1] = torch.nan
    run = partial(check, way(states), layers, device)
    for index in range(num_steps):
        planned = schedule.step()
        vectors = torch.cat([*(each.vectors for each in planned), layers.draw(index % 3)])
        if index % 2:  # the step fails by its first row, and its rows run again alone
            first = planned[0]._replace(vectors=torch.full_like(planned[0].vectors, torch.nan))
            broken = torch.cat([first.vectors, vectors[len(first.vectors) :]])
            run([first, *planned[1:]], broken)
            for each in planned:
                alone = each._replace(row=replace(each.row, start=0))
                run([alone], each.vectors)
        else:
            run(planned, vectors)
        schedule.commit(planned)


def check(
    prepare: Prepare,
    layers: Layers,
    device: torch.device,
    planned: list[Planned],
    vectors: torch.Tensor,
) -> None:
    """Run a step over vectors, of which the last are padding, and compare the outputs."""
    rows = [each.row for each in planned]
    ids = [0] * len(vectors)
    batch = StepBatch(ids, ids, rows, rows[-1].start + rows[-1].length)
    found = layers.run(prepare(batch), vectors, device)
    for each in planned:
        if each.vectors.isfinite().all():
            place = slice(each.row.start, each.row.start + each.row.length)
            for layer, expected in zip(found, zip(*each.outputs, strict=True), strict=True):
                expected = torch.from_numpy(np.array(expected)).float()
                torch.testing.assert_close(layer[place], expected, rtol=0, atol=1e-4)
