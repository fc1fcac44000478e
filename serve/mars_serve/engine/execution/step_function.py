"""The model as a function of a step's tensors, compiled where that is asked for.

Attention is an operator of its own, ``marsray::attend``: a compiler neither looks into it nor sees
what it stores. How a step attends is no tensor; the operator finds it in a context variable. Knows
no request, no batch and no acceptance.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.errors import UserError

if TYPE_CHECKING:
    from mars_serve.engine.attention.gathered import Attention

_log = logging.getLogger(__name__)

_PLACES = (16, 1)
"""A step of one place is compiled on its own, all others together; that one is tuned for these."""

Decode = Callable[[Tensor, Tensor], Tensor]
"""From token ids and positions, int64 [places] each, to hidden states [places, hidden_size]."""

_AttendLayer = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""`Attention.attend` of one step, whose plan it knows."""
_ATTEND: ContextVar[_AttendLayer] = ContextVar("marsray_attend")
"""How the step that runs in this thread attends."""


class StepFunction:
    """The decoder and the output layer over the places of a step."""

    def __init__(
        self, model: PreTrainedModel, attention: Attention, *, compiled: bool = False
    ) -> None:
        """Compile the decoder, where asked to, for every number of places.

        Args:
            model: it attends by `attend_by_operator`, and its layers do not change any more.
            attention: owns the pages.
            compiled: with ``torch.compile``; takes some seconds for each layer, and less when
                torch finds the result in its cache.

        Raises:
            UserError: it cannot be compiled here.
        """
        self._attention = attention
        self._output = model.get_output_embeddings()
        self._decode = _decoder(model)
        if compiled:
            self._decode = _compile(self._decode, model.device)

    def __call__(self, ids: Tensor, positions: Tensor, reads: Tensor, plan: Any) -> Tensor:
        """Logits of the places that are read.

        Args:
            ids: of tokens, int64 [places].
            positions: of the tokens in their requests, int64 [places].
            reads: indices of places, int64 [reads].
            plan: the attention's for this step.

        Returns:
            [reads, vocabulary]
        """
        return self.logits(self.hidden(ids, positions, plan).index_select(0, reads))

    def hidden(self, ids: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """Hidden states of all places behind the last layer, [places, hidden_size]."""
        with _attending(partial(self._attention.attend, plan=plan)):
            return self._decode(ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """From hidden states [n, hidden_size] to logits [n, vocabulary]."""
        logits: Tensor = self._output(hidden)
        return logits


def attend_by_operator(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float
) -> Tensor:
    """`Attention.attend` of the step that runs; see there for the shapes."""
    if not torch.compiler.is_compiling():  # the way through the operator takes 10 us
        return _ATTEND.get()(layer, query, key, value, scaling)
    output: Tensor = torch.ops.marsray.attend.default(query, key, value, layer, scaling)
    return output


def _decoder(model: PreTrainedModel) -> Decode:
    decoder: Any = model.base_model  # the whole model's forward would wrap its output twice

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        output = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    return decode


@torch.inference_mode()  # as steps run: torch compiles anew for any other mode
def _compile(decode: Decode, device: torch.device) -> Decode:
    from torch._dynamo import exc, mark_dynamic  # takes long to import

    def decode_numbers(numbers: Tensor) -> Tensor:
        ids, positions = numbers
        return decode(ids, positions)

    # torch keeps what it compiles, and counts it, by code object: each model gets one of its own
    decode_numbers.__code__ = decode_numbers.__code__.replace()
    compiled = torch.compile(
        decode_numbers,
        fullgraph=True,
        # the model is the engine's own: looking at each step whether it changed is wasted time
        options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
    )
    begin = time.perf_counter()
    try:
        with _attending(lambda _layer, query, *_: torch.zeros_like(query)):
            for num_places in _PLACES:
                numbers = torch.zeros(2, num_places, dtype=torch.long, device=device)
                if num_places > 1:
                    mark_dynamic(numbers, 1)  # and no size of a weight, though it were the same
                compiled(numbers)
    except exc.TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"engine.compile: the model cannot be compiled here ({reason}); leave it out"
        ) from error
    _log.info("compiled the model's decoder in %.0f s", time.perf_counter() - begin)
    # where views begin in their memory is compiled in; a tensor made here begins at its beginning
    return lambda ids, positions: compiled(torch.stack([ids, positions]))


@contextmanager
def _attending(attend: _AttendLayer) -> Iterator[None]:
    before = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(before)


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    return _ATTEND.get()(layer, query, key, value, scaling).contiguous()


def _attend_shape(
    query: Tensor, _key: Tensor, _value: Tensor, _layer: int, _scaling: float
) -> Tensor:
    return query.new_empty(query.shape)


torch.library.define(
    "marsray::attend",
    "(Tensor query, Tensor key, Tensor value, int layer, float scaling) -> Tensor",
)
torch.library.impl("marsray::attend", "CompositeExplicitAutograd", _attend)
torch.library.register_fake("marsray::attend", _attend_shape)
