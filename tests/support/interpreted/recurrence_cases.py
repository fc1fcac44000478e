"""Runs random steps of recurrent layers by the Triton kernels, token by token as their oracle.

`main` prints the number of models whose outputs were equal.
"""

import sys
from unittest.mock import patch

from decoding import recurrent_steps
from decoding.recurrent_steps import packed, run_steps
from mars_serve.engine.kernels import recurrence_triton
from mars_serve.engine.states import packed as packed_module

MODELS = ("delta and added", "by channel")


def main() -> None:
    kernels = {name: getattr(recurrence_triton, name) for name in ("scan", "convolve")}
    blocks = {"_STATE": 8, "_CHANNELS": 4}  # several in each of the small layers
    with (
        patch.multiple(packed_module, **kernels),
        patch.multiple(recurrence_triton, **blocks),
        patch.multiple(recurrent_steps, CHUNK=2, NUM_TEXTS=3),  # a program takes milliseconds
    ):
        for seed, model in enumerate(MODELS):
            run_steps(model, seed, packed, num_steps=4)
    sys.stdout.write(f"{len(MODELS)}\n")
