"""Gives the parts of the acceptance run the device, the sizes, the untrained models and clocks."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mars_serve.bench.decode.models import PRESETS, BenchModel, untrained_model

PRESET = {"7b": "qwen2.5-7b", "0.5b": "qwen2.5-0.5b"}
_TINY = {
    **PRESETS["qwen2.5-0.5b"],
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Setup:
    """The device and the sizes of all tests."""

    device: str
    """``cuda`` or ``cpu``."""
    is_tiny: bool
    """Whether sizes are as small as a test of this program takes them."""

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def model(self, size: str, dtype: torch.dtype | None = None) -> BenchModel:
        """Return a model of a size, ``7b`` or ``0.5b``, or a tiny one if the run is tiny."""
        dtype = dtype or (torch.bfloat16 if self.on_cuda else torch.float32)
        if not self.is_tiny:
            return untrained_model(PRESET[size], dtype, self.device, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "config.json")
            file.write_text(json.dumps(_TINY), encoding="utf-8")
            return untrained_model(str(file), dtype, self.device, seed=0)

    def synchronise(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def seconds_of(self, function: Callable[[], object], repeats: int) -> float:
        """Return the seconds of a call, the least mean of three series, after one untimed call."""
        function()
        series = []
        for _ in range(3):
            self.synchronise()
            begin = time.perf_counter()
            for _ in range(repeats):
                function()
            self.synchronise()
            series.append((time.perf_counter() - begin) / repeats)
        return min(series)


def weight_bytes(model: BenchModel) -> int:
    """Return the bytes of the weights that a step of few positions reads."""
    config = model.checkpoint.config
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    count = sum(weight.numel() for weight in weights.parameters())
    if not config.tie_word_embeddings:
        count -= weights.get_input_embeddings().weight.numel()  # a step reads one row of it
    return int(count * model.dtype.itemsize)
