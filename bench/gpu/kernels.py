"""Compares the operators of the engine on a device with their plain twins on the CPU."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine import kernels
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.batch import build_batch
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Largest difference of a position's numbers from the oracle's, relative to the largest of them."""
_MASK, _CPU = 3, torch.device("cpu")

RowShape = tuple[int, int, tuple[int, ...]]
"""Cached tokens of a row, tokens that it feeds, and its masks by outcome."""


class AttentionCase(NamedTuple):
    """One step of attention."""

    rows: tuple[RowShape, ...]
    heads: tuple[int, int] = (14, 2)
    """Query heads and key/value heads."""
    head_dim: int = 64
    page_size: int = 64
    rotated: int = 0
    """Numbers of a key behind those that are its value, if it holds it."""


_ROWS: tuple[RowShape, ...] = ((700, 1, (4,)), (0, 3, (2, 1)), (256, 2, (0,)), (9, 1, (4, 4, 2)))
_TINY_CASES = [
    AttentionCase(((20, 1, (4,)), (0, 3, (2, 1))), heads, 16, 8, rotated)
    for heads, rotated in (((4, 2), 0), ((4, 1), 8))
]
_CASES = [
    AttentionCase(_ROWS),
    AttentionCase(_ROWS, (28, 4), 128),
    AttentionCase(_ROWS, (32, 8), 128, 256),
    AttentionCase(_ROWS, (8, 8), 80, 16),
    AttentionCase(_ROWS, (4, 1), 256, 48),
    AttentionCase(_ROWS, (16, 2), 512),
    AttentionCase(_ROWS, (20, 1), 512, rotated=64),
    AttentionCase(_ROWS, (128, 1), 512, rotated=64),
    AttentionCase(((4000, 1, (4,)),), (28, 4), 128, 256),
    AttentionCase(tuple((40 * row, 1, (4, 3, 2, 1, 1)) for row in range(32)), (28, 4), 128),
    AttentionCase(((0, 300, (0,)), (300, 200, (3,))), (14, 2), 64),
]


def load_kernels(device: str) -> None:
    """Import all operators, and on a GPU their kernels, which need Triton."""
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.name != "gpu" and not module.name.endswith("_triton"):
            importlib.import_module(f"{kernels.__name__}.{module.name}")
    if device == "cuda":
        importlib.import_module(f"{kernels.__name__}.gpu")


def differences(device: str, dtype: torch.dtype, *, is_tiny: bool) -> dict[str, float]:
    """Return the largest difference of each case from its oracle; see `TOLERANCES`."""
    load_kernels(device)
    torch.manual_seed(0)
    where = torch.device(device)
    found = {
        name: max(_difference(name, call, where) for call in calls(dtype, is_tiny))
        for name, calls in OPERATORS.items()
    }
    for case in _TINY_CASES if is_tiny else _CASES:
        cached = ",".join(str(row[0]) for row in case.rows)
        name = f"paged_attention: {case.heads} heads of {case.head_dim}, pages of {case.page_size}"
        found[f"{name}, cached {cached}"] = _attention_difference(case, where, dtype)
    return found


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of a position, relative to its own largest number.

    Attention to many keys gives small numbers, beside which those of few keys are large.
    """
    if not theirs.numel():
        return 0.0
    ours, theirs = (
        part.float().cpu().flatten(1 if part.dim() > 1 else 0) for part in (ours, theirs)
    )
    assert torch.isfinite(ours).all(), "the result is not finite"
    scale = theirs.abs().amax(-1)
    scale = scale.clamp(min=max(0.01 * float(scale.max()), 1e-6))
    return float(((ours - theirs).abs().amax(-1) / scale).max())


# Attention: keys are cached by a first step, and read by a second one


def _attention_difference(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> float:
    heads, kv_heads = case.heads
    longest = max(cached + tokens + len(masks) for cached, tokens, masks in case.rows)
    per_row = -(-longest // case.page_size)
    key_dim, is_latent = case.head_dim + case.rotated, case.rotated > 0
    group = LayerGroup(1, heads, kv_heads, key_dim, case.head_dim, value_in_key=is_latent)
    sizes = {
        "num_pages": per_row * len(case.rows),
        "page_size": case.page_size,
    }
    ours = PagedAttention(group, dtype=dtype, device=device, **sizes)
    oracle = GatheredAttention(group, dtype=torch.float32, device=_CPU, **sizes)
    prompts: list[RowShape] = [(0, cached, (0,)) for cached, _, _ in case.rows]
    worst = 0.0
    for shapes in (prompts, case.rows):
        rows = [_row(i, each, per_row) for i, each in enumerate(shapes) if each[1]]
        if not rows:
            continue
        batch = build_batch(rows, _MASK)
        by_head = torch.randn(heads + 2 * kv_heads, len(batch.ids), key_dim).to(dtype)
        outputs = []
        for attention, numbers in ((ours, by_head.to(device)), (oracle, by_head.float())):
            parts = numbers.transpose(0, 1).split([heads, kv_heads, kv_heads], dim=1)
            query, key, value = (
                parts if attention is ours else [each.contiguous() for each in parts]
            )
            value = (key if is_latent else value)[..., : case.head_dim]
            metadata = attention.prepare(batch)
            output = attention.attend(0, query, key, value, case.head_dim**-0.5, metadata)
            outputs.append(output[: batch.num_positions])
        worst = max(worst, _relative(*outputs))
    return worst


def _row(index: int, shape: RowShape, per_row: int) -> ScheduledRow:
    cached, tokens, masks = shape
    request = Request(
        str(index),
        [5] * (cached + tokens),
        DecodingOptions(8, Mode.EXACT if len(masks) > 1 else Mode.THRESHOLD),
        num_cached=cached,
        pages=list(range(index * per_row, (index + 1) * per_row)),
    )
    request.drafts = [Draft(6, 0.5)] * (len(masks) - 1)
    return ScheduledRow(request, tokens, masks, reads_logits=True)


# Other operators: the same call on the device and on the CPU


def _difference(name: str, call: Sequence[object], device: torch.device) -> float:
    """Run an operator on both devices, and compare its results and what it overwrites."""
    function = getattr(torch.ops.marsray, name).default
    results = []
    for where in (device, _CPU):
        arguments = [
            each.detach().clone().to(where) if isinstance(each, Tensor) else each for each in call
        ]
        output = function(*arguments)
        outputs = [] if output is None else [output]
        if name == "propose":
            outputs = _read_proposals(output)
        results.append([*outputs, *(each for each in arguments if isinstance(each, Tensor))])
    return max(_relative(ours, theirs) for ours, theirs in zip(*results, strict=True))


Calls = Iterator[Sequence[object]]


def _low_ranks(dtype: torch.dtype, is_tiny: bool) -> Calls:
    sizes = [(3, 32, 64, 16)] if is_tiny else [(9, 3584, 512, 32), (144, 3584, 18944, 32)]
    for rows, width, columns, rank in sizes:
        outputs, inputs = torch.randn(rows, columns), torch.randn(rows, width)
        down = torch.randn(2, rank, width) / width**0.5
        up = torch.randn(2, rank, columns) / rank**0.5
        slots = torch.arange(rows) % 9 % 3 - 1
        yield *(each.to(dtype) for each in (outputs, inputs, down, up)), slots


def _proposals(dtype: torch.dtype, is_tiny: bool) -> Calls:
    for rows, size in [(3, 64)] if is_tiny else [(1, 152064), (160, 151936)]:
        logits = (3 * torch.randn(rows, size)).to(dtype)
        measures = torch.arange(rows) % len(Confidence)
        temperatures = torch.linspace(0.5, 2, rows, dtype=torch.float64)
        yield logits, torch.arange(size) % 50 == 0, measures, temperatures


def _read_proposals(output: Tensor) -> list[Tensor]:
    """Return confidences, and tokens as digits, of which a wrong one exceeds each tolerance."""
    tokens, confidences = output[:, 0], output[:, 1].contiguous().view(torch.float32)
    return [confidences, *((tokens // 31**power % 31).float() for power in range(4))]


OPERATORS: dict[str, Callable[[torch.dtype, bool], Calls]] = {
    "add_low_rank": _low_ranks,
    "propose": _proposals,
}
"""Calls of each operator but attention, which needs a step."""
