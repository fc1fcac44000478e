"""Tokens that must not be chosen stay so whatever parameters and logits do to the scores."""

from __future__ import annotations

import pytest
import torch

from decoding.sampled_rows import ENDS, VOCABULARY, choices, random_logits, sampled_row
from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling.sampler import TokenHistory

BANNED, FORBIDDEN = [2, 9], [3, 4]
ALLOWED = set(range(VOCABULARY)) - {*BANNED, *FORBIDDEN, *ENDS}
HISTORY = TokenHistory.of([*range(VOCABULARY), *BANNED, *ENDS], VOCABULARY)
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "hardly sampled": {"temperature": 1e-37},
    "filtered": {"temperature": 0.8, "top_k": 5, "top_p": 1e-46, "min_p": 1e-46},
}
EXTREMES = {
    "none": {},
    # 0 and infinity as float32, and numbers that are neither but overflow what they touch
    "factor 1e-46": {"repetition_penalty": 1e-46},
    "factor 1e-38": {"repetition_penalty": 1e-38},
    "factor 1e38": {"repetition_penalty": 1e38},
    "factor 1e300": {"repetition_penalty": 1e300},
    "infinite bias": {"logit_bias": tuple((token, float("inf")) for token in range(VOCABULARY))},
    "NaN bias": {"logit_bias": tuple((token, float("nan")) for token in range(VOCABULARY))},
    "infinite penalty": {"presence_penalty": -float("inf"), "frequency_penalty": 1e300},
}
LOGITS = {"usual": None, "a NaN": torch.nan, "infinite": torch.inf, "all NaN": torch.nan}


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_banned_token_is_chosen(kind: str, extreme: str, logits: str) -> None:
    scores = random_logits(1, 8, VOCABULARY)
    if logits == "all NaN":
        scores[:] = torch.nan
    elif LOGITS[logits] is not None:
        scores[:, [0, 12]] = LOGITS[logits]
    scores[:, BANNED] = -torch.inf
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    allowed[FORBIDDEN] = False
    sampling = Sampling(min_tokens=20, **KINDS[kind], **EXTREMES[extreme])  # type: ignore[arg-type]
    rows = [
        sampled_row(sampling, [read], position=read, history=HISTORY, allow=lambda _: allowed)
        for read in range(8)
    ]
    assert ALLOWED.issuperset(choices(scores, rows))
