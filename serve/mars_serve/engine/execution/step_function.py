"""The model as a function of a step's tensors, compiled if the settings ask for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.errors import UserError
from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.operator import attending
from mars_serve.engine.decoder.adapter import StepGate, step_gate
from mars_serve.engine.decoder.decoder import MergedDecoder, is_merged

_log = logging.getLogger(__name__)

_COMPILED_FOR = (16, 1)
"""Numbers of positions that the decoder is compiled for: the first stands for all but one. No step
of one position feeds a mask."""

Decode = Callable[[Tensor, Tensor], Tensor]
"""Function from token ids and position ids, int64 [positions] each, to hidden states
[positions, hidden_size]."""
DecodeStep = Callable[[Tensor, Tensor, Any, bool], Tensor]
"""`Decode` with the step's attention metadata, and whether an adapter acts in the step."""


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
        self.is_gated = step_gate(model) is not None
        """Whether it matters if the adapter acts in a step."""

    def hidden(
        self, ids: Tensor, position_ids: Tensor, metadata: Any, *, has_masks: bool = True
    ) -> Tensor:
        """Return the last layer's hidden states of all positions, [positions, hidden_size].

        Args:
            ids: int64 [positions], token ids.
            position_ids: int64 [positions].
            metadata: the step's attention metadata.
            has_masks: whether ``ids`` may hold the mask, at which an adapter acts.
        """
        return self._decode(ids, position_ids, metadata, has_masks)

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
    gate = step_gate(model)
    if is_merged(model):
        return _gated(MergedDecoder(model), gate)
    decode = _own_decoder(model)

    def decode_step(decode: Decode, ids: Tensor, position_ids: Tensor, metadata: Any) -> Tensor:
        with attending(partial(attention.attend, metadata=metadata)):
            return decode(ids, position_ids)

    if not compiled:
        return _gated(partial(decode_step, decode), gate)
    plain = _compile(decode, model.device)
    if gate is None:
        return lambda ids, position_ids, metadata, _: decode_step(
            plain, ids, position_ids, metadata
        )
    # Compiled code contains the gate's state, so each state has its own.
    with_masks = _compile(_setting(decode, gate), model.device, _COMPILED_FOR[:1])
    return lambda ids, position_ids, metadata, has_masks: decode_step(
        with_masks if has_masks else plain, ids, position_ids, metadata
    )


def _gated(decode: Callable[[Tensor, Tensor, Any], Tensor], gate: StepGate | None) -> DecodeStep:
    """Return a decoder that sets the gate of an adapter, if there is one, to each step."""

    def decode_step(ids: Tensor, position_ids: Tensor, metadata: Any, has_masks: bool) -> Tensor:
        if gate is not None:
            gate.set(ids if has_masks else None)
        return decode(ids, position_ids, metadata)

    return decode_step


def _setting(decode: Decode, gate: StepGate) -> Decode:
    """Return a decoder that opens the gate for the masks of a step, and closes it behind it."""

    def decode_masks(ids: Tensor, position_ids: Tensor) -> Tensor:
        gate.set(ids)
        hidden = decode(ids, position_ids)
        gate.set(None)
        return hidden

    return decode_masks


def _own_decoder(model: PreTrainedModel) -> Decode:
    decoder: Any = model.base_model  # the whole model's forward would wrap its output twice

    def decode(ids: Tensor, position_ids: Tensor) -> Tensor:
        output = decoder(input_ids=ids[None], position_ids=position_ids[None], use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    return decode


@torch.inference_mode()  # the mode in which steps run: torch compiles anew for any other
def _compile(
    decode: Decode, device: torch.device, numbers_of_positions: Sequence[int] = _COMPILED_FOR
) -> Decode:
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
            for num_positions in numbers_of_positions:
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
