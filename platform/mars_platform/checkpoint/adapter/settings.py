"""Settings of an adapter, and the content of its ``mars.json``.

Imports no Ray, torch or HTTP library.
"""

from typing import Literal

from pydantic import Field, field_validator

from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.config import Settings

MOST_RANK, MOST_ALPHA = 4096, 2**20


class _LowRank(Settings):
    """Low-rank weights beside a model's own (LoRA, arXiv 2106.09685)."""

    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Names of the linear layers to adapt, such as q_proj; null for all of attention and MLP."""

    @field_validator("target_modules")
    @classmethod
    def _in_one_order(cls, names: list[str] | None) -> list[str] | None:
        return None if names is None else sorted(set(names))


class AdapterSettings(_LowRank):
    """Low-rank weights beside a model's own (LoRA, arXiv 2106.09685) that act at masks only."""

    applies_to: Literal["masks"] = "masks"
    """Positions that the adapter acts at: those whose input is the mask token."""
    rank: int = Field(default=32, ge=1, le=MOST_RANK)
    """Rank of the product that is added to a layer's weight."""
    alpha: int | None = Field(default=None, ge=1, le=MOST_ALPHA)
    """The product is multiplied by alpha / rank; null for twice the rank."""

    @property
    def scale(self) -> float:
        """Factor of the product: alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class LoraSettings(_LowRank):
    """Low-rank weights beside a model's own (LoRA, arXiv 2106.09685) that act at all positions."""

    rank: int = Field(default=16, ge=1, le=MOST_RANK)
    """Rank of the product that is added to a layer's weight."""
    alpha: int = Field(default=32, ge=1, le=MOST_ALPHA)
    """The product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of a layer's inputs that the product does not see in a training step."""
    merge: bool = True
    """Whether the stage's result is a whole model with the product added to its weights; otherwise
    it is a directory of peft's format with the LoRA adapter alone."""
    quantization: Literal["nf4"] | None = None
    """nf4 keeps the layers' own weights in 4 bits while training (QLoRA, arXiv 2305.14314), on GPUs
    only; the result is made of the weights as they were. Null for no quantization."""


class BaseIdentity(Settings):
    """The model that an adapter was trained on; the sums are SHA-256, in hexadecimal."""

    name: str
    """Directory or hub id that the model had in training."""
    weights: str
    """Sum of the weights, by `weights_fingerprint`."""
    config: str
    """Sum of ``config.json`` without what does not change the model's output."""
    tokenizer: str
    """Sum of the vocabulary without the mask token."""


class AdapterMetadata(MarsMetadata):
    """Content of an adapter's ``mars.json``."""

    scope: Literal["masks", "all"] = "masks"
    """Positions that the adapter acts at: those of masks (a draft adapter), or all (LoRA)."""
    base: BaseIdentity
    """The model that the adapter belongs to."""
