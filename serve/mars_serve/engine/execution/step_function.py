"""The model as a function of a step's tensors."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.mixing.bind import AttentionCall, bound
from mars_platform.mixing.head import Head
from mars_platform.mixing.recurrent import Recurrence
from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.decoder.adapter import step_adapters
from mars_serve.engine.decoder.merged import decoder_for_steps


class StepFunction:
    """The decoder and the output layer over the positions of a step."""

    def __init__(self, model: PreTrainedModel, attention: Attention) -> None:
        """Take a model whose layers do not change any more."""
        self._decoder: Any = decoder_for_steps(model)
        self._head, self._attention = Head(model), attention
        self._adapters = step_adapters(model)

    @property
    def is_gated(self) -> bool:
        """Whether it matters if an adapter acts in a step."""
        return self._adapters is not None and self._adapters.mask_token_id is not None

    @property
    def has_slots(self) -> bool:
        """Whether positions may name slots of LoRA adapters."""
        return self._adapters is not None and self._adapters.num_slots > 0

    def hidden(
        self,
        ids: Tensor,
        position_ids: Tensor,
        metadata: Any,
        mixing: Recurrence | None = None,
        *,
        has_masks: bool = True,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Return the last layer's hidden states of all positions, [positions, hidden_size].

        ``ids``, of tokens, and ``position_ids`` are int64 [positions]. ``mixing`` runs the states
        of recurrent layers; None if there are none. A draft adapter acts only if ``has_masks``,
        which says that ``ids`` may hold the mask. ``slots``, int64 [positions], are those of LoRA
        adapters, None if no row has one.
        """
        if self._adapters is not None:
            self._adapters.set(ids if has_masks else None, slots)
        positions = position_ids[None]
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions}
        if mixing is not None:
            inputs["mixing"] = mixing
        with bound(_Step(self._attention, positions, metadata)):
            output = self._decoder(**inputs, use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden_size]."""
        return self._head(hidden)

    def write_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of hidden states to a table [n, vocabulary]."""
        self._head.write(hidden, logits)


class _Step(NamedTuple):
    attention: Attention
    positions: Tensor
    metadata: Any

    def attend(self, call: AttentionCall) -> Tensor:
        parts = call.query_at(self.positions), call.key, call.value
        query, key, value = (part[0].transpose(0, 1) for part in parts)
        attended = self.attention.attend(
            *(call.layer, query, key, value, call.scaling, self.metadata),
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return attended.contiguous().unsqueeze(0)  # some families view it in another shape
