"""Admits a model by a test: what mixes its positions is bound, and nothing else mixes them.

No field of a configuration says for sure how a family's layers attend. So it is tried when a model
is loaded, on a few tokens: its layers' calls are recorded; with operators that do not mix
positions, a permutation of the positions has to permute the outputs; and the logits of the way in
which the model is to run have to be those of transformers' own forward pass. Imports no Ray or HTTP
library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from mars_platform.errors import UserError, one_line
from mars_platform.mixing.bind import AttentionCall, UnknownAttentionError, read_call
from mars_platform.mixing.head import causal_of, decoder_of
from mars_platform.mixing.recurrent import ConvolveCall, ScanCall, bind_recurrence
from mars_platform.mixing.specs import AttentionSpec, ConvSpec, LayerSpecs, ScanSpec

PREFIX = 16
"""Leading tokens whose logits are judged apart from the others, which an engine computes behind
them."""
_NUM_TOKENS = 24
_PERMUTED = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest difference of permuted hidden states in narrow types, relative to the largest number.
Each position is computed as before, so that even deep models give less."""
_ROUNDED = {torch.float16: 0.05, torch.bfloat16: 0.2}
"""The same for logits of two ways. Rounding in 40 layers of bfloat16 gives 0.02 to 0.1, and layers
that compute something else give a half or more."""
_TOLERANCE = 1e-3
_NAME = "marsray_probe"
_REMEDY = "take one of the model families that the documentation's reference lists"


@dataclass(frozen=True)
class Probe:
    """Holds what a model's layers ask for, and its own logits of a few tokens."""

    family: str
    specs: tuple[AttentionSpec, ...]
    """Attention of each layer that attends, in the order of the layers."""
    scans: tuple[ScanSpec, ...]
    convolutions: tuple[ConvSpec, ...]
    tokens: list[int]
    logits: Tensor
    """float32 [tokens, vocabulary], the logits behind each."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, *, avoided: Collection[int] = ()) -> Probe:
        """Run a model that is in the mode of inference, and whose attention is still its own.

        Its attention is "eager" afterwards. Ids in ``avoided``, such as the mask's, are left out.

        Raises:
            UserError: something mixes positions in a way that is not known; the message names the
                family.
        """
        config = model.config.get_text_config()
        drawn = torch.randint(
            config.vocab_size,
            (_NUM_TOKENS + 8 * len(avoided),),
            generator=torch.Generator().manual_seed(0),
        )
        most = min(_NUM_TOKENS, getattr(config, "max_position_embeddings", None) or _NUM_TOKENS)
        tokens = [token for token in drawn.tolist() if token not in avoided][:most]
        ids = torch.tensor([tokens], device=model.device)
        layers = record(model, ids)
        model.set_attn_implementation("eager")
        logits = causal_of(model)(input_ids=ids, use_cache=False).logits[0]
        return cls(model.config.model_type, *layers, tokens, _comparable(logits))

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has states or convolutions."""
        return bool(self.scans or self.convolutions)

    def check(self, way: str, compute: Callable[[], Tensor]) -> None:
        """Refuse the model if it gives other logits in another way.

        ``way`` names the other way, in which ``compute`` returns the logits, [tokens or fewer,
        vocabulary], behind the leading tokens. Half of the prefix, and half of the other tokens,
        have to agree: in a narrow type a mixture of experts may choose another expert for a few
        tokens.
        """
        with _refusals(self.family, way):
            found = compute()
        expected = self.logits[: len(found)]
        allowed = _ROUNDED.get(found.dtype, _TOLERANCE)
        errors = _differences(_comparable(found), expected)
        for part in (errors[:PREFIX], errors[PREFIX:]):
            if len(part) and not part.median() <= allowed:
                first = int((~(errors <= allowed)).nonzero()[0])
                raise _refusal(
                    self.family,
                    f"its logits {way} differ from those of transformers by "
                    f"{float(part.median()):.1%} of the largest ({allowed:.1%} would be rounding), "
                    f"first behind token {first + 1} of {len(errors)}",
                )


@torch.no_grad()
def record(model: PreTrainedModel, ids: Tensor) -> LayerSpecs:
    """Return what a model's layers ask for over token ids [1, positions].

    Its attention is replaced by one that does not mix positions, which stays. A model on the device
    "meta" has no numbers: then something else that mixes positions is not found.

    Raises:
        UserError: something else mixes positions, or a layer's attention is not known.
    """
    with _refusals(model.config.model_type, "with another attention"):
        return _record(model, ids)


def _record(model: PreTrainedModel, ids: Tensor) -> LayerSpecs:
    model.set_attn_implementation(_NAME)
    recorder, decoder = _Recorder(), decoder_of(model)
    mixing = {"mixing": recorder} if bind_recurrence(decoder) else {}
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(1))
    order = order.to(ids.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    mask = torch.ones_like(ids, device="cpu" if ids.is_meta else None)  # some look at its numbers

    def outputs(order: Tensor) -> Tensor:
        with recorder.active(positions[:, order]):
            output = decoder(
                input_ids=ids[:, order],
                position_ids=positions[:, order],
                # Without it, transformers would take a permutation for several packed texts.
                attention_mask=mask,
                use_cache=False,
                **mixing,
            )
        hidden: Tensor = output[0][0]
        return hidden

    straight, specs = outputs(positions[0]), recorder.specs()
    attention = specs.attention
    if not attention:
        raise UnknownAttentionError("no layer calls transformers' attention interface")
    if repeated := {one.layer for one, two in pairwise(attention) if one.layer == two.layer}:
        layers = str(sorted(repeated)[:4])[1:-1]
        raise UnknownAttentionError(f"it attends more than once a pass in layers {layers}")
    if straight.device.type != "meta":
        difference = _differences(_finite(outputs(order)), _finite(straight[order])).median()
        if not difference <= _PERMUTED.get(straight.dtype, _TOLERANCE):
            raise UnknownAttentionError(
                "something besides attention mixes positions or counts them: if they are permuted, "
                f"hidden states differ by {float(difference):.1%} of the largest"
            )
    return specs


class _Recorder:
    """Notes what layers ask for, and computes each position by itself."""

    def __init__(self) -> None:
        self._calls: list[tuple[AttentionCall, Tensor | None]] = []
        self._scans: list[ScanSpec] = []
        self._convolutions: list[ConvSpec] = []
        self._reaches: list[tuple[Tensor, int | None, int | None]] = []
        """The masks of the model, each with its window and its chunk."""

    @contextmanager
    def active(self, positions: Tensor) -> Iterator[None]:
        """Have the calls of models in this thread, over tokens at ``positions``, recorded."""
        self._positions = positions
        before = _RECORDER.set(self)
        try:
            yield
        finally:
            _RECORDER.reset(before)

    def attend(self, call: AttentionCall, mask: Tensor | None) -> Tensor:
        self._calls.append((call, mask))
        groups = call.query.shape[1] // call.key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (call.key, call.value))
        scores = (call.query_at(self._positions) * key).sum(-1, keepdim=True) * call.scaling
        gate = torch.sigmoid(scores + value.sum(-1, keepdim=True))
        return (value * gate).transpose(1, 2).contiguous()

    def scan(self, call: ScanCall) -> Tensor:
        heads, key_dim = call.key.shape[2:]
        how = call.rate is not None, call.decay.shape[-1] > 1
        self._scans.append(ScanSpec(heads, key_dim, call.value.shape[-1], *how))
        scores = (call.query * call.key + call.decay).sum(-1)
        gate = torch.sigmoid(scores if call.rate is None else scores + call.rate)
        return call.value * gate[..., None]

    def convolve(self, call: ConvolveCall) -> Tensor:
        channels, kernel = call.weight.shape
        self._convolutions.append(ConvSpec(channels, kernel))
        return call.inputs * call.weight[:, -1]

    def mask(self, mask_function: Callable[..., Any], size: int | None, **how: Any) -> Tensor:
        """Make a mask for a model, and note what it lets queries see."""
        reach = reach_of(mask_function, size, how["device"])
        how = {**how, "allow_is_causal_skip": False}
        mask = sdpa_mask(mask_function=mask_function, local_size=size, **how)
        assert isinstance(mask, Tensor)
        self._reaches.append((mask, *reach))
        return mask

    def specs(self) -> LayerSpecs:
        calls = sorted(self._calls, key=lambda x: x[0].layer)
        attention = tuple(self._spec(*each) for each in calls)
        return LayerSpecs(attention, tuple(self._scans), tuple(self._convolutions))

    def _spec(self, call: AttentionCall, mask: Tensor | None) -> AttentionSpec:
        window, chunk = call.window, None
        if mask is not None:
            known = [each for each in self._reaches if _is_same(each[0], mask)]
            if not known:
                raise UnknownAttentionError("it makes an attention mask of its own")
            _, window, chunk = known[0]
        earlier = [each.layer for each, _ in self._calls if each.key is call.key]
        return AttentionSpec(
            layer=call.layer,
            heads=call.query.shape[1],
            kv_heads=call.key.shape[1],
            key_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            window=window,
            chunk=chunk,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
            temperature=call.temperature,
            shares=earlier[0] if earlier[0] != call.layer else None,
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two masks are the same, or one is a view of all of the other."""
    bases = [each if each._base is None else each._base for each in (one, other)]
    return bases[0] is bases[1] and one.shape == other.shape


_RECORDER: ContextVar[_Recorder] = ContextVar("marsray_recorder")


def reach_of(
    mask_function: Callable[..., Any], size: int | None, device: torch.device
) -> tuple[int | None, int | None]:
    """Return the window and the chunk of a mask of transformers, by what it lets queries see.

    Raises:
        ValueError: it lets them see something else.
    """
    query = 2 * (size or 8)
    key = torch.arange(query + 2, device="cpu" if device.type == "meta" else device)
    zero = key[0]
    try:
        visible = key[mask_function(zero, zero, zero + query, key)].tolist()
    except RuntimeError:
        if device.type != "meta":
            raise
        return None, size  # the mask of chunks alone holds a tensor, which has no numbers there
    ways = {query + 1: (None, None)} if size is None else {size: (size, None), 1: (None, size)}
    way = ways.get(len(visible))
    if way is None or visible != list(range(query + 1 - len(visible), query + 1)):
        raise UnknownAttentionError("its attention mask is neither causal nor of windows or chunks")
    return way


def _probed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    call = read_call(module, query, key, value, **others)
    return _RECORDER.get().attend(call, attention_mask), None


def _probed_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **how: Any
) -> Tensor:
    return _RECORDER.get().mask(mask_function, local_size, **how)


AttentionInterface.register(_NAME, _probed)
AttentionMaskInterface.register(_NAME, _probed_mask)


@contextmanager
def _refusals(family: str, way: str) -> Iterator[None]:
    """Turn what a family's code raises into a refusal."""
    try:
        yield
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:  # a family's own code may raise anything
        reason = one_line(error)
        if not isinstance(error, UnknownAttentionError):
            reason = f"its forward pass fails {way} ({type(error).__name__}: {reason})"
        raise _refusal(family, reason) from error


def _refusal(family: str, reason: str) -> UserError:
    return UserError(f"model: it is of the family {family!r}, and {reason}; {_REMEDY}")


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference at each position, relative to the largest number of all."""
    return (found - expected).abs().amax(-1) / expected.abs().max().clamp(min=1e-9)


def _comparable(logits: Tensor) -> Tensor:
    """Return logits around their mean; see `_finite`."""
    finite = _finite(logits)
    return finite - finite.mean(dim=-1, keepdim=True)


def _finite(numbers: Tensor) -> Tensor:
    """Return numbers as float32 on the host; what is not finite counts 0, as in broken weights.

    So does what is near the end of the type's range, as beside it no difference would be large:
    some families give such a logit to tokens that may not follow.
    """
    end = torch.finfo(numbers.dtype).max / 8
    finite = numbers.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)
    return finite.masked_fill(finite.abs() > end, 0.0)
