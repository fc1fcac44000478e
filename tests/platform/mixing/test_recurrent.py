"""Compares layers with states that are bound in with transformers' own, in ten families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.families import HYBRIDS, build_family
from mars_platform.mixing.head import decoder_of
from mars_platform.mixing.probe import Probe
from mars_platform.mixing.recurrent import ConvolveCall, ScanCall
from mars_platform.mixing.specs import ConvSpec, ScanSpec

DELTA = ScanSpec(heads=4, key_dim=8, value_dim=6, is_delta=True, decay_per_channel=False)
CHANNELS = ScanSpec(heads=4, key_dim=8, value_dim=8, is_delta=True, decay_per_channel=True)
ADDED = ScanSpec(heads=4, key_dim=8, value_dim=16, is_delta=False, decay_per_channel=False)
EXPECTED: dict[str, tuple[list[ScanSpec], list[ConvSpec]]] = {
    **dict.fromkeys(HYBRIDS, ([DELTA] * 2, [ConvSpec(56, 4)] * 2)),
    **dict.fromkeys(("bamba", "granitemoehybrid"), ([ADDED] * 2, [ConvSpec(96, 4)] * 2)),
    "nemotron_h": ([ADDED] * 2, [ConvSpec(96, 4)] * 2),
    "falcon_h1": ([ADDED] * 3, [ConvSpec(96, 4)] * 3),
    "kimi_linear": ([CHANNELS] * 2, [ConvSpec(96, 4)] * 2),
    "lfm2": ([], [ConvSpec(32, 3)] * 2),
}


class Serial:
    """Mixes the positions of each row one after the other."""

    def scan(self, call: ScanCall) -> Tensor:
        rows, _, heads, key_dim = call.key.shape
        state = torch.zeros(rows, heads, key_dim, call.value.shape[-1])
        outputs = []
        for index in range(call.key.shape[1]):
            query, key, value, decay = (each[:, index, ..., None] for each in call[:4])
            state = decay.exp() * state
            learned = value.mT
            if call.rate is not None:
                learned = call.rate[:, index, :, None, None] * (learned - key.mT @ state)
            state = state + key * learned
            outputs.append((query.mT @ state).squeeze(-2))
        return torch.stack(outputs, dim=1)

    def convolve(self, call: ConvolveCall) -> Tensor:
        kernel = call.weight.shape[1]
        padded = torch.nn.functional.pad(call.inputs, (0, 0, kernel - 1, 0))
        return (padded.unfold(1, kernel, 1) * call.weight).sum(-1)


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_states_of_hybrids_are_recorded_and_bound(family: str) -> None:
    """The same decoder goes on as before without the keyword, in training as well."""
    model: Any = build_family(family)
    probe = Probe.of(model)
    assert (list(probe.scans), list(probe.convolutions)) == EXPECTED[family]
    ids, decoder = torch.tensor([probe.tokens, probe.tokens[::-1]]), decoder_of(model)
    expected = decoder(input_ids=ids, use_cache=False).last_hidden_state
    found = decoder(input_ids=ids, use_cache=False, mixing=Serial()).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    model.train()
    found = decoder(input_ids=ids, use_cache=False, mixing=Serial()).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
