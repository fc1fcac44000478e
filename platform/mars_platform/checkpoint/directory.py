"""Checkpoints: an ordinary Hugging Face directory plus ``mars.json`` and ``calibration.json``.

No code in a checkpoint is ever executed. Imports no Ray or HTTP library, and torch only by way of
transformers' configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mars_platform.checkpoint.calibration import Calibration, read_calibration
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.metadata import MarsMetadata, check_mask_token, read_metadata_of
from mars_platform.checkpoint.tokenizer import mask_id, read_end_ids, read_tokenizer
from mars_platform.errors import UserError, one_line

if TYPE_CHECKING:  # it imports torch, which takes seconds, and a server's ingress needs none
    from mars_platform.checkpoint.adapter.files import Adapter


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that decoding treats specially."""

    eos: frozenset[int]
    never_emitted: frozenset[int]
    """Ids that are never chosen as output: mask and padding."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint directory without its weights."""

    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    metadata: MarsMetadata | None
    """Content of ``mars.json``; None for a plain AR checkpoint."""
    special: SpecialTokens
    calibration: Calibration | None = None
    """Content of ``calibration.json``; None if there is none or it was not to be read."""
    masks_are_loras: bool = False
    """Whether the model itself has no masks, and ``metadata`` is that of its LoRA adapters."""
    adapter: Adapter | None = None
    """Adapter that acts at masks, whose weights lie in a directory of its own; None for none."""

    @property
    def own_path(self) -> Path:
        """Directory of what belongs to this model alone: that of its adapter, if it has one.

        The files of ``marsray calibrate`` lie there, and the card.
        """
        return self.path if self.adapter is None else self.adapter.path

    @property
    def fingerprint(self) -> str:
        """Sum, in hexadecimal, that identifies the weights, those of an adapter included."""
        return weights_fingerprint(self.own_path)

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the embedding, and of logits."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, prompt and output together, in tokens."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have both a text and a logit; an adapter's mask may have none."""
        return min(len(self.tokenizer), self.vocabulary_size)

    def with_metadata(self, metadata: MarsMetadata) -> Checkpoint:
        """Return this AR checkpoint as a MARS checkpoint that is yet to be trained.

        It has no calibration. The tokenizer must already have the mask token.
        """
        special = _special_tokens(self.path, self.tokenizer, metadata, self.vocabulary_size)
        return replace(self, metadata=metadata, special=special, calibration=None)


def read_checkpoint(model: str | Path, *, with_calibration: bool = True) -> Checkpoint:
    """Read a checkpoint, a directory or hub id, without its weights.

    Without ``with_calibration``, ``calibration.json`` is not read, as it never is for a plain AR
    checkpoint: a new calibration must not fail on the file that it replaces.

    Raises:
        UserError: a file is missing, malformed or does not fit the others, or is none of the
            checkpoint's own.
    """
    path, metadata = read_metadata_of(model)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        vocabulary_size = config.get_text_config().vocab_size
        tokenizer = read_tokenizer(path)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(f"model: {path} cannot be loaded ({one_line(error)})") from error
    if metadata is not None:
        check_mask_token(path, metadata, mask_id(tokenizer))
    special = _special_tokens(path, tokenizer, metadata, vocabulary_size)
    calibration = None
    if with_calibration and metadata is not None:
        calibration = read_calibration(path, metadata.block_size)
    return Checkpoint(path, config, tokenizer, metadata, special, calibration)


def _special_tokens(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    metadata: MarsMetadata | None,
    vocabulary_size: int,
) -> SpecialTokens:
    banned = {tokenizer.pad_token_id} if tokenizer.pad_token_id is not None else set()
    if metadata is not None:
        banned.add(metadata.mask_token_id)
    # an adapter's mask, or an added token, may lie past the output layer and has no logit
    known = range(vocabulary_size)
    ends = read_end_ids(path, tokenizer)
    eos, banned = ({token for token in ids if token in known} for ids in (ends, banned))
    # Several families pad with one of their end tokens, which must stay possible to emit.
    return SpecialTokens(eos=frozenset(eos), never_emitted=frozenset(banned - eos))
