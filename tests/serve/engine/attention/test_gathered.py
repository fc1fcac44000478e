"""Attention in bfloat16 by several matrix products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mars_serve.engine.attention.gathered import _split_attention


def step_of_decoding(largest: float) -> tuple[Tensor, ...]:
    """Queries, keys, values and bias of three rows with two positions each, the last keys hidden,
    and scores of up to about ``largest``.
    """
    source = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(3, 2, count, 64, generator=source).bfloat16() for count in (4, 300, 300)
    )
    bias = torch.zeros(3, 1, 4, 300)
    bias[..., 280:] = -torch.inf
    most = (queries.float() @ keys.float().mT).abs().max()
    return (queries * (largest / most)).bfloat16(), keys, values, bias.bfloat16()


@pytest.mark.parametrize("largest", [1.0, 30.0, 100.0])
def test_split_products_round_large_scores_as_little_as_the_fused_call(largest: float) -> None:
    queries, keys, values, bias = step_of_decoding(largest)
    truth = F.scaled_dot_product_attention(
        *(part.double() for part in (queries, keys, values)), attn_mask=bias.double(), scale=1.0
    )
    found = _split_attention(queries, keys, values, bias, 1.0)
    assert found.dtype == torch.bfloat16
    fused = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
    error, usual = ((each.double() - truth).abs().max() for each in (found, fused))
    assert error < 2 * usual  # weights, too, are rounded to 8 bits
