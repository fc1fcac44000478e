"""Counts the launches of a step on tensors without numbers, of models of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from decoding.engines import paged_attention
from mars_platform.checkpoint.adapter.layers import attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterSettings
from mars_platform.mixing.bind import ATTENTION_NAME
from mars_platform.mixing.probe import record
from mars_serve.engine.decoder.adapter import adapt_layers
from mars_serve.engine.execution.graphs import GraphedForward, GraphSizes
from mars_serve.engine.states.slots import States

_KERNELS = {
    "marsray.paged_attention.default": 2,
    "marsray.propose.default": 2,
    "marsray.add_low_rank.default": 2,
    "marsray.scan.default": 2,
}
"""Launches of our operators that take more than one; attention combines parts of long contexts."""
_NO_LAUNCH = ("aten.new_empty", "aten.empty", "aten.empty_like")


class LaunchCount(TorchDispatchMode):
    """Counts operators that are no views, each with its launches."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        # A conversion copies only if it has to, and is called a view in either case.
        is_view = func.is_view and _shares_memory(result, args)
        if not is_view and not name.startswith(_NO_LAUNCH):
            self.by_operator[name] += _KERNELS.get(name, 1)
        return result


def _shares_memory(result: Any, arguments: Any) -> bool:
    first = result if isinstance(result, torch.Tensor) else result[0]
    storage = first.untyped_storage()._cdata
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    return any(each.untyped_storage()._cdata == storage for each in tensors)


def captured_launches(
    family: str,
    sizes: dict[str, Any],
    num_layers: int,
    num_positions: int,
    *,
    adapter: bool = False,
) -> list[Counter[str]]:
    """Launches of a model's captured steps in bfloat16, by operator, of the two largest shapes.

    With an adapter, these are the largest without masks and then with them.

    Args:
        family: family of the model.
        sizes: fields of its config but the number of layers.
        num_layers: number of layers.
        num_positions: positions of the step, each a row of its own.
        adapter: whether the model has an adapter.
    """
    config = AutoConfig.for_model(family, num_hidden_layers=num_layers, **sizes)
    return launches_of(config, num_positions, adapter=adapter)


def launches_of(
    config: PreTrainedConfig, num_positions: int, *, adapter: bool = False
) -> list[Counter[str]]:
    """Launches of the captured steps of a config's model; see `captured_launches`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    kinds = record(model, torch.ones(1, 4, dtype=torch.long, device="meta"))
    attention = paged_attention(model, kinds.attention, num_pages=64, page_size=64)
    states = None
    if kinds.scans or kinds.convolutions:
        options = {"dtype": model.dtype, "device": model.device}
        states = States(*kinds[1:], num_slots=8, num_drafts=4, **options)
    if adapter:
        with torch.device("meta"):
            attach_adapter(model, AdapterSettings(), mask_token_id=7)
    model.set_attn_implementation(ATTENTION_NAME)
    adapt_layers(model, is_fixed=True)
    banned = torch.empty(2, dtype=torch.long, device="meta")
    forward = GraphedForward(model, attention, banned, states)
    counts = list[Counter[str]]()

    def count(function: Callable[[], None]) -> Callable[[], None]:
        if len(counts) < 2:
            with LaunchCount() as launches:
                function()
            counts.append(launches.by_operator)
        return function

    forward.capture(GraphSizes(num_positions, 1, num_positions, max_pages=16), count)
    return counts
