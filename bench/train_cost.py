"""Measures what MARS training costs over AR fine-tuning, in this project's layout and a naive one.

    python -m bench.train_cost --prompt-share .75

One process trains a model in four layouts in turn on each batch of random conversations; the order
is reversed from one batch to the next. A step is everything from token ids to the update:

    ar          clean stream, packed, logits at labels       (mars_train)
    mars        clean and noisy streams, packed and skipped  (mars_train)
    ar-naive    one row per conversation, padded to the batch's longest, logits everywhere
    mars-naive  the same, followed by a noisy copy of the whole row

The naive variants have the layout of the MARS paper's published code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mars_platform.cli.report import figure_column, output_console, print_json, table_of
from mars_serve.bench.decode.models import PRESETS
from mars_train.method.attention import FLEX_MULTIPLE, attention_mask
from mars_train.method.layout import PADDING_DOCUMENT, Batch, Layout, collate, lay_out, pack
from mars_train.method.objective import Objective

VARIANTS = ("ar", "mars", "ar-naive", "mars-naive")
_PAIRS = (("mars", "ar"), ("mars-naive", "ar-naive"), ("mars-naive", "ar"), ("ar-naive", "ar"))
_TINY = {"vocab_size": 448, "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MODELS = {"tiny": {**PRESETS["qwen2.5-0.5b"], **_TINY, **_HEADS}, **PRESETS}


@dataclass(frozen=True)
class Options:
    """Options of the measurement, each of which is an option of the command."""

    model: str = "tiny"
    """Size of the random weights, in `MODELS`."""
    device: str = "cpu"
    dtype: Literal["float32", "bf16"] = "float32"
    """Number type; bf16 by autocast."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """Kind of attention; flex on CUDA only."""
    compile: bool = False
    """Whether the layers are compiled."""
    batch_size: int = 32
    micro_batch_size: int = 32
    """Conversations of a pass."""
    length: int = 48
    """Mean tokens of a conversation; each has between half and one and a half times as many."""
    prompt_share: float = 0.5
    """Share of a conversation that is prompt."""
    block_size: int = 4
    row_slots: int = 192
    """Slots of a packed row."""
    ar_row_slots: int = 192
    """Slots of a packed row of AR training."""
    steps: int = 20
    """Optimizer steps of a round."""
    rounds: int = 5
    threads: int = 1
    peak_tflops: float = 0.0
    """Peak of the device, for the share of it that is used; 0 leaves that out."""
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """The tokens of a conversation."""

    ids: NDArray[np.int64]  # [length]
    supervised: NDArray[np.bool_]  # [length]


def examples_of(options: Options) -> list[Example]:
    """Return random conversations for one round, one batch for each step."""
    rng = np.random.default_rng(options.seed)
    most_id, examples = MODELS[options.model]["vocab_size"] - 1, []
    for _ in range(options.batch_size * options.steps):
        length = int(rng.integers(options.length // 2, 3 * options.length // 2 + 1))
        supervised = np.arange(length) >= round(length * options.prompt_share)
        examples.append(Example(rng.integers(1, most_id, length), supervised))
    return examples


class Trainer:
    """A model with its optimizer, and the training step of each variant."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.multiple_of = FLEX_MULTIPLE if options.attention == "flex" else 1
        torch.manual_seed(options.seed)
        config = AutoConfig.for_model(**{**MODELS[options.model], "tie_word_embeddings": True})
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, dtype=torch.float32
        )
        self.model: PreTrainedModel = model.train().to(self.device)
        self.mask_id = config.vocab_size - 1
        settings: dict[str, Any] = {"attention": options.attention, "compile": options.compile}
        self.objectives = {
            "mars": Objective(self.model, masked=True, **settings),
            "ar": Objective(self.model, masked=False, **settings),
        }
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._rng = np.random.default_rng(options.seed)

    def step(self, variant: str, examples: Sequence[Example]) -> int:
        """Run forward, backward and update; return the positions computed, with padding."""
        num_labels = sum(int(each.supervised[1:].sum()) for each in examples)
        size, slots = self.options.micro_batch_size, 0
        for start in range(0, len(examples), size):
            bf16 = self.options.dtype == "bf16"
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
                loss, num_slots = self.loss(variant, examples[start : start + size])
            (loss / num_labels).backward()
            slots += num_slots
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return slots

    def loss(self, variant: str, examples: Sequence[Example]) -> tuple[Tensor, int]:
        """Return the loss, summed over labels and streams, and the number of positions."""
        kind, _, naive = variant.partition("-")
        if naive:
            return self._naive(examples, copies=2 if kind == "mars" else 1)
        layouts = [self.lay_out(each, masked=kind == "mars") for each in examples]
        row_slots = self.options.row_slots if kind == "mars" else self.options.ar_row_slots
        batch = collate(pack(layouts, row_slots, self.multiple_of), 0, self.multiple_of)
        sums = self.objectives[kind](batch.to(self.device))
        return sums.clean + sums.noisy, batch.tokens.numel()

    def lay_out(self, example: Example, *, masked: bool) -> Layout:
        """Lay a conversation out, with noisy blocks from a random offset on or without them."""
        size = self.options.block_size if masked else None
        offset = int(self._rng.integers(size or 1))
        return lay_out(example.ids, example.supervised, size, self.mask_id, offset)

    def _naive(self, examples: Sequence[Example], copies: int) -> tuple[Tensor, int]:
        """Return the loss of whole rows, followed by their noisy copies if there are 2 copies."""
        longest = max(len(each.ids) for each in examples)
        longest = -(-longest // self.multiple_of) * self.multiple_of
        ids = torch.zeros(len(examples), longest, dtype=torch.long)
        labels, padding = torch.full_like(ids, -100), torch.ones_like(ids, dtype=torch.bool)
        for row, each in enumerate(examples):
            tokens, supervised = torch.from_numpy(each.ids), torch.from_numpy(each.supervised)
            ids[row, : len(tokens)] = tokens
            padding[row, : len(tokens)] = False
            labels[row, : len(tokens)] = tokens.where(supervised, -100)
        offsets = torch.from_numpy(self._rng.integers(self.options.block_size, size=len(ids)))
        blocks = (torch.arange(longest) + offsets[:, None]) // self.options.block_size
        noisy = ids.where(labels < 0, self.mask_id)
        none, never = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
        batch = Batch(
            tokens=torch.cat([ids, noisy][:copies], dim=1),
            position_ids=torch.arange(longest).repeat(len(ids), copies),
            blocks=blocks.repeat(1, copies),
            documents=torch.where(padding, PADDING_DOCUMENT, 0).repeat(1, copies),
            noisy=(torch.arange(copies * longest) >= longest).repeat(len(ids), 1),
            labels=none,
            clean_sources=none,
            noisy_sources=none,
            depths=none,
            in_clean_loss=never,
            in_noisy_loss=never,
            mask_slots=none,
            draft_sources=none,
        ).to(self.device)
        # Padding on the right needs no mask under causal attention, the cheapest kind.
        causal = copies == 1 and self.options.attention == "sdpa"
        logits = self.model(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=None if causal else attention_mask(batch, self.options.attention),
            use_cache=False,
        ).logits  # [rows, copies * longest, vocabulary]
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).repeat(1, copies).to(self.device)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, batch.tokens.numel()


@dataclass(frozen=True)
class Measured:
    """Results of one variant."""

    variant: str
    step_s: float
    """Median over rounds of a round's mean seconds per step."""
    rounds_s: list[float]
    """Seconds per step of each round."""
    first_loss: float
    """Loss per label before training; a naive variant's is about that of the other."""
    tokens_per_s: float
    """Tokens per second of the conversations, without padding and copies."""
    slots_per_step: float
    """Positions that the model computes in a step, with copies and padding."""
    peak_mib: float
    mfu: float | None


def measure(options: Options, variants: Sequence[str]) -> list[Measured]:
    """Run all rounds of some variants."""
    examples, size = examples_of(options), options.batch_size
    batches = [examples[at : at + size] for at in range(0, len(examples), size)]
    trainer = Trainer(options)
    num_labels = sum(int(each.supervised[1:].sum()) for each in batches[0])
    with torch.no_grad():
        first = {each: trainer.loss(each, batches[0])[0].item() / num_labels for each in variants}
    for variant in variants:
        for batch in batches[:2]:  # allocates memory and compiles
            trainer.step(variant, batch)
    peaks = {variant: peak_mib(trainer, variant, batches[0]) for variant in variants}
    rounds: dict[str, list[float]] = {variant: [] for variant in variants}
    slots = dict.fromkeys(variants, 0)
    for _ in range(options.rounds):
        spent = dict.fromkeys(variants, 0.0)
        for index, batch in enumerate(batches):
            for variant in variants if index % 2 == 0 else reversed(variants):
                begin = time.perf_counter()
                slots[variant] += trainer.step(variant, batch)
                if trainer.device.type == "cuda":
                    torch.cuda.synchronize()
                spent[variant] += time.perf_counter() - begin
        for variant in variants:
            rounds[variant].append(spent[variant] / len(batches))
    num_tokens = sum(len(each.ids) for each in examples) / len(batches)
    return [
        Measured(
            variant,
            step_s=(step_s := statistics.median(rounds[variant])),
            rounds_s=rounds[variant],
            first_loss=first[variant],
            tokens_per_s=num_tokens / step_s,
            slots_per_step=slots[variant] / len(batches) / options.rounds,
            peak_mib=peaks[variant],
            mfu=utilisation(trainer, examples, variant, step_s),
        )
        for variant in variants
    ]


def peak_mib(trainer: Trainer, variant: str, batch: Sequence[Example]) -> float:
    """Return the peak memory of tensors in one step, with weights and optimizer state, in MiB."""
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.step(variant, batch)
        return torch.cuda.max_memory_allocated() / 2**20
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        with torch.profiler.profile(profile_memory=True) as profiler:
            trainer.step(variant, batch)
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    in_step = max(each["args"]["Total Allocated"] for each in events if each["name"] == "[memory]")
    state = [tensor for values in trainer.optimizer.state.values() for tensor in values.values()]
    held = sum(tensor.nbytes for tensor in [*trainer.model.parameters(), *state])
    return float(held + in_step) / 2**20


def utilisation(
    trainer: Trainer, examples: Sequence[Example], variant: str, step_s: float
) -> float | None:
    """Return the share of the device's peak that the method's needed operations reach.

    Needed are 6 operations per weight of the layers and token of the skipped layout, and per weight
    of the output layer and prediction, for the naive variants too. Attention is not counted.
    """
    options = trainer.options
    if not options.peak_tflops:
        return None
    layouts = [trainer.lay_out(each, masked=variant.startswith("mars")) for each in examples]
    slots = sum(len(each.tokens) for each in layouts)
    predictions = sum(len(each.labels) + int((each.depths > 0).sum()) for each in layouts)
    head = trainer.model.get_output_embeddings().weight.numel()
    body = sum(each.numel() for each in trainer.model.parameters()) - head  # they are tied
    flops = 6 * (body * slots + head * predictions) / options.steps
    return float(flops / step_s / (options.peak_tflops * 1e12))


def compare(results: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return ratios of time and peak memory by pair of variants."""
    by_name = {result.variant: result for result in results}
    compared = {}
    for over, under in _PAIRS:
        if over in by_name and under in by_name:
            one, other = by_name[over], by_name[under]
            ratios = [a / b for a, b in zip(one.rounds_s, other.rounds_s, strict=True)]
            compared[f"{over} / {under}"] = {
                "time": statistics.median(ratios),
                "time_lowest": min(ratios),
                "time_highest": max(ratios),
                "memory": one.peak_mib / other.peak_mib,
            }
    return compared


def _parser() -> argparse.ArgumentParser:
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="see the module", formatter_class=style)
    for name, kind in get_type_hints(Options).items():
        option, default = f"--{name.replace('_', '-')}", getattr(Options, name)
        if kind is bool:
            parser.add_argument(option, action="store_true")
        else:
            choices = list(MODELS) if name == "model" else get_args(kind) or None
            parser.add_argument(option, type=type(default), default=default, choices=choices)
    parser.add_argument("--only", action="append", choices=VARIANTS, help="run these variants only")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    return parser


def main() -> None:
    """Print seconds per step and peak memory of MARS and AR training, packed and naive."""
    arguments = vars(_parser().parse_args())
    variants, as_json = arguments.pop("only") or VARIANTS, arguments.pop("json")
    options, console = Options(**arguments), output_console(120)
    torch.set_num_threads(options.threads)
    results = measure(options, variants)
    if as_json:
        found = {"options": options, "ratios": compare(results), "variants": results}
        print_json(console, found)
        return
    columns = [
        figure_column("variant", "variant"),
        figure_column("ms/step", lambda each: 1e3 * each.step_s, ".1f"),
        figure_column("tokens/s", "tokens_per_s", ",.0f"),
        figure_column("slots", "slots_per_step", ".0f"),
        figure_column("peak MiB", "peak_mib", ".0f"),
        figure_column("MFU", "mfu", ".1%"),
        figure_column("first loss", "first_loss", ".5f"),
    ]
    console.print(table_of(columns, results))
    for name, found in compare(results).items():
        console.print(
            f"{name}: {found['time']:.2f}x the time ({found['time_lowest']:.2f}-"
            f"{found['time_highest']:.2f}), {found['memory']:.2f}x the peak memory"
        )


if __name__ == "__main__":
    main()
