"""Compares states that run through the steps of random rows with ones that run token by token."""

import importlib

import pytest
import torch

from decoding.recurrent_steps import CHUNK, MODELS, MOST_DRAFTS, packed, run_steps
from mars_platform.mixing.specs import ConvSpec, ScanSpec
from mars_serve.engine.states import slots as slots_module
from mars_serve.engine.states.slots import States, slot_bytes


@pytest.mark.parametrize("way", ["pieces", "packed"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_states_are_those_of_the_path_of_each_position(
    model: str, seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "_CHUNK", CHUNK)
    monkeypatch.setattr(slots_module, "_CHUNK_BY_CHANNEL", CHUNK)
    ways = {"pieces": lambda states: states.prepare, "packed": packed}
    run_steps(model, seed, ways[way])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", MODELS)
def test_kernels_keep_to_the_path_of_each_position_on_a_gpu(model: str) -> None:
    importlib.import_module("mars_serve.engine.kernels.gpu")
    run_steps(model, 0, packed, device=torch.device("cuda"))


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_a_slot_takes_the_bytes_of_its_numbers(layers: tuple[list[ScanSpec], list[ConvSpec]]):
    scans, convolutions = layers
    sizes = {"num_drafts": MOST_DRAFTS, "dtype": torch.bfloat16}
    states = States(scans, convolutions, num_slots=4, device=torch.device("cpu"), **sizes)
    tensors = [*states.inputs, *(part for scan in states.scans for part in scan)]
    num_bytes = sum(each.nbytes for each in tensors)
    assert num_bytes == 5 * slot_bytes(scans, convolutions, **sizes) > 0
