from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decoding.sampled_rows import DRAWS, SAMPLED, choices, p_value_of_draws
from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling import noise as module
from mars_serve.engine.sampling.noise import gumbel_noise, noise_of
from mars_serve.engine.sampling.sampler import SampledRow

# --- noise --------------------------------------------------------------------------------------

KNOWN = [-0.4662735, 1.8643590, 0.3412385, 0.8503078, -1.2335415, -0.7780361]


def test_noise_stays_the_same_so_that_seeds_repeat_outputs() -> None:
    seeds, positions = torch.tensor([0, 7, 2**63 - 1]), torch.tensor([0, 2**40, 5])
    found = gumbel_noise(seeds, positions, 300)[:, [0, 299]]
    assert found.dtype is torch.float32
    assert found.flatten().tolist() == pytest.approx(KNOWN, rel=1e-6)


def test_noise_is_finite_whatever_the_bits_are() -> None:
    assert module._gumbel(torch.tensor([0, 2**63 - 1, -(2**63), -1])).isfinite().all()


def test_noise_on_a_cpu_is_that_of_other_devices() -> None:
    keys, tokens = torch.tensor([-(2**63), -7, 0, 5, 2**63 - 1]), torch.arange(20_000)
    elsewhere = module._gumbel(module._mix(keys[:, None] + tokens * module._GOLDEN))
    torch.testing.assert_close(noise_of(keys[:, None], tokens), elsewhere, rtol=3e-7, atol=3e-7)


def test_noise_has_the_right_distribution_and_tails() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20), 25_000).flatten().double()
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
    logits = SHARES.log().expand(DRAWS, -1)
    if along == "positions":
        return choices(logits, [SampledRow(replace(sampling, seed=5), list(range(DRAWS)), 0, 0)])
    rows = [SampledRow(replace(sampling, seed=seed), [seed], 11, 0) for seed in range(DRAWS)]
    return choices(logits, rows)


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


@pytest.mark.parametrize(
    ("name", "along"), [("top_p", "seeds"), *((name, "positions") for name in DISTRIBUTIONS)]
)
def test_draws_follow_the_distribution(name: str, along: str) -> None:
    sampling, shares = DISTRIBUTIONS[name]
    assert p_value_of_draws(draw(sampling, along), shares) > 0.01


def same_everywhere(keys: Tensor, tokens: Tensor) -> Tensor:
    return noise_of(keys * 0, tokens)


def without_tail(keys: Tensor, tokens: Tensor) -> Tensor:
    return noise_of(keys, tokens).clamp(max=2.0)


def seen_by_all_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    return noise_of(keys, tokens * 0)


@pytest.mark.parametrize("noise", [same_everywhere, without_tail, seen_by_all_tokens])
def test_broken_noise_fails_the_same_check(
    noise: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, shares = DISTRIBUTIONS["temperature 1"]
    monkeypatch.setattr(module, "noise_of", noise)
    assert p_value_of_draws(draw(sampling, "positions"), shares) < 0.001
