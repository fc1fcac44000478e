"""The settings of an engine. Imports no Ray, torch or HTTP library."""

from pydantic import Field

from mars_platform.config import Settings

_CPU_PAGE_SIZE = 16
_GPU_PAGE_SIZE = 64
"""A block of keys in the attention kernel, which then lies in one page."""
CPU_PAGES = 2048
"""Default number of pages of a pool in main memory."""


class EngineSettings(Settings):
    """Sizes and options of one engine."""

    page_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens in a page; by default 16 on a CPU and 64 on a GPU, where any size is possible and a
    multiple of 64 is the fastest. On a CPU, a page's keys take the memory of a multiple of 16."""
    num_pages: int | None = Field(default=None, ge=1)
    """Pages in the pool, which all requests share; by default as many as ``memory_fraction`` of a
    GPU's memory holds, and 2048 on a CPU. Layers that see the last tokens only have fewer."""
    memory_fraction: float = Field(default=0.85, gt=0, lt=1)
    """Share that the pool takes of what the weights leave of the replica's part of a GPU's memory;
    with ``num_gpus: 0.5`` that part is a half."""
    num_state_snapshots: int = Field(default=64, ge=0)
    """Snapshots of the states of recurrent layers by which prefixes of prompts are found, beside
    two states for each of ``max_num_seqs``; 0 for none, and no prefix caching. `marsray doctor`
    tells the memory of a state, which on a GPU the pool gives up."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most requests that run at once."""
    max_num_batched_tokens: int = Field(default=1024, ge=65)
    """Most positions of a step: prompt chunks, uncached tokens, drafts and masks together. Prompts
    get fewer where that many take long and others wait."""
    max_requests: int = Field(default=1024, ge=1)
    """Most requests that run and wait at once; further ones are refused."""
    enable_prefix_caching: bool = True
    """Whether the pages of finished requests are kept while there is room, so that requests of the
    same tenant whose prompts begin alike need not compute them again."""
    adaptive_windows: bool = True
    """Whether the masks of each row are chosen by their expected gain and the cost of a step here;
    otherwise each row feeds the whole block."""
    num_lookup_drafts: int = Field(default=0, ge=0, le=64)
    """Most drafts of a step, in mode exact, that come from the request's own text: the tokens that
    followed an earlier place like its end; 0 for none. They help few requests at once whose output
    repeats their text, and a plain AR checkpoint; with many they can cost more than they gain."""
    max_loras: int = Field(default=0, ge=0, le=256)
    """Slots for LoRA adapters: how many different ones act in a step. Further ones wait, and take
    the place of the least recently used. 0 for none, or for as many as a model's ``loras``, 8 at
    most. On a GPU each slot costs memory, and time in steps with adapters."""
    max_lora_rank: int = Field(default=32, ge=1, le=512)
    """Highest rank of a LoRA adapter, which the slots have room for."""
    cuda_graphs: bool = True
    """Whether decoding steps are captured as CUDA graphs at start, on a GPU whose attention reads
    pages in place."""
    batch_invariant: bool = False
    """Whether steps are computed in fixed shapes, so that no bit of a request's numbers depends on
    the other requests. Slower, and not for models with recurrent layers."""
    step_timeout_s: float = Field(default=30.0, gt=0)
    """Least seconds after which a step is taken to hang, and the engine is ended and replaced. A
    step that is expected to take long gets ten times its expected time."""

    @property
    def num_state_slots(self) -> int:
        """Slots for states of recurrent layers, if a model has any; see `StateSlots`."""
        return 2 * self.max_num_seqs + self.num_state_snapshots

    def page_size_on(self, device: str) -> int:
        """Return the tokens in a page on a type of device."""
        return self.page_size or (_GPU_PAGE_SIZE if device == "cuda" else _CPU_PAGE_SIZE)
