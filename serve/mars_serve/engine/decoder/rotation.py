"""Rotation angles that do not depend on the rows of a step.

Transformers chooses the frequencies of the rope types dynamic and longrope by the longest position
of a forward pass, so a request's output would depend on the rows beside it, and dynamic waits for
the device. Both are settled once instead.
Source: ``transformers.modeling_rope_utils.dynamic_rope_update``.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_SETTLED = "default"
"""Rope type whose frequencies transformers leaves as they are."""


def settle_rotation(model: PreTrainedModel) -> None:
    """Have a model rotate, in place, by the same frequencies in every forward pass.

    With longrope these are the long ones if the model takes more tokens than it was first trained
    on, as in vLLM, and else the short ones. With dynamic, frequencies change only beyond the most
    tokens that the model takes, and no request is longer.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _settle_longrope(module, kinds, None, model)
            module.rope_type = _SETTLED
        elif isinstance(kinds, dict):  # some families have a kind for each type of layer
            for layer_type, kind in kinds.items():
                _settle_longrope(module, kind, layer_type, model)
            module.rope_type = dict.fromkeys(kinds, _SETTLED)


@torch.no_grad()
def _settle_longrope(
    module: nn.Module, kind: str, layer_type: str | None, model: PreTrainedModel
) -> None:
    if kind != "longrope":
        return
    config: Any = module.config
    parameters = config.rope_parameters
    original = (parameters[layer_type] if layer_type else parameters)[
        "original_max_position_embeddings"
    ]
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
        config,
        model.device,
        seq_len=min(config.max_position_embeddings, original + 1),
        layer_type=layer_type,
    )
    module.get_buffer(f"{layer_type}_inv_freq" if layer_type else "inv_freq").copy_(frequencies)
