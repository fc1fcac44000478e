"""Trains a LoRA adapter, by peft's layers in place of a model's own, and stores it.

    W' = W + scale * B A      (arXiv 2106.09685)

If the stage has masks, the mask token's row of the embedding is trained as well; where the output
layer is tied to the embedding, it has the same row. Imports no Ray.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from mars_platform.checkpoint.adapter.layers import adaptable_layers, resolve_targets
from mars_platform.checkpoint.adapter.lora import LoraWeights
from mars_platform.checkpoint.adapter.settings import AdapterMetadata, LoraSettings
from mars_platform.checkpoint.metadata import ADAPTER_WEIGHTS_FILE, METADATA_FILE
from mars_platform.mixing.head import layers_of

_FIRST, _SECOND, _ROW = ".lora_A.default.weight", ".lora_B.default.weight", ".mask_row"


class TrainedRow(nn.Module):
    """An embedding, or an output layer tied to one, in which one token's row is trained.

    ``mask_row``, [1, width], takes the place of the row ``token_id`` of ``base_layer``.
    """

    def __init__(self, base_layer: nn.Module, token_id: int, mask_row: nn.Parameter) -> None:
        super().__init__()
        self.base_layer, self.token_id, self.mask_row = base_layer, token_id, mask_row

    @property
    def weight(self) -> Tensor:
        """Rows of the layer itself, which some decoders ask for their device."""
        return self.base_layer.get_parameter("weight")

    def forward(self, inputs: Tensor) -> Tensor:
        """Map token ids [...] to embeddings, or hidden states to logits."""
        outputs: Tensor = self.base_layer(inputs)
        if isinstance(self.base_layer, nn.Embedding):
            row = self.mask_row * getattr(self.base_layer, "embed_scale", 1.0)
            is_token = (inputs == self.token_id).unsqueeze(-1)
            return torch.where(is_token, row.to(outputs.dtype), outputs)
        index = torch.tensor([self.token_id], device=outputs.device)
        own = F.linear(inputs, self.mask_row.to(inputs.dtype)).to(outputs.dtype)
        return outputs.index_copy(-1, index, own)


def quantization_of(
    settings: LoraSettings | None, precision: Literal["no", "bf16"]
) -> BitsAndBytesConfig | None:
    """Return how transformers quantizes the model's own weights; None for no quantization."""
    if settings is None or settings.quantization is None:
        return None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def add_lora(
    model: PreTrainedModel, settings: LoraSettings, mask_token_id: int | None
) -> LoraConfig:
    """Replace target layers of a model by peft's, in place; nothing else is trained from now on.

    With a ``mask_token_id``, whose row the embedding has, this row is trained as well.

    Raises:
        UserError: the model has no layer of some name in ``target_modules``.
    """
    targets = resolve_targets(model, settings, "lora")
    names = [name for name in adaptable_layers(model) if _leaf(name) in targets]
    others = [name for name, _ in model.named_modules() if name not in names]
    layers: Any = layers_of(model)
    prefix = _name_of(model, layers) + "."
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=[name.removeprefix(prefix) for name in names],
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    # peft gets the decoder's layers alone: given a whole model, it refuses layers of Mamba in some
    # families, and in others takes the names of plain layers for those of experts.
    layers.is_loaded_in_4bit = settings.quantization is not None
    inject_adapter_in_model(config, layers)
    is_unique = not any(_leaf(name) in targets for name in others)
    config.target_modules = targets if is_unique else names  # a tower for images may have the same
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft takes a narrower type beside weights of 4 bits
            parameter.data = parameter.data.float()
    if mask_token_id is not None:
        _train_row(model, mask_token_id)
        name = _name_of(model, model.get_input_embeddings())
        config.trainable_token_indices = {_leaf(name): [mask_token_id]}
    return config


def narrow_frozen(model: nn.Module) -> None:
    """Keep the weights beside a LoRA adapter in bfloat16 where that changes none of them.

    Autocast would round them to it in every forward pass. In float32 they are twice as large.
    """
    layers = [part.get_base_layer() for part in model.modules() if isinstance(part, LoraLayer)]
    weights = [layer.get_parameter("weight") for layer in layers]
    for weight in [each for each in weights if each.dtype == torch.float32]:
        narrow = weight.data.bfloat16()
        if torch.equal(narrow.float(), weight.data):
            weight.data = narrow


def _train_row(model: PreTrainedModel, token_id: int) -> None:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    row = nn.Parameter(embedding.weight[token_id : token_id + 1].detach().clone())
    is_tied = output is not None and output.weight is embedding.weight
    for layer in (embedding, output) if is_tied else (embedding,):
        parent, _, name = _name_of(model, layer).rpartition(".")
        setattr(model.get_submodule(parent), name, TrainedRow(layer, token_id, row))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: dict[nn.Module, str] = {part: name for name, part in model.named_modules()}
    return names[wanted]


def own_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the model itself, by their names without an adapter."""
    trained = (_FIRST, _SECOND, _ROW)
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights.items()
        if not name.endswith(trained)
    }


def lora_weights(weights: Mapping[str, Tensor], settings: LoraSettings) -> LoraWeights:
    """Return the adapter's part of all weights, whole ones, of a model that `add_lora` changed."""
    names = [name.removesuffix(_FIRST) for name in weights if name.endswith(_FIRST)]
    products = {name: (weights[name + _FIRST], weights[name + _SECOND]) for name in names}
    rows = [tensor.squeeze(0) for name, tensor in weights.items() if name.endswith(_ROW)]
    return LoraWeights(products, settings.alpha / settings.rank, rows[0] if rows else None)


def round_merged(merged: PreTrainedModel, trained: nn.Module, dtype: torch.dtype) -> None:
    """Round the float32 weights of a merged model to the type that its start is stored in.

    Weights that training left as they were are converted only if they stay the same, since some
    models store a few in a wider type. ``trained`` is the model with its adapter.
    """
    changed = {name for name, part in trained.named_modules() if isinstance(part, LoraLayer)}
    tables = (merged.get_input_embeddings(), merged.get_output_embeddings())
    changed |= {_name_of(merged, table) for table in tables if table is not None}
    for name, parameter in merged.named_parameters():
        narrow = parameter.data.to(dtype)
        is_changed = name.removesuffix(".weight") in changed
        if is_changed or torch.equal(narrow.to(parameter.dtype), parameter.data):
            parameter.data = narrow


def save_lora(
    path: Path,
    model: PreTrainedModel,
    weights: LoraWeights,
    config: LoraConfig,
    metadata: AdapterMetadata | None,
) -> None:
    """Write the LoRA adapter of a model in peft's format into a directory that exists.

    ``config`` is what `add_lora` returned for ``model``; ``metadata`` is for ``mars.json``, which
    an adapter without a row for the mask token does not have.
    """
    prefix, tensors = "base_model.model.", dict[str, Tensor]()
    for name, (first, second) in weights.products.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = first
        tensors[f"{prefix}{name}.lora_B.weight"] = second
    if weights.mask_row is not None:
        embedding = _name_of(model, model.get_input_embeddings())
        key = f"{prefix}{embedding}.token_adapter.trainable_tokens_delta"
        tensors[key] = weights.mask_row[None]
    found = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    save_file(found, path / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
    config.inference_mode = True
    config.save_pretrained(str(path))
    if metadata is not None:
        text = metadata.model_dump_json(indent=2)
        (path / METADATA_FILE).write_text(text + "\n", encoding="utf-8")
