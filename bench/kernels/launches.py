"""Launches of the engine's Triton kernels on tensors without memory, at sizes of real models.

Each is a function that calls the launchers as an engine does; `compile.py` records the kernels that
they launch and compiles them for GPUs. Further kernels add a function and a line in `LAUNCHES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.paged import tiling_of
from mars_serve.engine.attention.plan import StepShape
from mars_serve.engine.kernels import (
    acceptance_triton,
    adapter_triton,
    attention_triton,
    recurrence_triton,
)
from mars_serve.engine.kernels.attention import COMBINE_FIELDS, PIECE_FIELDS

Launch = Callable[[], object]
MULTIPROCESSORS = 132
"""Multiprocessors of an H100, for which steps are cut into pieces."""


@dataclass(frozen=True)
class Attention:
    """Attention of one layer over a step."""

    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    rows: int = 1
    dtype: torch.dtype = torch.bfloat16
    pages: torch.dtype | None = None
    """Type of cached keys and values, by default that of the queries."""
    page_size: int = 64
    context: int = 32768
    has_window: bool = False
    softcap: float | None = None
    sinks: bool = False
    rotated: int = 0
    """Numbers of a key behind those that are its value, which is not cached then."""

    def __call__(self) -> Tensor:
        """Launch the kernels."""
        group = LayerGroup(
            *(1, self.heads, self.kv_heads, self.head_dim + self.rotated, self.head_dim),
            value_in_key=self.rotated > 0,
        )
        tiling = tiling_of(group, self.page_size, self.dtype, torch.device("meta"))
        tiling = replace(tiling, num_pieces=max(1, MULTIPROCESSORS * tiling.heads // self.heads))
        shape = StepShape(self.positions, self.rows, -(-self.context // self.page_size))
        with torch.device("meta"):
            parts = [  # by head, as transformers has them
                torch.empty(heads, self.positions, group.key_dim, dtype=self.dtype).transpose(0, 1)
                for heads in (self.heads, self.kv_heads, self.kv_heads)
            ]
            pages = torch.empty(
                2, 9, self.page_size, self.kv_heads, group.key_dim, dtype=self.pages or self.dtype
            )
            numbers = partial(torch.empty, dtype=torch.long)
            scale = 1.0 if self.pages is None else 0.5
            return attention_triton.paged_attention(
                *parts[:2],
                parts[2][..., : self.head_dim],
                pages[0],
                pages[1, ..., : self.head_dim],
                numbers(self.rows, shape.num_pages),
                *(numbers(self.positions) for _ in range(3)),
                numbers(tiling.most_pieces(shape), PIECE_FIELDS),
                numbers(self.positions, COMBINE_FIELDS),
                self.head_dim**-0.5,
                tiling.block_m(shape),
                tiling.block_n,
                tiling.num_slots(shape),
                numbers(self.positions) if self.has_window else None,
                self.softcap,
                torch.empty(self.heads, dtype=self.dtype) if self.sinks else None,
                scale,
                scale,
            )


@dataclass(frozen=True)
class Adapter:
    """The product that an adapter adds to a linear layer's."""

    columns: int
    rank: int = 32
    hidden: int = 3584
    positions: int = 9

    def __call__(self) -> None:
        """Launch the kernel."""
        empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
        adapter_triton.add_low_rank(
            empty(self.positions, self.columns),
            empty(self.positions, self.hidden),
            empty(1, self.rank, self.hidden),
            empty(1, self.rank, self.columns),
            torch.empty(self.positions, dtype=torch.long, device="meta"),
        )


@dataclass(frozen=True)
class States:
    """The states of one layer over a step."""

    heads: int
    key_dim: int
    value_dim: int
    is_delta: bool = True
    by_channel: bool = False

    def __call__(self) -> None:
        """Launch the kernel."""
        empty = partial(torch.empty, device="meta")
        heads, rates = self.heads, self.key_dim if self.by_channel else 1
        key = empty(9, heads, self.key_dim)
        recurrence_triton.scan(
            *(key, key, empty(9, heads, self.value_dim), empty(9, heads, rates)),
            empty(9, heads) if self.is_delta else None,
            empty(129, heads, self.key_dim, self.value_dim),
            *(empty(129, 8, heads, size) for size in (self.key_dim, self.value_dim, rates)),
            empty(2, 17, dtype=torch.long),
            empty(128, 2, dtype=torch.long),
        )


def convolve() -> None:
    """Launch the kernel of a short convolution."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    numbers = partial(torch.empty, dtype=torch.long, device="meta")
    recurrence_triton.convolve(
        *(empty(9, 8192), empty(8192, 4), empty(129, 11, 8192)),
        *(numbers(9, 4), numbers(2, 11), numbers(2, 17), numbers(128, 2), numbers(128, 3)),
    )


def propose() -> None:
    """Launch the kernels that read the logits of a step."""
    logits = torch.empty(9, 152064, dtype=torch.bfloat16, device="meta")
    numbers = torch.empty(9, dtype=torch.long, device="meta")
    is_banned = torch.empty(152064, dtype=torch.bool, device="meta")
    acceptance_triton.propose(logits, is_banned, numbers, numbers.double())


F8 = torch.float8_e4m3fn
LAUNCHES: dict[str, Launch] = {
    "attention 7B ar": Attention(28, 4, 128, positions=1),
    "attention 7B decoding": Attention(28, 4, 128, positions=9),
    "attention 7B prompt": Attention(28, 4, 128, positions=2048),
    "attention 0.5B decoding": Attention(14, 2, 64, positions=64, rows=32),
    "attention 0.5B prompt": Attention(14, 2, 64, positions=2048),
    "attention head 16": Attention(4, 4, 16, positions=64, rows=8),
    "attention head 32": Attention(8, 2, 32, positions=64, rows=8),
    "attention head 80": Attention(32, 32, 80, positions=64, rows=8),
    "attention head 96": Attention(32, 8, 96, positions=64, rows=8),
    "attention head 256": Attention(16, 8, 256, positions=64, rows=8),
    "attention head 256 prompt": Attention(16, 8, 256, positions=2048),
    "attention head 512": Attention(16, 2, 512, positions=64, rows=8),
    "attention head 512 ar": Attention(8, 1, 512, positions=1),
    "attention float32 head 512": Attention(16, 2, 512, positions=9, dtype=torch.float32),
    "attention latents": Attention(128, 1, 512, positions=64, rows=8, rotated=64),
    "attention latents 16 heads ar": Attention(16, 1, 512, positions=1, rotated=64),
    "attention latents 20 heads ar": Attention(20, 1, 512, positions=1, rotated=64),
    "attention float32 latents": Attention(
        20, 1, 512, positions=9, dtype=torch.float32, rotated=64
    ),
    "attention float16": Attention(28, 4, 128, positions=9, dtype=torch.float16),
    "attention float32": Attention(28, 4, 128, positions=9, dtype=torch.float32),
    "attention float32 prompt": Attention(28, 4, 128, positions=2048, dtype=torch.float32),
    "attention float32 head 256": Attention(16, 8, 256, positions=9, dtype=torch.float32),
    "attention pages of 16": Attention(28, 4, 128, positions=9, page_size=16),
    "attention pages of 48": Attention(28, 4, 128, positions=9, page_size=48),
    "attention pages of 256": Attention(28, 4, 128, positions=9, page_size=256),
    "attention window and sinks": Attention(64, 8, 64, positions=9, has_window=True, sinks=True),
    "attention window prompt": Attention(64, 8, 64, positions=2048, has_window=True, sinks=True),
    "attention soft cap": Attention(16, 8, 256, positions=9, has_window=True, softcap=50.0),
    "attention 8-bit pages": Attention(28, 4, 128, positions=9, pages=F8),
    "attention 8-bit pages prompt": Attention(28, 4, 128, positions=2048, pages=F8),
    "adapter 7B attention": Adapter(columns=3584),
    "adapter 7B MLP": Adapter(columns=18944),
    "adapter of rank 128": Adapter(columns=3584, rank=128),
    "proposals": propose,
    "states of Qwen3.5": States(32, 128, 128),
    "states of Olmo hybrids": States(30, 96, 192),
    "states of Kimi": States(32, 128, 128, by_channel=True),
    "states of Nemotron-H": States(64, 128, 64, is_delta=False),
    "states of Falcon-H1": States(32, 256, 64, is_delta=False),
    "convolution": convolve,
}
QUICK = (
    "attention 7B decoding",
    "attention latents",
    "attention window and sinks",
    "adapter 7B MLP",
    "proposals",
    "states of Kimi",
    "convolution",
)
"""Launches that the suite compiles."""
