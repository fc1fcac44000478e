"""Gumbel noise as a function of seed, absolute position and token id alone."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise for every token at some positions, float32 [reads, vocabulary].

    ``seeds`` and ``positions`` are int64 [reads]. The noise is counter-based: each number is a
    function of (seed, position, token id) alone. The random bits are integers and the same on every
    device; logarithms are taken in float64, so that devices agree up to a rare last bit of the
    float32 result. All numbers are finite, from about -3.6 to 36.7.

    The bits are those of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014): the token id is the counter of a generator whose state is the mixed
    seed and position.
    """
    tokens = torch.arange(vocabulary, device=seeds.device)
    return noise_of(noise_keys(seeds, positions)[:, None], tokens)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = (30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1)


def _mix(state: Tensor) -> Tensor:
    """Apply SplitMix64's output function in place: a bijection of int64, in wrapping arithmetic."""
    shifted = torch.empty_like(state)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(state, shift, out=shifted)
        shifted &= (1 << (64 - shift)) - 1  # int64 shifts copy the sign
        state ^= shifted
        state *= factor
    return state


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the state of each read's generator: int64 [reads]."""
    return _mix(_mix(seeds + _GOLDEN) + positions)


def noise_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of int64 [n] tokens under keys, [] or [m, 1]: float32 [n] or [m, n]."""
    counters = tokens * _GOLDEN
    if counters.device.type == "cpu":
        rows = [_noise_on_cpu(key, counters.numpy()) for key in keys.reshape(-1).numpy()]
        return torch.from_numpy(np.stack(rows)).reshape(*keys.shape[:-1], len(tokens))
    return _gumbel(_mix(keys + counters))


def _noise_on_cpu(key: np.int64, counters: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the same noise under one key in half of the time: float32 [counters]."""
    bits = (counters + key).view(np.uint64)
    for shift, factor in _ROUNDS:
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor % 2**64)
    uniform = (bits >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    np.negative(np.log(uniform, out=uniform), out=uniform)
    return -np.log(uniform, out=uniform).astype(np.float32)


def _gumbel(bits: Tensor) -> Tensor:
    """Return -log(-log(u)) as float32, with u from the upper 52 of 64 random bits."""
    # The midpoints of 2**52 intervals are exact in float64, so u is neither 0 nor 1.
    uniform = ((bits >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()
