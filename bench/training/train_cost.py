"""What training costs: MARS over AR fine-tuning, in this project's layout and in the naive one.

One process runs all variants in turn on each batch, in an order that is reversed from one to the
next, on the same model, optimizer and conversations, so on the same supervised tokens per step:

    ar          the clean stream, packed, logits at labels       (mars_train)
    mars        clean and noisy streams, packed and skipped      (mars_train)
    ar-naive    a row a conversation, padded to the batch's longest, logits everywhere
    mars-naive  the same, followed by a noisy copy of the whole row

The naive ones are the layout of the MARS paper's published code. A step is everything from token
ids to the optimizer's update. Example: ``python bench/train_cost.py --data long-prompts``.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mars_platform.data.conversations import render_turns, validate_conversation
from mars_train.data.demo import Task, draw_task
from mars_train.method.attention import FLEX_MULTIPLE, attention_mask
from mars_train.method.layout import PADDING_DOCUMENT, Batch, Layout, collate, lay_out, pack
from mars_train.method.objective import Objective
from mars_train.run.scratch import train_tokenizer

VARIANTS = ["ar", "mars", "ar-naive", "mars-naive"]
LONG_PROMPT = 3
"""Prompt tokens for each response token, with ``--data long-prompts``."""

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
    """The run's options; see the command's help."""

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
    """A conversation as tokens."""

    ids: NDArray[np.int64]  # [length]
    supervised: NDArray[np.bool_]  # [length]


def build_examples(options: Options) -> list[Example]:
    """As many conversations as the steps of a round take."""
    num = options.batch_size * options.steps
    if options.length is not None:
        return random_examples(num, options)
    rng = random.Random(options.seed)
    tasks = [draw_task(rng) for _ in range(max(num, 2000))]
    rows = [task.row() for task in tasks]
    texts = (turn["content"] for row in rows for turn in row["messages"])  # type: ignore[attr-defined]
    tokenizer = train_tokenizer(texts, 384)

    def example(task: Task, *, long_prompt: bool) -> Example:
        row = task.row()
        if long_prompt:  # other questions with their answers before it
            shots = [draw_task(rng) for _ in range(4)]
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
    """Random tokens of one length, half of it prompt, or three quarters."""
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
    """What one optimizer step found."""

    num_labels: int
    num_slots: int
    num_padding: int

    def __add__(self, other: Step) -> Step:
        return Step(
            self.num_labels + other.num_labels,
            self.num_slots + other.num_slots,
            self.num_padding + other.num_padding,
        )


class Variants:
    """The model, its optimizer, and one step of each variant on some conversations."""

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
        """Forward, backward and update; the loss is the mean over labels of all its terms."""
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
        """The loss a label, without training on it; the naive variants' equals the others'."""
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
        layouts = [self._lay_out(example, block_size) for example in examples]
        multiple_of = self.options.multiple_of
        batch = collate(pack(layouts, row_slots, multiple_of), 0, multiple_of)
        padding = int((batch.documents == PADDING_DOCUMENT).sum())
        sums = objective(batch.to(self.device))
        step = Step(sums.num_labels, batch.tokens.numel(), padding)
        return sums.clean + sums.noisy, step

    def _lay_out(self, example: Example, block_size: int | None) -> Layout:
        offset = int(self._rng.integers(block_size or 1))
        return lay_out(example.ids, example.supervised, block_size, self.mask_id, offset)

    def _ar_naive(self, examples: Sequence[Example]) -> tuple[Tensor, Step]:
        ids, labels, padding = pad_rows(examples, self.options.multiple_of)
        # Padding on the right needs no mask under a causal one, which costs the least.
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
    """The model that ``--model`` names, with random weights in float32."""
    torch.manual_seed(options.seed)
    config = AutoConfig.for_model("qwen2", tie_word_embeddings=True, **MODELS[options.model])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def pad_rows(examples: Sequence[Example], multiple_of: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, labels (-100 where there is none) and padding, [rows, longest] each."""
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
    """Whole rows, and after them their noisy copies if ``copies`` is 2, for the mask alone."""
    rows, longest = padding.shape
    none = torch.zeros(0, dtype=torch.long)
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
    )


def naive_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of shifted logits, summed over labels."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100).to(logits.device)
    return F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), reduction="sum")


def naive_step(labels: Tensor, padding: Tensor, copies: int) -> Step:
    """What a naive step found."""
    num_labels = int((labels[:, 1:] >= 0).sum())
    return Step(num_labels, copies * labels.numel(), copies * int(padding.sum()))


# --- measurement ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One variant's results."""

    variant: str
    step_s: float
    """Median over rounds of a round's mean seconds per step."""
    rounds_s: list[float]
    """Seconds per step of each round."""
    first_loss: float
    tokens_per_s: float
    """Tokens of the conversations, without padding and copies."""
    slots_per_step: float
    padding_share: float
    peak_mib: float
    mfu: float | None


def measure(options: Options, variants: Sequence[str]) -> list[Measured]:
    """All rounds of some variants."""
    examples = build_examples(options)
    size = options.batch_size
    batches = [examples[at : at + size] for at in range(0, len(examples), size)]
    runner = Variants(options)
    first = {variant: runner.first_loss(variant, batches[0]) for variant in variants}
    for variant in variants:
        for batch in batches[:2]:  # allocates, and compiles
            runner.step(variant, batch)
    peaks = {variant: peak_mib(runner, variant, batches[0]) for variant in variants}
    rounds: dict[str, list[float]] = {variant: [] for variant in variants}
    found: dict[str, list[Step]] = {variant: [] for variant in variants}
    for _ in range(options.rounds):
        spent = dict.fromkeys(variants, 0.0)
        for index, batch in enumerate(batches):
            for variant in variants if index % 2 == 0 else reversed(variants):
                seconds, step = timed_step(runner, variant, batch)
                spent[variant] += seconds
                found[variant].append(step)
        for variant in variants:
            rounds[variant].append(spent[variant] / len(batches))
    num_tokens = sum(len(example.ids) for example in examples) / len(batches)
    return [
        Measured(
            variant,
            step_s=(step_s := statistics.median(rounds[variant])),
            rounds_s=rounds[variant],
            first_loss=first[variant],
            tokens_per_s=num_tokens / step_s,
            slots_per_step=statistics.mean(step.num_slots for step in found[variant]),
            padding_share=sum(step.num_padding for step in found[variant])
            / sum(step.num_slots for step in found[variant]),
            peak_mib=peaks[variant],
            mfu=utilisation(runner, variant, batches, step_s),
        )
        for variant in variants
    ]


def timed_step(runner: Variants, variant: str, batch: Sequence[Example]) -> tuple[float, Step]:
    """Seconds of a step, with the device idle before and after it."""
    started = time.perf_counter()
    step = runner.step(variant, batch)
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, step


def peak_mib(runner: Variants, variant: str, batch: Sequence[Example]) -> float:
    """The most memory that tensors take in one step, weights and optimizer state included."""
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        runner.step(variant, batch)
        return torch.cuda.max_memory_allocated() / 2**20
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        with torch.profiler.profile(profile_memory=True) as profiler:
            runner.step(variant, batch)
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "[memory]"]
    in_step: int = max(event["Total Allocated"] for event in memory)
    state = [tensor for values in runner.optimizer.state.values() for tensor in values.values()]
    held = sum(tensor.nbytes for tensor in [*runner.model.parameters(), *state])
    peak: int = held + in_step
    return peak / 2**20


def utilisation(
    runner: Variants, variant: str, batches: Sequence[Sequence[Example]], step_s: float
) -> float | None:
    """Share of the peak that goes into what the method needs, without attention.

    That is, 6 operations for each weight of the layers and each token of the skipped layout, and
    for each weight of the output layer and each prediction; the naive variants need no more.
    """
    if runner.options.peak_tflops is None:
        return None
    block_size = runner.options.block_size if variant.startswith("mars") else None
    layouts = [runner._lay_out(example, block_size) for batch in batches for example in batch]
    slots = sum(len(layout.tokens) for layout in layouts)
    predictions = sum(len(item.labels) + int((item.depths > 0).sum()) for item in layouts)
    head: int = runner.model.get_output_embeddings().weight.numel()
    body: int = (
        sum(parameter.numel() for parameter in runner.model.parameters()) - head
    )  # they are tied
    flops = 6 * (body * slots + head * predictions) / len(batches)
    return flops / step_s / (runner.options.peak_tflops * 1e12)


# --- the report -----------------------------------------------------------------------------------


def ratio(measured: dict[str, Measured], over: str, under: str) -> tuple[float, float, float]:
    """Median, lowest and highest over rounds of one variant's time over another's."""
    pairs = zip(measured[over].rounds_s, measured[under].rounds_s, strict=True)
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def compare(results: list[Measured]) -> dict[str, dict[str, float]]:
    """Ratios of time and of peak memory."""
    by_name = {result.variant: result for result in results}
    pairs = [("mars", "ar"), ("mars-naive", "ar-naive"), ("mars-naive", "ar"), ("ar-naive", "ar")]
    compared: dict[str, dict[str, float]] = {}
    for over, under in pairs:
        if over not in by_name or under not in by_name:
            continue
        median, lowest, highest = ratio(by_name, over, under)
        compared[f"{over} / {under}"] = {
            "time": median,
            "time_lowest": lowest,
            "time_highest": highest,
            "memory": by_name[over].peak_mib / by_name[under].peak_mib,
        }
    return compared


def show(options: Options, facts: dict[str, float], results: list[Measured]) -> None:
    """The tables."""
    console = Console(width=120)
    console.print(" ".join(f"{name}={value}" for name, value in asdict(options).items()))
    console.print(
        f"{facts['prompt_tokens']:.1f} prompt and {facts['response_tokens']:.1f} response tokens a "
        f"conversation ({facts['prompt_per_response']:.2f} to 1)"
    )
    columns = ["variant", "ms/step", "s/epoch", "tokens/s", "slots", "padding", "peak MiB", "MFU"]
    table = Table(*columns, "first loss")
    for result in results:
        table.add_row(
            result.variant,
            f"{1e3 * result.step_s:.1f}",
            f"{result.step_s * options.steps:.2f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.slots_per_step:.0f}",
            f"{100 * result.padding_share:.1f}%",
            f"{result.peak_mib:.0f}",
            "" if result.mfu is None else f"{100 * result.mfu:.1f}%",
            f"{result.first_loss:.5f}",
        )
    console.print(table)
    for name, found in compare(results).items():
        console.print(
            f"{name}: {found['time']:.2f}x the time "
            f"({found['time_lowest']:.2f}-{found['time_highest']:.2f}), "
            f"{found['memory']:.2f}x the peak memory"
        )


def describe(examples: Sequence[Example]) -> dict[str, float]:
    """Mean tokens of prompts (all that is no label) and responses."""
    response = statistics.mean(int(example.supervised.sum()) for example in examples)
    prompt = statistics.mean(int(np.flatnonzero(item.supervised)[0]) for item in examples)
    return {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "prompt_per_response": prompt / response,
    }


def main(
    model: Annotated[str, typer.Option(help="demo, or qwen2.5-0.5b with random weights.")] = "demo",
    data: Annotated[
        str, typer.Option(help="demo, or long-prompts: 3 times the response.")
    ] = "demo",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, or bf16 by autocast.")] = "float32",
    attention: Annotated[str, typer.Option(help="sdpa, or flex (CUDA only).")] = "sdpa",
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the layers.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations a step.")] = 32,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Conversations at once; all of the step's by default.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=4, help="Random conversations of this many tokens instead.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="B.")] = 4,
    row_slots: Annotated[int, typer.Option(min=1, help="Slots of a packed row.")] = 192,
    ar_row_slots: Annotated[
        int | None, typer.Option(min=1, help="The same for AR; as for MARS by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps an epoch.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Epochs of each variant.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of CPU kernels.")] = 1,
    peak_tflops: Annotated[float | None, typer.Option(help="The device's peak, for MFU.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    only: Annotated[list[str] | None, typer.Option(help="These variants alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Seconds a step and peak memory of MARS and AR training, packed and naive."""
    assert attention in ("sdpa", "flex"), attention
    options = Options(
        model=model,
        data=data,
        device=device,
        dtype=dtype,
        attention=attention,  # type: ignore[arg-type]
        compile=compile_,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size or batch_size,
        length=length,
        block_size=block_size,
        row_slots=row_slots,
        ar_row_slots=ar_row_slots or row_slots,
        steps=steps,
        rounds=rounds,
        threads=threads,
        peak_tflops=peak_tflops,
        seed=seed,
    )
    torch.set_num_threads(threads)
    results = measure(options, only or VARIANTS)
    facts = describe(build_examples(options))
    if as_json:
        shown = {"options": asdict(options), "data": facts, "ratios": compare(results)}
        print(json.dumps({**shown, "variants": [asdict(result) for result in results]}, indent=1))
    else:
        show(options, facts, results)


if __name__ == "__main__":
    typer.run(main)
