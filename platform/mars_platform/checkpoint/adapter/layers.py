"""Layers that add an adapter to a model's own layers, at the positions of masks only.

    y[i] = W x[i] + scale * B A x[i]   if the input token at position i is the mask
    y[i] = W x[i]                      otherwise, bit for bit what the model's own layer returns

(LoRA, arXiv 2106.09685, gated by the input token). The embedding sees the input tokens of each
forward pass before any other layer does, so it sets the gate that all other layers read. The mask
token's embedding row is the adapter's own, and the output layer stays the model's, even where it is
tied to the embedding. The model's forward needs no change. Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from mars_platform.checkpoint.adapter.settings import AdapterSettings, LoraSettings
from mars_platform.errors import UserError, one_line
from mars_platform.mixing.head import layers_of, per_layer_embedding
from mars_platform.mixing.latent import EXPANSION, is_latent

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel

_PEFT_PREFIX = "base_model.model."
_MOST_HEADER = 2**20
"""Most bytes of a file of weights beside its numbers."""


class MaskGate:
    """The mask positions of the forward pass that runs; all gated layers of a model share one."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0, dtype=torch.long)
        """int64 [masks], indices of the mask positions among all positions of the pass."""

    def set(self, is_mask: Tensor) -> None:
        """Set the gate for the next pass to the tokens where ``is_mask``, bool [...], is True."""
        self.rows = is_mask.flatten().nonzero().squeeze(-1)


class GatedEmbedding(nn.Module):
    """An input embedding in which the mask token has a row of the adapter's own.

    ``mask_token_id`` may lie past the rows of ``base_layer``, the model's own embedding. The mask's
    row starts as ``mask_row``, [1, width].
    """

    def __init__(
        self, base_layer: nn.Embedding, gate: MaskGate, mask_token_id: int, mask_row: Tensor
    ) -> None:
        super().__init__()
        self.base_layer, self.gate, self.mask_token_id = base_layer, gate, mask_token_id
        self.mask_row = nn.Parameter(mask_row)

    @property
    def weight(self) -> Tensor:
        """Rows of the model's own embedding, which some decoders ask for their device."""
        return self.base_layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [...] to embeddings [..., width], and set the gate."""
        is_mask = ids == self.mask_token_id
        self.gate.set(is_mask)
        rows: Tensor = self.base_layer(ids.masked_fill(is_mask, 0))
        return torch.where(is_mask.unsqueeze(-1), self.mask_row.to(rows.dtype), rows)


class GatedLinear(nn.Module):
    """A linear layer to which a product of rank ``rank``, times ``scale``, is added at the
    positions that ``gate`` names.
    """

    def __init__(self, base_layer: nn.Linear, gate: MaskGate, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer, self.gate, self.scale = base_layer, gate, scale
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False).to(base_layer.weight)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False).to(base_layer.weight)
        nn.init.zeros_(self.lora_B.weight)  # a new adapter changes nothing

    @property
    def weight(self) -> Tensor:
        """Weight of the model's own layer, which layers of Mamba-2 offer to a fused kernel."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """Bias of the model's own layer; see `weight`."""
        return self.base_layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        outputs: Tensor = self.base_layer(inputs)
        rows = self.gate.rows
        if not len(rows) and not torch.is_grad_enabled():
            return outputs
        masked = inputs.flatten(0, -2).index_select(0, rows)  # [masks, in_features]
        added: Tensor = self.lora_B(self.lora_A(masked)) * self.scale
        outputs.flatten(0, -2).index_add_(0, rows, added.to(outputs.dtype))  # in place
        return outputs


def attach_adapter(model: PreTrainedModel, settings: AdapterSettings, mask_token_id: int) -> None:
    """Replace an unchanged model's embedding and target layers, in place, by gated ones of a new
    adapter.

    The mask token's row, which may be past the model's vocabulary, starts as the mean of the
    embedding's rows below its id. The model's own weights are kept and frozen, and the adapter's
    get gradients.

    Raises:
        UserError: the model has no layer of some name in ``target_modules``.
    """
    targets = resolve_targets(model, settings)
    model.requires_grad_(False)
    gate = MaskGate()
    embedding = model.get_input_embeddings()
    scale: Any = getattr(embedding, "embed_scale", 1.0)
    start = embedding.weight[:mask_token_id].mean(dim=0, keepdim=True) * scale
    model.set_input_embeddings(GatedEmbedding(embedding, gate, mask_token_id, start))
    if (per_layer := per_layer_embedding(model)) is not None:
        # The mask may have no row there, and an adapter keeps none: it takes the row of the first
        # token, as transformers has it for tokens without a row.
        per_layer.register_forward_pre_hook(partial(_without, mask_token_id))
    for parent, name, linear in list(_linears(model)):
        if name in targets:
            setattr(parent, name, GatedLinear(linear, gate, settings.rank, settings.scale))


def _without(mask_token_id: int, _module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Return the arguments of an embedding, token ids, with the first token in place of masks."""
    return (args[0].masked_fill(args[0] == mask_token_id, 0),)


def resolve_targets(
    model: PreTrainedModel, settings: AdapterSettings | LoraSettings, key: str = "adapter"
) -> list[str]:
    """Return the names of the layers that an adapter changes, sorted.

    ``key`` is the name of the settings in the recipe.

    Raises:
        UserError: the model has no linear layers, or none of some name in ``target_modules``.
    """
    known = {name for _, name, _ in _linears(model)}
    if not known:
        raise UserError(
            f"{key}: models of the family {model.config.model_type!r} have no linear layers that "
            "an adapter takes; leave it out, and train the whole model"
        )
    wanted = set(settings.target_modules or known)
    if unknown := sorted(wanted - known):
        raise UserError(
            f"{key}.target_modules: the model has no linear layer called {unknown[0]!r} that an "
            f"adapter can change; it has {', '.join(sorted(known))}"
        )
    return sorted(wanted)


def adapter_settings(model: nn.Module) -> AdapterSettings:
    """Return the settings that a model's adapter was attached with, all target modules named."""
    layers = {
        name.rpartition(".")[2]: module
        for name, module in model.named_modules()
        if isinstance(module, GatedLinear)
    }
    layer = next(iter(layers.values()))
    rank = layer.lora_A.out_features
    return AdapterSettings(
        rank=rank, alpha=round(layer.scale * rank), target_modules=sorted(layers)
    )


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a model's adapter by the names that peft's files give them."""
    found = dict[str, nn.Parameter]()
    for name, module in model.named_modules():
        if isinstance(module, GatedEmbedding):
            found[f"{_PEFT_PREFIX}{name}.token_adapter.trainable_tokens_delta"] = module.mask_row
        elif isinstance(module, GatedLinear):
            for part in ("lora_A", "lora_B"):
                found[f"{_PEFT_PREFIX}{name}.{part}.weight"] = module.get_parameter(
                    f"{part}.weight"
                )
    return found


def read_tensors(
    file: Path, setting: str = "adapter", most_numbers: int | None = None
) -> dict[str, Tensor]:
    """Read a file of weights, of ``most_numbers`` numbers at most; errors begin with ``setting``.

    They are copied, since a file that is mapped into memory would change weights in use when it is
    written anew, or end the process when it becomes shorter.

    Raises:
        UserError: the file is missing, damaged or too large.
    """
    remedy = f"copy all of the {setting}'s files again"
    try:
        if most_numbers is not None and file.stat().st_size > 8 * most_numbers + _MOST_HEADER:
            raise UserError(f"{setting}: {file} is larger than its settings allow; {remedy}")
        return load(file.read_bytes())
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read ({one_line(error)})"
        raise UserError(f"{setting}: {file} {problem}; {remedy}") from error


def fill_parameters(
    parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], source: str, setting: str
) -> None:
    """Copy ``tensors`` into the parameters of the same names, converted to their number type.

    Errors begin with ``setting`` and name ``source``, the origin of the weights, such as a file.

    Raises:
        UserError: a weight is missing, has another shape than its parameter, belongs to none, or
            has a number that is not finite.
    """
    if odd := sorted(tensors.keys() ^ parameters.keys()):
        state = "holds" if odd[0] in tensors else "lacks"
        raise UserError(
            f"{setting}: {source} {state} {odd[0]}, contrary to the settings beside it; copy all "
            f"of the {setting}'s files again"
        )
    for name, parameter in parameters.items():
        found, needed = tuple(tensors[name].shape), tuple(parameter.shape)
        if found != needed:
            raise UserError(
                f"{setting}: {name} in {source} has the shape {found}, and rank and model need "
                f"{needed}; copy all of the {setting}'s files again, or give its own model"
            )
        tensor = tensors[name]
        if not tensor.is_floating_point() or not tensor.to(parameter.dtype).isfinite().all():
            raise UserError(
                f"{setting}: {name} in {source} holds other numbers than finite ones of "
                f"{parameter.dtype}; copy all of the {setting}'s files again, or train it again"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def adaptable_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers of an unchanged model that an adapter can change, by their whole names."""
    names = {module: name for name, module in model.named_modules()}
    return {f"{names[parent]}.{name}": layer for parent, name, layer in _linears(model)}


def _linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers of attention and MLP, with their parents and names there.

    An engine absorbs the expansion of latents, so that no adapter can act in it; nor can one in a
    layer of Gemma 3n whose weight alone is read.
    """
    for parent in layers_of(model).modules():
        for name, child in parent.named_children():
            # bitsandbytes has a class of its own, and others mean something else
            is_plain = type(child) is nn.Linear or type(child).__name__ == "Linear4bit"
            is_absorbed = name == EXPANSION and is_latent(parent)
            is_called = not is_absorbed and name != "correction_coefs"
            if isinstance(child, nn.Linear) and is_plain and is_called:
                yield parent, name, child
