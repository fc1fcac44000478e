"""Steps of attention by the Triton kernels, compared with dense attention.

`main` prints one line of JSON for each case: its name and its largest difference, or its error.
Numbers of pages that no query may see are NaN in all cases.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from decoding.attention_steps import AttentionStep, RowShape
from mars_serve.engine.attention.paged import PagedAttention, PagedMetadata
from mars_serve.engine.attention.plan import StepShape

DTYPES = {"float32": torch.float32, "float16": torch.float16}
TOLERANCES = {"float32": 2e-6, "float16": 2e-3}


@dataclass(frozen=True)
class Case:
    """One step, and how it is cut."""

    name: str
    rows: tuple[RowShape, ...]
    dtype: str = "float32"
    page_size: int = 16
    heads: tuple[int, int] = (2, 1)
    """Query heads and key/value heads."""
    head_dim: int = 16
    value_dim: int | None = None
    """Size of values, by default that of keys."""
    block_n: int = 16
    num_pieces: int = 1
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_in_key: bool = False
    room: tuple[int, int, int] = (0, 0, 0)
    """Positions, rows and pages that the step's shape has to spare."""
    has_8_bit_pages: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}, {self.dtype}"


def _cases() -> Iterator[Case]:
    for index, present in enumerate(product((0, 3), repeat=4)):
        rows = ((5, 1, present), (0, 2, (2,)))
        yield Case(f"groups {present}", rows, num_pieces=4 if index % 4 == 3 else 1)
    for tokens, cached in ((70, 0), (70, 33), (130, 5)):
        yield Case(f"prompt of {tokens} after {cached}", ((cached, tokens, (0,)),), block_n=32)
    yield from _cases_of_sizes()
    yield from _cases_of_cuts()
    yield from _cases_of_wide_heads()
    for seed in range(10):
        yield _random_case(seed)


def _cases_of_sizes() -> Iterator[Case]:
    for size in (1, 3, 16, 32, 48, 64, 256):
        for cached in sorted({0, 1, size - 1, size, size + 1, 2 * size}):
            yield Case(f"{cached} tokens in pages of {size}", ((cached, 1, (2,)),), page_size=size)
    for head_dim, pieces in product((8, 16, 32, 64, 80, 96, 128, 256), (1, 3)):
        rows = ((40, 2, (2,)), (0, 3, (1,)))
        name = f"heads of {head_dim}, {pieces} pieces"
        yield Case(name, rows, head_dim=head_dim, num_pieces=pieces)
    for heads in ((1, 1), (4, 4), (6, 2), (7, 1), (14, 2), (8, 1), (32, 1), (40, 1)):
        rows = ((20, 2, (3,)), (3, 1, (0,)))
        yield Case(f"{heads[0]} query heads of {heads[1]}", rows, heads=heads)


def _cases_of_cuts() -> Iterator[Case]:
    for window, pieces in product((1, 2, 7, 16, 40), (1, 4)):
        rows = ((50, 1, (3,)), (9, 3, (2, 0, 2)), (0, 20, (0,)))
        yield Case(f"window {window}, {pieces} pieces", rows, window=window, num_pieces=pieces)
    for value_dim, pieces in product((8, 24, 48), (1, 3)):
        rows = ((40, 2, (2,)), (0, 3, (1,)))
        name = f"values of {value_dim}, {pieces} pieces"
        yield Case(name, rows, head_dim=24, value_dim=value_dim, num_pieces=pieces)
    for heads, pieces in product((1, 6), (1, 4)):
        yield Case(
            f"latents of {heads} heads, {pieces} pieces",
            ((40, 2, (2,)), (0, 3, (1,))),
            heads=(heads, 1),
            head_dim=40,
            value_dim=24,
            num_pieces=pieces,
            value_in_key=True,
        )
    for softcap, chunk, pieces in product((None, 0.4), (None, 3, 20), (1, 4)):
        rows = ((50, 1, (3,)), (9, 3, (2, 0, 2)), (0, 20, (0,)))
        name = f"soft cap {softcap}, chunk {chunk}, {pieces} pieces"
        yield Case(name, rows, softcap=softcap, chunk=chunk, num_pieces=pieces)
    for window, pieces in product((None, 9), (1, 4)):
        name = f"sinks, window {window}, {pieces} pieces"
        rows = ((50, 1, (3,)), (9, 3, (2, 0, 2)))
        yield Case(name, rows, window=window, num_pieces=pieces, has_sinks=True)
    for room in ((0, 0, 3), (0, 2, 0), (5, 0, 0), (7, 3, 2), (40, 4, 1)):
        yield Case(f"room for {room}", ((40, 1, (3,)), (3, 2, (0,))), room=room, num_pieces=3)
    for pieces in (2, 5, 9, 40):
        yield Case(f"{pieces} pieces", ((150, 1, (2,)), (20, 1, (0,))), num_pieces=pieces)


def _cases_of_wide_heads() -> Iterator[Case]:
    """Latents as in DeepSeek V3 and GLM 4.7 Flash, and heads as in Gemma 4."""
    for heads, pieces in product((16, 20, 128), (1, 4)):
        yield Case(
            f"latents of 512 and 64 numbers, {heads} heads, {pieces} pieces",
            ((40, 1, (1,)),),
            heads=(heads, 1),
            head_dim=576,
            value_dim=512,
            num_pieces=pieces,
            value_in_key=True,
            has_8_bit_pages=heads == 20,
        )
    for window, pieces in product((None, 9), (1, 4)):
        name = f"heads of 512, window {window}, {pieces} pieces"
        rows = ((40, 2, (2,)), (0, 3, (1,)))
        yield Case(name, rows, heads=(4, 2), head_dim=512, window=window, num_pieces=pieces)


def _random_case(seed: int) -> Case:
    source = random.Random(seed)
    rows = []
    for _ in range(source.randint(1, 4)):
        masks = tuple(source.randint(0, 3) for _ in range(source.choice([1, 1, 2, 4])))
        rows.append((source.choice([0, 1, 15, 16, 17, 60]), source.choice([1, 1, 2, 9]), masks))
    kv_heads = source.choice([1, 2])
    return Case(
        f"by chance {seed}",
        tuple(rows),
        page_size=source.choice([4, 16, 24]),
        heads=(kv_heads * source.choice([1, 3, 4]), kv_heads),
        head_dim=source.choice([16, 24, 64]),
        num_pieces=source.choice([1, 3, 8]),
        window=source.choice([None, None, 5]),
        has_sinks=source.random() < 0.3,
        room=(source.randint(0, 3), source.randint(0, 2), source.randint(0, 2)),
    )


CASES = [
    replace(case, dtype=tuple(DTYPES)[(index + index // 2) % 2])  # both in each pair of a product
    for index, case in enumerate(_cases())
] + [
    Case(
        f"8-bit pages, {pieces} pieces",
        ((70, 1, (3,)), (5, 2, (0,))),
        num_pieces=pieces,
        has_8_bit_pages=True,
    )
    for pieces in (1, 4)
]


def difference(case: Case) -> float:
    """Return the largest difference of a case's result from dense attention."""
    from mars_serve.engine.kernels.attention_triton import paged_attention

    (heads, kv_heads), dtype = case.heads, DTYPES[case.dtype]
    cpu, scale = torch.device("cpu"), 0.5 if case.has_8_bit_pages else 1.0
    step = AttentionStep(
        *(case.rows, cpu, dtype, case.page_size),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=case.head_dim,
        value_dim=case.value_dim,
        window=case.window,
        chunk=case.chunk,
        softcap=case.softcap,
        has_sinks=case.has_sinks,
        value_in_key=case.value_in_key,
    )
    pages = step.pages
    if case.has_8_bit_pages:
        pages = [(part / scale).to(torch.float8_e4m3fn) for part in step.pages]
        step.pages = [part.to(dtype) * scale for part in pages]
    sizes = {"num_pages": 1, "page_size": case.page_size}
    attention = PagedAttention(step.group, **sizes, **step.types)
    attention.tiling = tiling = replace(
        attention.tiling, block_n=case.block_n, num_pieces=case.num_pieces, fewest_blocks=1
    )
    metadata, query, key, value = _with_room(case, step, attention)
    shape = metadata.shape
    key_pages, value_pages = (_only_visible(step, part) for part in pages)
    if case.value_in_key:
        value_pages = key_pages[..., : case.value_dim]
    output = paged_attention(
        query,
        key,
        value,
        key_pages,
        value_pages,
        metadata.page_table,
        metadata.leading,
        metadata.own,
        metadata.positions,
        metadata.pieces,
        metadata.combine,
        step.scaling,
        tiling.block_m(shape),
        tiling.block_n,
        tiling.num_slots(shape),
        metadata.oldest,
        step.softcap,
        step.sinks,
        scale,
        scale,
    )
    used = step.batch.num_positions
    assert (output[used:] == 0).all(), "padding gives 0"
    assert output.dtype == dtype
    return (output[:used] - step.expected()).abs().max().item()


def _with_room(
    case: Case, step: AttentionStep, attention: PagedAttention
) -> tuple[PagedMetadata, Tensor, Tensor, Tensor]:
    """Pad a step to a larger shape; keys of padding are NaN, which no query may see."""
    exact = StepShape.of(step.batch, case.page_size)
    shape = StepShape(
        exact.num_positions + case.room[0],
        exact.num_rows + case.room[1],
        exact.num_pages + case.room[2],
    )
    numbers = np.empty(sum(attention.sizes(shape)), dtype=np.int64)
    attention.pack(step.batch, shape, numbers)
    parts = []
    for part in (step.query, step.key, step.value):
        padded = torch.full((shape.num_positions, 3, *part.shape[1:]), torch.nan, dtype=part.dtype)
        padded[: step.batch.num_positions, 1] = part[: step.batch.num_positions]
        parts.append(padded[:, 1])
    return attention.unpack(torch.from_numpy(numbers), shape), *parts


def _only_visible(step: AttentionStep, pages: Tensor) -> Tensor:
    """Return the pages with NaN wherever no cached token lies that its row sees."""
    kept = torch.zeros(pages.shape[:2], dtype=torch.bool)
    for row in step.batch.rows:
        first = int(step.group.oldest(np.array(row.num_cached)))
        tokens = torch.arange(min(first, row.num_cached), row.num_cached)
        kept[torch.tensor(row.pages)[tokens // step.page_size], tokens % step.page_size] = True
    return pages.float().masked_fill(~kept[..., None, None], torch.nan).to(pages.dtype)


def main() -> None:
    for case in CASES:
        result: dict[str, object] = {"id": case.id}
        try:
            result["difference"] = difference(case)
        except Exception:  # told by the case's own test
            result["error"] = traceback.format_exc()
        sys.stdout.write(json.dumps(result) + "\n")
