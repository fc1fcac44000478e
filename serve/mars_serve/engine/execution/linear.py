"""Linear layers in the weight layout that this machine multiplies fastest.

On a CPU, decoding multiplies a few rows with large matrices, which the default matrix library does
slowly on some machines. oneDNN can keep a weight in a packed layout of its own, and so can the
functions of C++. For each shape of layers, apart with and without a bias, all layouts are timed at
load and one of the fastest is kept. On other devices nothing is changed.
"""

import inspect
import logging
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.mixing.latent import HeadLinear
from mars_serve.engine.kernels.native import Native

_Make = Callable[[nn.Linear], nn.Module]

_log = logging.getLogger(__name__)

_TIMED_ROWS = (1, 4, 16, 64)
"""Numbers of rows of the timed products, for one-token decoding in small and large batches and for
windows."""
_ROUNDS, _REPEATS = 2, 3
"""Rounds in which all layouts take turns, so that a busy time of the machine meets no layout alone,
and further runs of a product in each."""
_LONG_S = 0.05
"""Seconds of a product after which it has no further runs. Where a processor lacks instructions for
the weights' type, some take a second."""
_ABOUT_AS_FAST = 1.25
"""Factor within which times count as equal: a row of a product in C++ does not depend on the number
of rows, and a core that another program takes holds it up less, which are worth more."""
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


class NativeLinear(nn.Module):
    """A linear layer without gradients whose weight is packed for a function of C++."""

    def __init__(self, linear: nn.Linear, native: Native) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self._native, self._packed = native, native.pack(linear.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows = inputs.to(self._packed.dtype).contiguous()
        return self._native.multiply(rows, self._packed, self.bias, self.out_features)


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


def pack_linears(
    model: PreTrainedModel, native: Native | None = None, *, timed: bool = True
) -> None:
    """Replace, in place, each linear layer on the CPU by a form that is about the fastest.

    Unless ``timed``, each layer that oneDNN can pack is packed, so that each load gives the same
    numbers. ``native`` are functions for the model's numbers, if there are some. A layer whose
    weight the module around it reads, as some routers do, stays as it is.
    """
    chosen: dict[tuple[Any, ...], _Make] = {}
    for parent, name, linear in _linears(model, (nn.Linear,)):
        parent_type: Any = type(parent)
        if f"self.{name}.weight" in _source_of(parent_type):
            continue
        weight = linear.weight
        kind = weight.shape, linear.bias is None, weight.dtype
        is_first = kind not in chosen
        if is_first:
            forms: list[_Make] = [PackedLinear] if _can_pack(linear) else []
            if timed:
                is_taken = weight.dtype is model.dtype and weight.shape[1] % 2 == 0
                if native is not None and is_taken and weight.is_contiguous():
                    forms.insert(0, partial(NativeLinear, native=native))
                forms = [_fast(linear, forms)] if forms else []
            chosen[kind] = forms[0] if forms else _as_it_is
        made = chosen[kind](linear)
        if is_first:
            _log.info("linear layers of %d x %d: %s", *weight.shape, type(made).__name__)
        setattr(parent, name, made)


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


@cache
def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # the class was not read from a file
        return ""


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
def _fast(linear: nn.Linear, forms: Sequence[_Make]) -> _Make:
    """Return the first of the forms of a layer, `_as_it_is` last, that is about as fast as any."""
    forms = [*forms, _as_it_is]
    # One form exists at a time, because layers may be large.
    rounds = [[_least_seconds(form(linear), linear) for form in forms] for _ in range(_ROUNDS)]
    times = np.min(rounds, axis=0)  # [forms, numbers of rows]
    # Other processes may disturb one of the numbers of rows.
    ratios = np.median(times / times.min(axis=0), axis=1)
    return forms[int((ratios <= _ABOUT_AS_FAST * ratios.min()).argmax())]


def _least_seconds(form: nn.Module, linear: nn.Linear) -> list[float]:
    """Return the least seconds that a form of a layer takes for each number of rows."""
    least = []
    for rows in _TIMED_ROWS:
        inputs = linear.weight.new_ones(rows, linear.in_features)
        run = partial(form, inputs)
        least_s = timeit.timeit(run, number=1)
        if least_s < _LONG_S:
            least_s = min(least_s, *timeit.repeat(run, repeat=_REPEATS, number=1))
        least.append(least_s)
    return least


def _as_it_is(linear: nn.Linear) -> nn.Module:
    return linear
