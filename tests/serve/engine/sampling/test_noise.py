from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoding.sampled_rows import DRAWS, SAMPLED, choices, p_value
from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling import noise as module
from mars_serve.engine.sampling.noise import gumbel_noise
from mars_serve.engine.sampling.sampler import SampledRow

# --- noise --------------------------------------------------------------------------------------

WORD = 2**64 - 1


def mixed(state: int) -> int:
    """Return SplitMix64's output, computed with Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 300))
def test_noise_equals_its_definition(seed: int, position: int, token: int) -> None:
    golden = 0x9E3779B97F4A7C15
    key = mixed((mixed((seed + golden) & WORD) + position) & WORD)
    uniform = ((mixed((key + token * golden) & WORD) >> 12) + 0.5) / 2**52
    expected = -math.log(-math.log(uniform))
    found = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), token + 1)[0, token]
    assert found.dtype is torch.float32
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_the_first_outputs_of_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([golden - 2**64, (2 * golden & WORD)])  # of seed 0
    found = [value & WORD for value in module._mix(states).tolist()]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_noise_is_finite_at_the_ends_of_its_range() -> None:
    ends = module._gumbel(torch.tensor([0, 2**63 - 1, -(2**63), -1]))
    assert ends.tolist() == pytest.approx(
        [
            -math.log(53 * math.log(2)),
            -math.log(math.log(2)),
            -math.log(math.log(2)),
            53 * math.log(2),
        ],
        rel=1e-5,
    )


def test_noise_has_the_right_distribution_and_tails() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20), 150_000).flatten().double()
    ordered = noise.sort().values
    count = len(ordered)
    places = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = ((-(-ordered).exp()).exp() - places).abs().max()
    assert distance < 1.63 / math.sqrt(count)  # Kolmogorov-Smirnov at 1%
    for high in (6.0, 8.0, 10.0, 12.0):
        expected = count * -math.expm1(-math.exp(-high))
        assert abs(int((noise > high).sum()) - expected) < 3 * math.sqrt(expected) + 1
    assert len(ordered.unique()) > 0.9 * count


@pytest.mark.parametrize(
    ("seeds", "positions"), [((7, 8), (5, 5)), ((7, 7), (5, 6)), ((0, 1), (1, 0))]
)
def test_neighbouring_seeds_and_positions_are_uncorrelated(
    seeds: tuple[int, int], positions: tuple[int, int]
) -> None:
    first, second = gumbel_noise(torch.tensor(seeds), torch.tensor(positions), 150_000)
    for shift in (-2, -1, 0, 1, 2):
        pair = torch.stack([first, second.roll(shift)]).exp().log1p()  # tames the tails
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 3.5 / math.sqrt(150_000)
    own = torch.stack([first[1:], first[:-1]])
    assert abs(float(torch.corrcoef(own)[0, 1])) < 3.5 / math.sqrt(150_000)


def test_noise_of_one_token_along_positions_and_seeds_is_uncorrelated() -> None:
    many = torch.arange(50_000)
    for seeds, positions in [(many, many * 0), (many * 0, many)]:
        noise = gumbel_noise(seeds, positions, 3).T  # [tokens, places]
        table = torch.cat([noise[:, 1:], noise[:, :-1]])
        strays = torch.corrcoef(table) - torch.eye(6)
        assert float(strays.abs().max()) < 4 / math.sqrt(50_000)


def test_noise_does_not_depend_on_the_other_tokens_of_a_call() -> None:
    seeds, positions = torch.arange(9) * 1000, torch.arange(9) + 4
    together = gumbel_noise(seeds, positions, 700)
    order = torch.tensor([3, 1, 4, 0, 8, 2])
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 700), together[order])
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 13), together[2:3, :13])


# --- distributions ------------------------------------------------------------------------------

SHARES = torch.tensor([0.35, 0.25, 0.17, 0.12, 0.07, 0.037] + [0.0005] * 6)


def draw(sampling: Sampling, along: str) -> list[int]:
    rows = []
    for index in range(DRAWS):
        seed, position = (index, 11) if along == "seeds" else (5, index)
        rows.append(SampledRow(replace(sampling, seed=seed), [index], position, num_output=0))
    return choices(SHARES.log().expand(DRAWS, -1), rows)


def after_top_p(shares: Tensor, top_p: float) -> Tensor:
    above = shares.cumsum(0) - shares  # they are sorted
    return shares * (above < top_p)


DISTRIBUTIONS = {
    "temperature 1": (SAMPLED, SHARES),
    "temperature 0.7": (Sampling(temperature=0.7), SHARES ** (1 / 0.7)),
    "top_k": (Sampling(temperature=1.0, top_k=4), SHARES * (torch.arange(12) < 4)),
    "top_p": (Sampling(temperature=1.0, top_p=0.9), after_top_p(SHARES, 0.9)),
    "min_p": (Sampling(temperature=1.0, min_p=0.12), SHARES * (torch.arange(12) < 5)),
}


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_distribution(name: str, along: str) -> None:
    sampling, shares = DISTRIBUTIONS[name]
    assert p_value(draw(sampling, along), shares) > 0.01


def same_everywhere(keys: Tensor, tokens: Tensor) -> Tensor:
    return module._gumbel(module._mix(keys * 0 + tokens * module._GOLDEN))


def of_8_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    bits = module._mix(keys + tokens * module._GOLDEN) & 255
    return -torch.log(-torch.log((bits + 0.5) / 256))


def seen_by_all_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    return module._gumbel(module._mix(keys + tokens * 0))


@pytest.mark.parametrize("noise", [same_everywhere, of_8_bits, seen_by_all_tokens])
def test_broken_noise_fails_the_same_check(
    noise: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, shares = DISTRIBUTIONS["temperature 1"]
    assert p_value(draw(sampling, "positions"), shares) > 0.01
    monkeypatch.setattr(module, "noise_of", noise)
    assert p_value(draw(sampling, "positions"), shares) < 0.001
