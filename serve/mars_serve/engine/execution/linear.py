"""Linear layers in the weight layout that this machine multiplies fastest.

On a CPU, decoding multiplies a few rows with large matrices, which the default matrix library does
slowly on some machines. oneDNN can keep a weight in a packed layout of its own. For each shape of
layers, apart with and without a bias, both layouts are timed at load and the faster is kept. On
other devices nothing is changed.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mars_platform.mixing.latent import HeadLinear

_log = logging.getLogger(__name__)

_TIMED_ROWS = (1, 4, 16, 64)
"""Numbers of rows of the timed products, for one-token decoding in small and large batches and for
windows."""
_REPEATS = 7
_PACKED_FOR_ROWS = 32
"""Number of rows for which oneDNN picks the layout; it is as fast for others (measured)."""


class PackedLinear(nn.Module):
    """A linear layer without gradients whose weight lies in oneDNN's packed layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = _pack(linear.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            inputs, self._packed, self.bias, "none", [], ""
        )
        return output


class TiledLinear(nn.Module):
    """A linear layer that always multiplies ``tile`` rows at a time.

    Matrix libraries choose the order of summation by the shape of the product. With one shape only,
    a row's result does not depend on the number of other rows.
    """

    def __init__(self, linear: nn.Linear | PackedLinear | HeadLinear, tile: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear, self.tile = linear, tile

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows = inputs.reshape(-1, self.in_features)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % self.tile))
        outputs = torch.cat([self.linear(part) for part in torch.split(padded, self.tile)])
        return outputs[: len(rows)].view(*inputs.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, *, timed: bool = True) -> None:
    """Replace, in place, each linear layer on the CPU by its packed form if that is faster.

    Unless ``timed``, each layer that can be packed is, so that each load gives the same numbers.
    """
    packs: dict[tuple[int, int, bool], bool] = {}
    for parent, name, linear in _linears(model, (nn.Linear,)):
        kind = (linear.out_features, linear.in_features, linear.bias is None)
        if kind not in packs:
            packs[kind] = _can_pack(linear) and (not timed or _is_faster_packed(linear))
        if packs[kind]:
            setattr(parent, name, PackedLinear(linear))
    packed = [f"{rows}x{columns}" for (rows, columns, _), chosen in packs.items() if chosen]
    _log.info("packed linear layers: %s", ", ".join(packed) or "none")


def tile_linears(model: nn.Module, tile: int) -> None:
    """Replace, in place, each linear layer by one that multiplies ``tile`` rows at a time."""
    for parent, name, linear in _linears(model, (nn.Linear, PackedLinear, HeadLinear)):
        setattr(parent, name, TiledLinear(linear, tile))


def _linears(
    model: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the layers of exactly these kinds, each with its parent and its name there.

    The caller may replace a layer before it takes the next. No list of the layers is kept, so that
    replaced weights are freed at once.
    """
    parents = [module for module in model.modules() if any(True for _ in module.children())]
    for parent in parents:
        for name in [name for name, child in parent.named_children() if type(child) in kinds]:
            yield parent, name, parent.get_submodule(name)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _can_pack(linear: nn.Linear) -> bool:
    if linear.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        _pack(linear.weight.detach()[:1])
    except (AttributeError, RuntimeError) as error:  # the operator is missing, or not for this type
        _log.info("weights stay unpacked: %s", str(error).splitlines()[0])
        return False
    return True


@torch.inference_mode()
def _is_faster_packed(linear: nn.Linear) -> bool:
    packed = PackedLinear(linear)
    ratios = []
    for rows in _TIMED_ROWS:
        inputs = linear.weight.new_ones(rows, linear.in_features)
        plain_s, packed_s = _alternate(partial(linear, inputs), partial(packed, inputs))
        ratios.append(packed_s / plain_s)
    return statistics.median(ratios) < 1.0  # other processes may disturb one of them


def _alternate(*actions: Callable[[], object]) -> list[float]:
    """Run actions in turn, repeatedly, and return the least seconds that each took."""
    best = [float("inf")] * len(actions)
    for _ in range(_REPEATS):
        for index, action in enumerate(actions):
            begin = time.perf_counter()
            action()
            best[index] = min(best[index], time.perf_counter() - begin)
    return best
