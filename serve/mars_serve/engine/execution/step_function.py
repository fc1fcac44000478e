"""The model as a function of a step's tensors, compiled if the settings ask for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.errors import UserError
from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.operator import attending
from mars_serve.engine.decoder.decoder import MergedDecoder, is_merged

_log = logging.getLogger(__name__)

_COMPILED_FOR = (16, 1)
"""Numbers of positions that the decoder is compiled for: the first stands for all but one."""

Decode = Callable[[Tensor, Tensor], Tensor]
"""Function from token ids and position ids, int64 [positions] each, to hidden states
[positions, hidden_size]."""
DecodeStep = Callable[[Tensor, Tensor, Any], Tensor]
"""`Decode` with the step's attention metadata as a third argument."""


class StepFunction:
    """The decoder and the output layer over the positions of a step."""

    def __init__(
        self, model: PreTrainedModel, attention: Attention, *, compiled: bool = False
    ) -> None:
        """Take a model, and compile its decoder for all numbers of positions if that is wanted.

        Args:
            model: attends by the operator ``marsray::attend``; its layers do not change any more.
            attention: owns the KV cache.
            compiled: whether to use ``torch.compile``, which takes some seconds for each layer, and
                less if torch finds the result in its cache; not for merged layers.

        Raises:
            UserError: the model cannot be compiled on this machine.
        """
        self._output = model.get_output_embeddings()
        self._decode = _decoder(model, attention, compiled=compiled)

    def hidden(self, ids: Tensor, position_ids: Tensor, metadata: Any) -> Tensor:
        """Return the last layer's hidden states of all positions, [positions, hidden_size]."""
        return self._decode(ids, position_ids, metadata)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden_size]."""
        logits: Tensor = self._output(hidden)
        return logits

    def write_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of hidden states to a table [n, vocabulary]."""
        output: Any = self._output
        if type(output) is nn.Linear and output.bias is None:
            torch.mm(hidden, output.weight.t(), out=logits)
        else:
            logits.copy_(self.logits(hidden))


def _decoder(model: PreTrainedModel, attention: Attention, *, compiled: bool) -> DecodeStep:
    if is_merged(model):
        return MergedDecoder(model)
    decode = _own_decoder(model)
    if compiled:
        decode = _compile(decode, model.device)

    def decode_step(ids: Tensor, position_ids: Tensor, metadata: Any) -> Tensor:
        with attending(partial(attention.attend, metadata=metadata)):
            return decode(ids, position_ids)

    return decode_step


def _own_decoder(model: PreTrainedModel) -> Decode:
    decoder: Any = model.base_model  # the whole model's forward would wrap its output twice

    def decode(ids: Tensor, position_ids: Tensor) -> Tensor:
        output = decoder(input_ids=ids[None], position_ids=position_ids[None], use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    return decode


@torch.inference_mode()  # the mode in which steps run: torch compiles anew for any other
def _compile(decode: Decode, device: torch.device) -> Decode:
    from torch._dynamo import exc, mark_dynamic  # takes long to import

    def decode_numbers(numbers: Tensor) -> Tensor:
        ids, position_ids = numbers
        return decode(ids, position_ids)

    # Torch keeps compiled code, and limits its variants, by code object: each model gets its own.
    decode_numbers.__code__ = decode_numbers.__code__.replace()
    compiled = torch.compile(
        decode_numbers,
        fullgraph=True,
        # The model is the engine's own and never changes: checking that in each step takes time.
        options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
    )
    begin = time.perf_counter()
    try:
        with attending(lambda _layer, query, *_: torch.zeros_like(query)):
            for num_positions in _COMPILED_FOR:
                numbers = torch.zeros(2, num_positions, dtype=torch.long, device=device)
                if num_positions > 1:
                    mark_dynamic(numbers, 1)  # else torch takes it for a weight's equal size
                compiled(numbers)
    except exc.TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"engine.compile: the model cannot be compiled here ({reason}); leave it out"
        ) from error
    _log.info("compiled the model's decoder in %.0f s", time.perf_counter() - begin)
    # Compiled code relies on the offset of a view in its memory; a new tensor always has offset 0.
    return lambda ids, position_ids: compiled(torch.stack([ids, position_ids]))
