"""Rows to sample from, and the tokens chosen for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling.sampler import SampledRow, bias_of, choose_tokens

VOCABULARY = 24
ENDS = (1, 5)
DRAWS = 20_000
SAMPLED = Sampling(temperature=1.0)
PENALISED = Sampling(
    temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=3
)


def random_logits(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def sampled_row(
    sampling: Sampling, reads: list[int], position: int = 0, **others: object
) -> SampledRow:
    plain = SampledRow(
        sampling, reads, position, num_output=position, end_tokens=torch.tensor(ENDS)
    )
    if sampling.logit_bias:
        plain = replace(plain, bias=bias_of(sampling))
    return replace(plain, **others)  # type: ignore[arg-type]


def choices(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Return the chosen tokens in the order of the rows' reads."""
    tokens = torch.full((len(logits),), -1)
    choose_tokens(logits, tokens, rows)
    found = tokens.tolist()
    assert [read for read, token in enumerate(found) if token >= 0] == sorted(
        read for row in rows for read in row.reads
    )
    return [found[read] for row in rows for read in row.reads]


def repeated_choices(
    logits: Tensor, sampling: Sampling, count: int = 200, **others: object
) -> list[int]:
    """Return the choices from one row of logits at many positions."""
    rows = [sampled_row(sampling, [index], index, **others) for index in range(count)]
    return choices(logits.expand(count, -1), rows)


def p_value(counts: Tensor, shares: Tensor) -> float:
    """Return the p-value of Pearson's chi-square test; rare outcomes are pooled."""
    assert counts[shares == 0].sum() == 0
    expected = shares[shares > 0].double() / shares.double().sum() * counts.sum()
    found, is_rare = counts[shares > 0].double(), expected < 5
    if is_rare.any():
        found = torch.cat([found[~is_rare], found[is_rare].sum()[None]])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def p_value_of_draws(draws: list[int], shares: Tensor) -> float:
    """Return the p-value of tokens that were drawn one by one."""
    return p_value(torch.bincount(torch.tensor(draws), minlength=len(shares)), shares)
