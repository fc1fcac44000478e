"""Directories of adapters: LoRA weights in peft's format, ``mars.json`` and a tokenizer.

``peft.PeftModel.from_pretrained`` loads such a directory, though peft does not know that the
weights act at masks only. Imports no Ray or HTTP library.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsspec.implementations.local import LocalFileSystem
from pydantic import ConfigDict, Field
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from mars_platform.checkpoint.adapter.draft_head import load_draft_head, save_draft_head
from mars_platform.checkpoint.adapter.layers import (
    adapter_parameters,
    adapter_settings,
    attach_adapter,
    fill_parameters,
    read_tensors,
)
from mars_platform.checkpoint.adapter.settings import (
    MOST_ALPHA,
    MOST_RANK,
    AdapterMetadata,
    AdapterSettings,
    BaseIdentity,
)
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.manifest import MANIFEST, Damaged, refuse_links_out, verify
from mars_platform.checkpoint.metadata import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS_FILE,
    MASK_TOKEN,
    METADATA_FILE,
)
from mars_platform.checkpoint.tokenizer import mask_id, read_tokenizer
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError, one_line

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel

_REMEDY = "copy all of the adapter's files again"
_WITHOUT_EFFECT = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of ``config.json`` that do not change the output of a model whose weights are the same."""
_NEWEST_FORMAT = 1


class PeftConfig(Settings):
    """Content of ``adapter_config.json`` of any LoRA, as far as it is read.

    Keys with one possible value are settings of peft's that marsray does not implement. Others are
    ignored, since each version of peft has more of them.
    """

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"] = "LORA"
    """Kind of the adapter."""
    task_type: Literal["CAUSAL_LM"] | None = "CAUSAL_LM"
    """Kind of the model."""
    base_model_name_or_path: str | None = None
    """Directory or hub id of the model that the adapter belongs to."""
    r: int = Field(ge=1, le=MOST_RANK)
    """Rank."""
    lora_alpha: int = Field(ge=1, le=MOST_ALPHA)
    """Numerator of the scale; the denominator is the rank, or its root."""
    target_modules: list[str] | str | None = None
    """Names of the adapted layers, or a pattern of them."""
    trainable_token_indices: dict[str, list[int]] | None = None
    """Ids of the tokens with a row of the adapter's own, by the embedding's name."""
    bias: Literal["none"] = "none"
    """Biases that are trained."""
    fan_in_fan_out: Literal[False] = False
    """Whether weights are stored transposed."""
    use_rslora: bool = False
    """Whether the scale's denominator is the rank's root."""
    use_dora: Literal[False] = False
    """Whether the weight's magnitude is trained."""
    lora_bias: Literal[False] = False
    """Whether the product has a bias."""
    modules_to_save: list[str] | None = Field(default=None, max_length=0)
    """Layers that are trained whole."""
    rank_pattern: dict[str, int] = Field(default_factory=dict, max_length=0)
    """Ranks of single layers."""
    alpha_pattern: dict[str, int] = Field(default_factory=dict, max_length=0)
    """Numerators of single layers."""
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True
    """Start of the weights; other ways than these change the model's own weights as well."""
    target_parameters: list[str] | None = Field(default=None, max_length=0)
    """Adapted weights that are no layers."""
    alora_invocation_tokens: None = None
    """Tokens behind which alone the adapter acts."""
    layer_replication: None = None
    """Layers that are repeated."""


class _DraftConfig(PeftConfig):
    target_modules: list[str] = Field(min_length=1)
    trainable_token_indices: dict[str, list[int]]
    """Ids of the tokens with a row of the adapter's own, by the embedding's name."""
    use_rslora: Literal[False] = False
    """Whether the scale's denominator is the rank's root."""
    layers_to_transform: None = None


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter's directory without its weights."""

    path: Path
    settings: AdapterSettings
    metadata: AdapterMetadata
    tokenizer: PreTrainedTokenizerBase

    def attach(self, model: PreTrainedModel) -> None:
        """Attach this adapter, with its weights, to the model that it belongs to, in place.

        If the weights of ``model`` are on the meta device, without numbers, so are the adapter's.

        Raises:
            UserError: the weights are missing, damaged, or do not fit the model or the settings.
        """
        file = self.path / ADAPTER_WEIGHTS_FILE
        tensors = read_tensors(file)
        try:
            attach_adapter(model, self.settings, self.metadata.mask_token_id)
        except UserError as error:
            raise UserError(
                f"adapter: {self.path / ADAPTER_FILE} does not fit the model ({error}); {_REMEDY}"
            ) from error
        fill_parameters(adapter_parameters(model), tensors, str(file), "adapter")
        load_draft_head(model, self.path, self.metadata)


def read_adapter(path: str | Path) -> Adapter:
    """Read an adapter's directory without its weights.

    Raises:
        UserError: the directory holds no adapter of this kind, or a file is missing, damaged, a
            link to one elsewhere, or newer than this version.
    """
    path = Path(path)
    metadata = open_adapter(path)
    if metadata is None:
        raise UserError(
            f"adapter: {path} holds no {METADATA_FILE}, so its weights are not for masks; name an "
            "adapter that marsray train made, or merge this one into its model's weights"
        )
    if metadata.scope != "masks":
        raise UserError(
            f"adapter: {path} is a LoRA adapter, which acts at all positions; name a draft "
            "adapter, which acts at masks only"
        )
    config = build_settings(
        read_json(path / ADAPTER_FILE, _REMEDY), _DraftConfig, source=str(path / ADAPTER_FILE)
    )
    settings = AdapterSettings(
        rank=config.r, alpha=config.lora_alpha, target_modules=config.target_modules
    )
    tokenizer = read_adapter_tokenizer(path, metadata)
    if list(config.trainable_token_indices.values()) != [[metadata.mask_token_id]]:
        raise UserError(
            f"{path / ADAPTER_FILE}: trainable_token_indices has to name the mask token, "
            f"{metadata.mask_token_id}, alone; {_REMEDY}"
        )
    return Adapter(path, settings, metadata, tokenizer)


def open_adapter(path: Path) -> AdapterMetadata | None:
    """Look an adapter's directory over and return its ``mars.json``; None if it has none.

    Raises:
        UserError: the directory holds no adapter, or a file is damaged, a link to one elsewhere, or
            newer than this version.
    """
    if not path.is_dir():
        raise UserError(f"adapter: there is no directory {path}; name that of an adapter")
    if not (path / ADAPTER_FILE).is_file():
        raise UserError(
            f"adapter: {path} holds no {ADAPTER_FILE}, so it is no adapter; name the output of a "
            "recipe whose last stage has an adapter"
        )
    refuse_links_out(path, "adapter")
    metadata = _read_metadata(path) if (path / METADATA_FILE).is_file() else None
    _refuse_damage(path)
    return metadata


def save_adapter(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    metadata: AdapterMetadata,
) -> None:
    """Write the adapter of a model, but not the model's own weights, into a directory that exists.

    `read_adapter` and peft read it. ``tokenizer`` has the mask token; ``metadata`` is for
    ``mars.json``.
    """
    settings = adapter_settings(model)
    names = {id(module): name for name, module in model.named_modules()}
    embedding = names[id(model.get_input_embeddings())].rpartition(".")[2]
    config = _DraftConfig(
        base_model_name_or_path=metadata.base.name,
        r=settings.rank,
        lora_alpha=round(settings.scale * settings.rank),
        target_modules=settings.target_modules or [],
        trainable_token_indices={embedding: [metadata.mask_token_id]},
    )
    tensors = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in adapter_parameters(model).items()
    }
    save_file(tensors, path / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
    save_draft_head(path, model)
    _write_json(path / ADAPTER_FILE, {**config.model_dump(mode="json"), "inference_mode": True})
    _write_json(path / METADATA_FILE, metadata.model_dump(mode="json"))
    tokenizer.save_pretrained(path)


def identify_base(path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> BaseIdentity:
    """Return what binds an adapter to the model in ``path``, which users know by ``name``."""
    config = read_json(path / "config.json", "copy the model's file again")
    kept = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    return BaseIdentity(
        name=name,
        weights=weights_fingerprint(path),
        config=_sum(kept),
        tokenizer=_vocabulary_sum(tokenizer),
    )


def _vocabulary_sum(tokenizer: PreTrainedTokenizerBase) -> str:
    return _sum({token: i for token, i in tokenizer.get_vocab().items() if token != MASK_TOKEN})


def _sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_metadata(path: Path) -> AdapterMetadata:
    file = path / METADATA_FILE
    content = read_json(file, _REMEDY)
    version = content.get("format_version")
    if isinstance(version, int) and version > _NEWEST_FORMAT:
        raise UserError(
            f"{file}: format_version {version} is newer than this marsray reads, which is "
            f"{_NEWEST_FORMAT}; install a newer marsray"
        )
    return build_settings(content, AdapterMetadata, source=str(file))


def _refuse_damage(path: Path) -> None:
    """Compare the files with the manifest, if there is one; an adapter is small."""
    if not (path / MANIFEST).is_file():
        return
    try:
        verify(LocalFileSystem(), str(path))
    except Damaged as error:
        raise UserError(f"adapter: {path} is damaged: {error}; {_REMEDY}") from error


def read_adapter_tokenizer(path: Path, metadata: AdapterMetadata) -> PreTrainedTokenizerBase:
    """Read the tokenizer of an adapter's directory, which has the mask token.

    Raises:
        UserError: the tokenizer is missing, damaged, or not the one of ``mars.json``.
    """
    try:
        tokenizer = read_tokenizer(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"adapter: the tokenizer in {path} cannot be loaded ({one_line(error)}); {_REMEDY}"
        ) from error
    is_known = mask_id(tokenizer) == metadata.mask_token_id
    if not is_known or _vocabulary_sum(tokenizer) != metadata.base.tokenizer:
        raise UserError(
            f"adapter: the tokenizer in {path} is not the one that the adapter was trained with; "
            f"{_REMEDY}"
        )
    return tokenizer
