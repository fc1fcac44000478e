"""Sizes of an engine."""

from __future__ import annotations

from pydantic import Field, model_validator

from mars_platform.config import Settings

_CPU_PAGE_SIZE, _GPU_PAGE_SIZE = 16, 256
CPU_PAGES = 2048
"""Pages of a pool in main memory whose size is not given."""


class EngineSettings(Settings):
    """Sizes of one engine."""

    renamed_keys = {  # noqa: RUF012 -- annotated in the base class
        "max_batch": "max_num_seqs",
        "max_positions": "max_num_batched_tokens",
        "reuse_prefixes": "enable_prefix_caching",
    }

    page_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens a page. By default 16 on a CPU, and 256 on a GPU, whose kernels want a multiple."""
    num_pages: int | None = Field(default=None, ge=1)
    """Pages in the pool; all requests' prompts and outputs share them. By default, what
    ``memory_fraction`` leaves on a GPU, and 2048 on a CPU."""
    memory_fraction: float = Field(default=0.85, gt=0, lt=1)
    """Share of a GPU's free memory, once the weights are loaded, that the pool takes."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Requests that run at once."""
    max_num_batched_tokens: int = Field(default=1024, ge=65)
    """Positions a step may feed: prompt chunks, unstored tokens and masks together."""
    max_requests: int = Field(default=1024, ge=1)
    """Requests that may run and wait at once; further ones are refused."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests while there is room, and start requests of the same
    tenant whose prompts begin alike from them."""
    adaptive_windows: bool = True
    """Choose the masks of each row by what they gain and what a step costs here; otherwise always
    feed the whole block."""
    cuda_graphs: bool = True
    """On a GPU, capture decoding steps as CUDA graphs at start, where attention reads pages in
    place."""
    batch_invariant: bool = False
    """Compute in fixed shapes, so that a request's numbers do not depend on its neighbours down to
    the last bit. Slower."""

    compile: bool = False
    """Compile the decoder with ``torch.compile`` when the model is loaded, which takes one to four
    seconds for each layer, the first time, and needs a C++ compiler (on a GPU, Triton). On a CPU,
    steps of tiny models take a third less time, those of 100 million weights 5 to 10% less."""

    @model_validator(mode="after")
    def _consistent(self) -> EngineSettings:
        if self.compile and self.batch_invariant:
            raise ValueError(
                "compile: compiled numbers depend on a step's size, against batch_invariant; "
                "leave one of the two out"
            )
        return self

    def page_size_on(self, device: str) -> int:
        """Tokens a page on a type of device."""
        return self.page_size or (_GPU_PAGE_SIZE if device == "cuda" else _CPU_PAGE_SIZE)
