"""The training loss over a packed batch: AR cross-entropy, or MARS's two terms.

    loss = CE(noisy logits, labels) + ar_weight * CE(clean logits, labels)

(arXiv 2604.07023, section 3.2). Options of the first term are this project's; see `MaskLoss`.
Imports no Ray.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.draft_head import draft_head_of
from mars_platform.mixing.head import Head, decoder_of, layers_of
from mars_platform.mixing.recurrent import bind_recurrence
from mars_train.method.attention import (
    FLEX_MULTIPLE,
    Attention,
    RowMasks,
    slots_of,
    use_attention,
    within,
)
from mars_train.method.layout import Batch, collate, lay_out
from mars_train.method.trees import RowTrees

MAX_LOGITS = 2**26
"""Most logits in memory at once, forward or backward, in elements (256 MiB in float32)."""


@dataclass(frozen=True)
class MaskLoss:
    """Terms of the loss of a label behind masks; the defaults are the paper's cross-entropy.

    With p the distribution that teaches the mask, and q the mask's::

        (1 - teacher_weight) * CE(label, q) + teacher_weight * KL(p || q), or CE(argmax p, q)

    The teacher is the clean stream at the same label, detached.
    """

    teacher_weight: float = 0.0
    """Share λ of the teacher's distribution, in [0, 1]."""
    target: Literal["soft", "argmax"] = "soft"
    """Whether the teacher's whole distribution is learned or its likeliest token."""


class LossSums(NamedTuple):
    """Losses summed over a batch's labels; divide by its ``num_clean`` and ``num_noisy``.

    It is a tuple because FSDP2 searches the objective's output for tensors, to which it attaches
    the start of its backward pass.
    """

    clean: Tensor  # float32 [], nats
    noisy: Tensor  # float32 [], nats; zero for plain AR training


class Objective(nn.Module):
    """The model and its loss as the one module that data parallelism wraps.

    It calls the decoder and the output layer separately, and computes logits only for the slots
    that predict a label.

    Args:
        model: any decoder that takes its attention through transformers' interface; its kind of
            attention is changed in place.
        masked: whether the noisy stream is trained (MARS) or the clean one alone (AR).
        mask_loss: terms of the loss behind masks.
        attention: ``sdpa`` runs everywhere with a dense mask; ``flex`` skips masked blocks, trains
            on CUDA only and needs rows of a multiple of ``FLEX_MULTIPLE`` slots.
        compile: compile the decoder layers and the loss, for any shape of batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        masked: bool,
        mask_loss: MaskLoss | None = None,
        attention: Attention = "sdpa",
        compile: bool = False,  # noqa: A002 - named as in torch
    ) -> None:
        super().__init__()
        use_attention(model, attention)
        self.model, self._head = model, Head(model)
        self._is_recurrent = bind_recurrence(decoder_of(model))
        self.masked = masked
        self.mask_loss = mask_loss or MaskLoss()
        self.attention = attention
        self._token_losses, self._taught_losses = _token_losses, _taught_losses
        if compile:
            # Layers are compiled one by one: they share one graph, and FSDP2 can still gather and
            # free each of them.
            for layer in layers_of(model):
                layer.compile(dynamic=True)
            self._token_losses = torch.compile(_token_losses, dynamic=True)
            self._taught_losses = torch.compile(_taught_losses, dynamic=True)

    def forward(self, batch: Batch, *, plain_share: float = 0.0) -> LossSums:
        """Return the loss sums of one packed batch; without labels, zeros that have gradients.

        ``plain_share``, in [0, 1], is the share of the loss that masks have without their draft
        head, if there is one.
        """
        clean, noisy = self._losses(batch, self.mask_loss, plain_share)
        # The loss at depth 0 is the clean one, which counts where the clean stream is learned.
        in_noisy = batch.in_noisy_loss & ((batch.depths > 0) | batch.in_clean_loss)
        return LossSums((clean * batch.in_clean_loss).sum(), (noisy * in_noisy).sum())

    def label_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each label's cross-entropy, clean and noisy, float32 [labels] each, in nats."""
        return self._losses(batch, MaskLoss())

    @torch.no_grad()
    def clean_logits(self, tokens: Sequence[int], block_size: int | None, mask_id: int) -> Tensor:
        """Return the logits behind a sequence's tokens but the last, [tokens - 1, vocabulary].

        The same sequence stands before it in the row of a batch, with its noisy stream, and may not
        be seen.
        """
        ids, length = np.array(tokens), len(tokens) - 1
        layout = lay_out(ids, np.ones_like(ids, dtype=bool), block_size, mask_id)
        multiple_of = FLEX_MULTIPLE if self.attention == "flex" else 1
        batch = collate([[layout, layout]], tokens[0], multiple_of).to(self.model.device)
        begin = len(layout.tokens)
        return self._logits(self._hidden_states(batch)[begin : begin + length])

    def _losses(
        self, batch: Batch, loss: MaskLoss, plain_share: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the clean and noisy losses of labels, which at depth 0 are the same."""
        hidden = self._hidden_states(batch)
        clean = self._clean_losses(hidden, batch)
        if not self.masked:
            return clean, torch.zeros_like(clean)
        masked = batch.depths > 0
        columns = [
            hidden[batch.noisy_sources[masked]],
            batch.previous[masked],
            batch.labels[masked],
        ]
        if loss.teacher_weight:
            columns.append(hidden[batch.clean_sources[masked]].detach())
        losses = partial(self._chunk_noisy, loss=loss, plain_share=plain_share)
        # A head's part of the logits is a table of their size, and so is the sum.
        num_others = 0 if draft_head_of(self.model) is None else 2
        noisy = self._in_chunks(losses, *columns, num_others=num_others)
        return clean, clean.masked_scatter(masked, noisy)

    def _clean_losses(self, hidden: Tensor, batch: Batch) -> Tensor:
        return self._in_chunks(self._chunk_losses, hidden[batch.clean_sources], batch.labels)

    def _hidden_states(self, batch: Batch) -> Tensor:
        """Return the last hidden states of all slots, [rows * slots, width]."""
        slots = slots_of(batch)
        return self._decode(batch.tokens, RowMasks(slots, slots, self.attention)).flatten(0, 1)

    def _decode(self, tokens: Tensor, masks: RowMasks) -> Tensor:
        """Return the last hidden states [rows, queries, width] of tokens [rows, queries]."""
        mixing = {"mixing": RowTrees(masks.queries)} if self._is_recurrent else {}
        with within(masks):
            output = decoder_of(self.model)(
                input_ids=tokens,
                position_ids=masks.queries.position,
                # Without it, some families would take rows for packed texts of their own kind.
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                **mixing,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _in_chunks(
        self, function: Callable[..., Tensor], *columns: Tensor, num_others: int = 0
    ) -> Tensor:
        """Call a function of columns [labels, ...] in chunks of ``MAX_LOGITS`` logits.

        Each column of hidden states makes logits, beside ``num_others`` tables of their size.
        Several chunks are checkpointed: the backward pass computes their logits again.
        ``F.linear_cross_entropy`` would do the same, but torch 2.11 lacks it, and it takes a weight
        matrix instead of any module as the output layer.
        """
        vocabulary_size = self.model.config.get_text_config().vocab_size
        num_tables = num_others + sum(column.dim() > 1 for column in columns)
        per_label = vocabulary_size * num_tables
        num_chunks = -(-len(columns[0]) * per_label // MAX_LOGITS)
        if num_chunks <= 1:
            return function(*columns)
        recompute = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        chunks = zip(*(column.chunk(num_chunks) for column in columns), strict=True)
        return torch.cat([recompute(*chunk) for chunk in chunks])

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def _chunk_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._token_losses(self._logits(hidden), labels)

    def _chunk_noisy(
        self,
        student: Tensor,
        previous: Tensor,
        labels: Tensor,
        teacher: Tensor | None = None,
        *,
        loss: MaskLoss,
        plain_share: float,
    ) -> Tensor:
        """Return the losses behind masks, with the draft head's part in their logits."""
        logits, head = self._logits(student), draft_head_of(self.model)
        losses = partial(self._token_losses, labels=labels)
        if teacher is not None:
            losses = partial(
                self._taught_losses,
                labels=labels,
                # Not under no_grad: autocast keeps its copy of a weight for later calls, and older
                # torch would keep one without a gradient.
                teacher=self._logits(teacher).detach(),
                share=loss.teacher_weight,
                soft=loss.target == "soft",
            )
        if head is None:
            return losses(logits)
        with_head = losses(logits + head(student, previous))
        if not plain_share:
            return with_head
        return (1 - plain_share) * with_head + plain_share * losses(logits)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")


def _taught_losses(
    logits: Tensor, labels: Tensor, *, teacher: Tensor, share: float, soft: bool
) -> Tensor:
    """Return the mixture of the labels' and the teacher's losses, float32 [labels].

    ``logits`` and ``teacher`` are [labels, vocabulary], ``share`` is λ. If ``soft``, the teacher's
    loss is the divergence from its distribution, otherwise that of its likeliest token.
    """
    ours = logits.float().log_softmax(-1)
    if soft:
        theirs = teacher.float().log_softmax(-1)
        taught = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    else:
        taught = F.nll_loss(ours, teacher.argmax(-1), reduction="none")
    return share * taught + (1 - share) * F.nll_loss(ours, labels, reduction="none")
