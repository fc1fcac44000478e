"""A draft head: low-rank weights by which a mask's draft depends on the token before it.

    logits'[x] = logits[x] + <W1[previous] * sigmoid(G h), W2[x]>

A mask does not know the token in its own place, behind which its draft stands, and by itself
predicts an average over all that could stand there. That token is known when drafts are chosen one
after the other: the model's own behind the accepted ones, or the draft before. The head reads the
last hidden state ``h`` of masks only, so that all other positions keep the model's output bit for
bit. Imports no Ray or HTTP library.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from mars_platform.checkpoint.adapter.layers import fill_parameters, read_tensors
from mars_platform.checkpoint.metadata import (
    DRAFT_HEAD_FILE,
    METADATA_FILE,
    DraftHeadSettings,
    MarsMetadata,
)
from mars_platform.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel

_NAME = "draft_head"
NUM_CANDIDATES = 64
"""Likeliest tokens of a mask that a head chooses among; a product with all takes many times as
long on a CPU."""


class DraftHead(nn.Module):
    """Computes numbers to add to the logits of masks behind a known token; a new head adds 0."""

    def __init__(self, settings: DraftHeadSettings, vocabulary_size: int, width: int) -> None:
        super().__init__()
        rank, is_gated = settings.rank, settings.kind == "gated"
        self.settings = settings
        self.previous = nn.Parameter(torch.randn(vocabulary_size, rank))
        self.following = nn.Parameter(torch.zeros(vocabulary_size, rank))
        self.gate = nn.Parameter(torch.zeros(rank, width)) if is_gated else None

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return what weighs the rows of ``following``, [n, rank].

        Args:
            hidden: [n, width], last hidden states of masks.
            previous: int64 [n], the token in the place of each mask.
        """
        return F.embedding(previous, self.previous) * self.gates(hidden)

    def gates(self, hidden: Tensor) -> Tensor:
        """Return the factors by which hidden states weigh features, [n, rank]; 1 without a gate."""
        if self.gate is None:
            return hidden.new_ones(len(hidden), self.previous.shape[1])
        return F.linear(hidden, self.gate).sigmoid()

    @torch.no_grad()
    def widen(self, count: int) -> None:
        """Add features that are zero, in place, so that functions may read whole vectors."""
        for rows in (self.previous, self.following):
            rows.data = F.pad(rows, (0, count))
        if self.gate is not None:
            self.gate.data = F.pad(self.gate, (0, 0, 0, count))

    def share_out(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return logits in which the head shares out the probability of the likeliest tokens anew.

        These are `NUM_CANDIDATES`, whose probability together stays as it is; so does that of each
        other token.

        Args:
            logits: float32 [n, vocabulary], of masks; -inf for tokens that may not be drafted.
            hidden: [n, width] and
            previous: int64 [n], see `features`.
        """
        likely, tokens = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))  # [n, candidates]
        rows = F.embedding(tokens, self.following)  # [n, candidates, rank]
        features = self.features(hidden.to(rows.dtype), previous)
        shared = likely + torch.linalg.vecdot(rows, features.unsqueeze(1))
        shared += likely.logsumexp(-1, keepdim=True) - shared.logsumexp(-1, keepdim=True)
        return logits.scatter(-1, tokens, shared)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return what is added to the masks' logits, [n, vocabulary]; see `features`."""
        return F.linear(self.features(hidden, previous), self.following)


def draft_head_of(model: nn.Module) -> DraftHead | None:
    """Return the draft head of a model; None if it has none."""
    return cast("DraftHead | None", getattr(model, _NAME, None))


def attach_draft_head(model: PreTrainedModel, settings: DraftHeadSettings) -> DraftHead:
    """Give a model a new draft head, in place, of the model's number type and device."""
    head = _new_head(model, settings, model.get_input_embeddings().weight.device)
    setattr(model, _NAME, head)
    return head


def _new_head(
    model: PreTrainedModel, settings: DraftHeadSettings, device: torch.device
) -> DraftHead:
    config = model.config.get_text_config()
    with device:
        head = DraftHead(settings, config.vocab_size, config.hidden_size)
    return head.to(model.get_input_embeddings().weight.dtype)


def load_draft_head(model: PreTrainedModel, path: Path, metadata: MarsMetadata) -> None:
    """Give a model the draft head in a directory, in place, if ``mars.json`` there names one.

    Raises:
        UserError: the weights are missing, damaged or too large, fit neither model nor settings, or
            are not named.
    """
    if metadata.draft_head is None:
        if (path / DRAFT_HEAD_FILE).exists():
            raise UserError(
                f"draft head: {path / DRAFT_HEAD_FILE} has no settings in {METADATA_FILE} beside "
                "it; copy all of the draft head's files again, or remove this one"
            )
        return
    # Settings alone could ask for more memory than there is, so the file is checked first.
    head = _new_head(model, metadata.draft_head, torch.device("meta"))
    file, parameters = path / DRAFT_HEAD_FILE, _parameters(head)
    most = sum(parameter.numel() for parameter in parameters.values())
    tensors = read_tensors(file, "draft head", most_numbers=most)
    fill_parameters(parameters, tensors, str(file), "draft head")
    weight = model.get_input_embeddings().weight
    if not weight.is_meta:
        found = {name: tensor.to(weight) for name, tensor in tensors.items()}
        nn.ModuleDict({_NAME: head}).load_state_dict(found, assign=True)
    setattr(model, _NAME, head)


def save_draft_head(path: Path, model: nn.Module) -> None:
    """Write the draft head of a model, if it has one, into a directory that exists."""
    if (head := draft_head_of(model)) is not None:
        (path / DRAFT_HEAD_FILE).parent.mkdir(exist_ok=True)
        save_file(
            {key: tensor.detach().cpu().contiguous() for key, tensor in _parameters(head).items()},
            path / DRAFT_HEAD_FILE,
            metadata={"format": "pt"},
        )


def without_draft_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model, by name, without those of its draft head."""
    return {key: each for key, each in weights.items() if not key.startswith(f"{_NAME}.")}


def _parameters(head: DraftHead) -> dict[str, nn.Parameter]:
    return {f"{_NAME}.{name}": parameter for name, parameter in head.named_parameters()}
