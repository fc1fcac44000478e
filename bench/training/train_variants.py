"""Trains one model in four layouts: AR and MARS as this project lays them out, and naively.

One optimizer step of each variant takes the same conversations, hence the same supervised tokens:

    ar          clean stream, packed, logits at labels       (mars_train)
    mars        clean and noisy streams, packed and skipped  (mars_train)
    ar-naive    one row per conversation, padded to the batch's longest, logits everywhere
    mars-naive  the same, followed by a noisy copy of the whole row

The naive variants have the layout of the MARS paper's published code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mars_platform.data.conversations import validate_conversation
from mars_platform.data.rendering import render_turns
from mars_train.data.demo_tasks import Task, draw_short
from mars_train.method.attention import FLEX_MULTIPLE, attention_mask
from mars_train.method.layout import PADDING_DOCUMENT, Batch, Layout, collate, lay_out, pack
from mars_train.method.objective import Objective
from mars_train.run.scratch import train_tokenizer

VARIANTS = ["ar", "mars", "ar-naive", "mars-naive"]
LONG_PROMPT = 3
"""Prompt tokens per response token with ``--data long-prompts``."""

MODELS: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": 448,
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": 0.08,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


@dataclass(frozen=True)
class Options:
    """Options of the command `train_cost`; see its help."""

    model: str
    data: str
    device: str
    dtype: str
    attention: Literal["sdpa", "flex"]
    compile: bool
    batch_size: int
    micro_batch_size: int
    length: int | None
    block_size: int
    row_slots: int
    ar_row_slots: int
    steps: int
    rounds: int
    threads: int
    peak_tflops: float | None
    seed: int

    @property
    def multiple_of(self) -> int:
        return FLEX_MULTIPLE if self.attention == "flex" else 1


# --- conversations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """The tokens of a conversation."""

    ids: NDArray[np.int64]  # [length]
    supervised: NDArray[np.bool_]  # [length]


def build_examples(options: Options) -> list[Example]:
    """Return the conversations of one round, one batch for each step."""
    num = options.batch_size * options.steps
    if options.length is not None:
        return random_examples(num, options)
    rng = random.Random(options.seed)
    tasks = [draw_short(rng) for _ in range(max(num, 2000))]
    rows = [task.row() for task in tasks]
    texts = (turn["content"] for row in rows for turn in row["messages"])  # type: ignore[attr-defined]
    tokenizer = train_tokenizer(texts, 384)

    def example(task: Task, *, long_prompt: bool) -> Example:
        row = task.row()
        if long_prompt:  # puts other questions and their answers before it
            shots = [draw_short(rng) for _ in range(4)]
            context = "\n".join(f"{shot.question}\n{shot.response}" for shot in shots)
            row["messages"][0]["content"] = f"{context}\n{task.question}"  # type: ignore[index]
        text, spans = render_turns(tokenizer, validate_conversation(row), "last")
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in encoded["offset_mapping"]])
        supervised = np.zeros(len(starts), bool)
        for begin, end in spans:
            supervised |= (starts >= begin) & (starts < end)
        ids = np.array(encoded["input_ids"])
        if long_prompt:
            prompt = int(np.flatnonzero(supervised)[0])
            cut = prompt - LONG_PROMPT * int(supervised.sum())
            assert cut >= 0, cut
            ids, supervised = ids[cut:], supervised[cut:]
        return Example(ids, supervised)

    return [example(task, long_prompt=options.data == "long-prompts") for task in tasks[:num]]


def random_examples(num: int, options: Options) -> list[Example]:
    """Return random tokens of one length; half of them are prompt, or three quarters."""
    rng = np.random.default_rng(options.seed)
    length = options.length
    assert length is not None
    share = LONG_PROMPT / (LONG_PROMPT + 1) if options.data == "long-prompts" else 0.5
    supervised = np.arange(length) >= round(length * share)
    most = MODELS[options.model]["vocab_size"] - 1
    return [Example(rng.integers(1, most, length), supervised) for _ in range(num)]


# --- variants -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Sizes of the batches of one optimizer step."""

    num_labels: int
    num_slots: int
    """Number of tokens that the model computes, with copies and padding."""
    num_padding: int

    def __add__(self, other: Step) -> Step:
        return Step(
            self.num_labels + other.num_labels,
            self.num_slots + other.num_slots,
            self.num_padding + other.num_padding,
        )


class Variants:
    """A model with its optimizer, and the training step of each variant."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.model = build_model(options).to(self.device)
        self.mask_id = MODELS[options.model]["vocab_size"] - 1
        settings: dict[str, Any] = {"attention": options.attention, "compile": options.compile}
        self.mars = Objective(self.model, masked=True, **settings)
        self.ar = Objective(self.model, masked=False, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._rng = np.random.default_rng(options.seed)
        self._losses: dict[str, Callable[[Sequence[Example]], tuple[Tensor, Step]]] = {
            "ar": self._ar,
            "mars": self._mars,
            "ar-naive": self._ar_naive,
            "mars-naive": self._mars_naive,
        }

    def step(self, variant: str, examples: Sequence[Example]) -> Step:
        """Run forward, backward and update; the loss is the mean over labels of all its terms."""
        total = Step(0, 0, 0)
        num_labels = sum(int(example.supervised[1:].sum()) for example in examples)
        size = self.options.micro_batch_size
        bf16 = self.options.dtype == "bf16"
        for start in range(0, len(examples), size):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
                loss, part = self._losses[variant](examples[start : start + size])
            (loss / num_labels).backward()  # type: ignore[no-untyped-call]
            total += part
        assert total.num_labels == num_labels, (variant, total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def first_loss(self, variant: str, examples: Sequence[Example]) -> float:
        """Return the loss per label without training; naive variants have the others' losses."""
        self._rng = np.random.default_rng(self.options.seed)
        loss, step = self._losses[variant](examples)
        return loss.item() / step.num_labels

    def _ar(self, examples: Sequence[Example]) -> tuple[Tensor, Step]:
        return self._packed(examples, self.ar, None, self.options.ar_row_slots)

    def _mars(self, examples: Sequence[Example]) -> tuple[Tensor, Step]:
        return self._packed(examples, self.mars, self.options.block_size, self.options.row_slots)

    def _packed(
        self,
        examples: Sequence[Example],
        objective: Objective,
        block_size: int | None,
        row_slots: int,
    ) -> tuple[Tensor, Step]:
        layouts = [self.lay_out(example, block_size) for example in examples]
        multiple_of = self.options.multiple_of
        batch = collate(pack(layouts, row_slots, multiple_of), 0, multiple_of)
        padding = int((batch.documents == PADDING_DOCUMENT).sum())
        sums = objective(batch.to(self.device))
        step = Step(batch.num_clean, batch.tokens.numel(), padding)
        return sums.clean + sums.noisy, step

    def lay_out(self, example: Example, block_size: int | None) -> Layout:
        """Lay a conversation out with a random block offset; None for the clean stream alone."""
        offset = int(self._rng.integers(block_size or 1))
        return lay_out(example.ids, example.supervised, block_size, self.mask_id, offset)

    def _ar_naive(self, examples: Sequence[Example]) -> tuple[Tensor, Step]:
        ids, labels, padding = pad_rows(examples, self.options.multiple_of)
        # Padding on the right needs no mask under causal attention, the cheapest kind.
        mask = (
            None
            if self.options.attention == "sdpa"
            else attention_mask(
                naive_batch(ids, padding, torch.zeros_like(ids), copies=1).to(self.device), "flex"
            )
        )
        logits = self.model(
            input_ids=ids.to(self.device), attention_mask=mask, use_cache=False
        ).logits  # [rows, longest, vocabulary]
        return naive_losses(logits, labels), naive_step(labels, padding, copies=1)

    def _mars_naive(self, examples: Sequence[Example]) -> tuple[Tensor, Step]:
        ids, labels, padding = pad_rows(examples, self.options.multiple_of)
        hidden = torch.where(labels >= 0, self.mask_id, ids)
        offsets = torch.from_numpy(self._rng.integers(self.options.block_size, size=len(ids)))
        blocks = (torch.arange(ids.shape[1]) + offsets[:, None]) // self.options.block_size
        batch = naive_batch(torch.cat([ids, hidden], dim=1), padding, blocks, copies=2)
        batch = batch.to(self.device)
        logits = self.model(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=attention_mask(batch, self.options.attention),
            use_cache=False,
        ).logits  # [rows, 2 * longest, vocabulary]
        clean, noisy = logits.chunk(2, dim=1)
        loss = naive_losses(clean, labels) + naive_losses(noisy, labels)
        return loss, naive_step(labels, padding, copies=2)


def build_model(options: Options) -> PreTrainedModel:
    """Return the model that ``--model`` names, with random float32 weights."""
    torch.manual_seed(options.seed)
    config = AutoConfig.for_model("qwen2", tie_word_embeddings=True, **MODELS[options.model])
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    return model.train()


def pad_rows(examples: Sequence[Example], multiple_of: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, labels (-100 for none) and padding; each is [rows, longest]."""
    longest = -(-max(len(example.ids) for example in examples) // multiple_of) * multiple_of
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels, padding = torch.full_like(ids, -100), torch.ones_like(ids, dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length] = torch.from_numpy(example.ids)
        padding[row, :length] = False
        labels[row, :length][torch.from_numpy(example.supervised)] = ids[row, :length][
            torch.from_numpy(example.supervised)
        ]
    return ids, labels, padding


def naive_batch(tokens: Tensor, padding: Tensor, blocks: Tensor, copies: int) -> Batch:
    """Return whole rows, followed by their noisy copies if ``copies`` is 2; no labels."""
    rows, longest = padding.shape
    none = torch.zeros(0, dtype=torch.long)
    never = torch.zeros(0, dtype=torch.bool)
    return Batch(
        tokens=tokens,
        position_ids=torch.arange(longest).repeat(rows, copies),
        blocks=blocks.repeat(1, copies),
        documents=torch.where(padding, PADDING_DOCUMENT, 0).repeat(1, copies),
        noisy=(torch.arange(copies * longest) >= longest).repeat(rows, 1),
        labels=none,
        clean_sources=none,
        noisy_sources=none,
        depths=none,
        in_clean_loss=never,
        in_noisy_loss=never,
        mask_slots=none,
        draft_sources=none,
    )


def naive_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of shifted logits, summed over labels."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100).to(logits.device)
    return F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), reduction="sum")


def naive_step(labels: Tensor, padding: Tensor, copies: int) -> Step:
    """Return the sizes of a naive batch."""
    num_labels = int((labels[:, 1:] >= 0).sum())
    return Step(num_labels, copies * labels.numel(), copies * int(padding.sum()))
