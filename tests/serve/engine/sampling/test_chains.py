from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoding.sampled_rows import (
    PENALISED,
    SAMPLED,
    VOCABULARY,
    choices,
    random_logits,
    sampled_row,
)
from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling.sampler import SampledRow, TokenHistory

# --- penalties ----------------------------------------------------------------------------------


def penalised(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> int:
    """Choose greedily, in plain Python."""
    scores = list(logits)
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(output):
        scores[token] -= sampling.presence_penalty
        scores[token] -= sampling.frequency_penalty * output.count(token)
    return max(range(len(scores)), key=lambda token: scores[token])


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from([0.0, 1.0, -1.0]),
    st.sampled_from([0.0, 0.5, -0.25]),
    st.integers(1, 5),
)
def test_penalties_of_a_chain_equal_plain_python(
    seed: int, repetition: float, presence: float, frequency: float, depths: int
) -> None:
    sampling = Sampling(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    source = random.Random(seed)
    prompt = [source.randrange(VOCABULARY) for _ in range(3)]
    output = [source.randrange(VOCABULARY) for _ in range(source.randrange(6))]
    logits = random_logits(seed, depths, VOCABULARY, scale=1.0)
    history = TokenHistory.of(prompt + output, len(prompt))
    row = SampledRow(sampling, list(range(depths)), 9, len(output), None, history)
    expected = list(output)
    for depth in range(depths):
        expected.append(penalised(logits[depth].tolist(), sampling, prompt, expected))
    assert choices(logits, [row]) == expected[len(output) :]
    tokens, times = (each.tolist() for each in history.output())
    assert dict(zip(tokens, times, strict=True)) == Counter(output)  # left as it was


# --- rows that wait for their own choices -------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [PENALISED, replace(PENALISED, top_k=6, top_p=0.9, min_tokens=7)]
)
def test_depth_by_depth_equals_one_depth_at_a_time(sampling: Sampling) -> None:
    depths, num_rows = 5, 4
    logits = random_logits(1, num_rows * depths, VOCABULARY)
    rows = []
    for index in range(num_rows):
        reads = list(range(index * depths, (index + 1) * depths))[: depths - index]
        history = TokenHistory.of([2, 3, 4 + index, 8], 3)
        rows.append(
            sampled_row(
                replace(sampling, seed=index), reads, 10 + index, num_output=1, history=history
            )
        )
    plain = sampled_row(SAMPLED, [17, 18, 19], 3)  # reads that the last row left
    together = choices(logits, [*rows[:2], plain, *rows[2:]])

    apart = []
    for row in rows:
        history = row.history.copy()
        for depth, read in enumerate(row.reads):
            single = replace(
                row,
                reads=[read],
                position=row.position + depth,
                num_output=row.num_output + depth,
                history=history,
            )
            apart += choices(logits, [single])
            history.extend(apart[-1:])
    by_plain = choices(logits, [plain])
    split = len(rows[0].reads) + len(rows[1].reads)
    assert together == [*apart[:split], *by_plain, *apart[split:]]


def test_a_grammar_sees_what_was_chosen_before() -> None:
    seen = []

    def allow(tokens: list[int]) -> Tensor | None:
        seen.append(tokens)
        if len(tokens) == 3:
            return None
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[tokens[-1] + 1 if tokens else 4] = True  # each time the token after the last
        return mask

    logits = random_logits(0, 5, VOCABULARY)
    logits[3, 20] = 50.0
    row = sampled_row(Sampling(temperature=1.0, top_k=3), [0, 1, 2, 3, 4], allow=allow)
    assert choices(logits, [row]) == [4, 5, 6, 20, 21]
    assert seen == [[], [4], [4, 5], [4, 5, 6], [4, 5, 6, 20]]


def test_rows_with_and_without_grammars_share_a_step() -> None:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[[10, 12]] = True
    logits = random_logits(3, 6, VOCABULARY)
    rows = [
        sampled_row(Sampling(), [0, 3]),
        sampled_row(Sampling(), [2, 1], allow=lambda _: mask),
        sampled_row(Sampling(), [5], allow=lambda _: mask),
        sampled_row(Sampling(), [4]),
    ]
    raw = logits.argmax(-1).tolist()
    among = (10 + 2 * (logits[:, 12] > logits[:, 10]).long()).tolist()
    assert choices(logits, rows) == [raw[0], raw[3], among[2], among[1], among[5], raw[4]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_likeliest_token_is_chosen_if_a_grammar_leaves_none(
    temperature: float, top_k: int
) -> None:
    logits = random_logits(0, 3, VOCABULARY)
    logits[1] = -torch.inf
    logits[1, [1, 5]] = torch.tensor([0.5, 1.0])  # end tokens alone
    sampling = Sampling(temperature=temperature, top_k=top_k, min_tokens=9)
    nothing = torch.zeros(VOCABULARY, dtype=torch.bool)
    rows = [
        sampled_row(sampling, [0], allow=lambda _: nothing),
        sampled_row(sampling, [1]),
        sampled_row(sampling, [2], allow=lambda _: ~nothing),
    ]
    first, second, third = choices(logits, rows)
    assert (first, second) == (int(logits[0].argmax()), 5)
    assert third == choices(logits, [sampled_row(sampling, [2])])[0]
