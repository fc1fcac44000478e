from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.sampled_rows import (
    DRAWS,
    ENDS,
    PENALISED,
    SAMPLED,
    VOCABULARY,
    choices,
    p_value_of_draws,
    random_logits,
    repeated_choices,
    sampled_row,
)
from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling import sampler as module
from mars_serve.engine.sampling.sampler import (
    SampledRow,
    TokenHistory,
    bias_of,
    gumbel_noise,
    log_probs_of,
)

# --- transformers' own processors ---------------------------------------------------------------


def processors(
    sampling: Sampling, prompt: list[int], output: list[int], allowed: list[int] | None
) -> LogitsProcessorList:
    """Return transformers' own processors in the order of `generate`, except the bias."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))

    def openai(_: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(output).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            scores[0, token] -= penalty
        return scores

    steps.append(openai)
    if sampling.logit_bias:
        bias = {(token,): value for token, value in sampling.logit_bias}
        steps.append(SequenceBiasLogitsProcessor(bias))
    if sampling.min_tokens:
        ends = MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, list(ENDS))
        steps.append(ends)
    if allowed is not None:
        steps.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if sampling.temperature > 0.0:
        steps += warpers(sampling)
    return steps


def warpers(sampling: Sampling) -> list[object]:
    steps: list[object] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps


def transformers_scores(
    logits: Tensor,
    sampling: Sampling,
    prompt: Sequence[int] = (2,),
    output: Sequence[int] = (),
    allowed: list[int] | None = None,
) -> Tensor:
    """Return the processed logits: float [vocabulary]."""
    steps = processors(sampling, list(prompt), list(output), allowed)
    return steps(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]


def assert_best(found: list[int], scores: Tensor, sampling: Sampling) -> None:
    """Check that each position's choice has the highest sum of score and noise, up to rounding."""
    noise = torch.zeros(len(found), len(scores))
    if sampling.temperature > 0.0:
        seeds = torch.full((len(found),), sampling.seed)
        noise = gumbel_noise(seeds, torch.arange(len(found)), len(scores))
    noisy = scores + noise
    missed = noisy.max(-1).values - noisy[torch.arange(len(found)), found]
    assert float(missed.max()) < 1e-4


def assert_like_transformers(
    logits: Tensor,
    sampling: Sampling,
    prompt: Sequence[int] = (2,),
    output: Sequence[int] = (),
    allowed: list[int] | None = None,
    count: int = 200,
) -> None:
    scores = transformers_scores(logits, sampling, prompt, output, allowed)
    mask = None
    if allowed is not None:
        mask = torch.zeros(len(logits), dtype=torch.bool)
        mask[allowed] = True
    history = TokenHistory.of([*prompt, *output], len(prompt))
    rows = [
        SampledRow(
            sampling,
            [index],
            index,
            num_output=len(output),
            end_tokens=torch.tensor(ENDS),
            history=history,
            bias=bias_of(sampling) if sampling.logit_bias else None,
            allow=None if mask is None else lambda _: mask,
        )
        for index in range(count)
    ]
    found = choices(logits.expand(count, -1), rows)
    assert_best(found, scores, sampling)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    tokens = st.integers(0, VOCABULARY - 1)
    quarters = st.integers(-20, 20).map(lambda number: number / 4)  # no near-ties with 0
    biases = draw(st.dictionaries(tokens, quarters, max_size=4))
    penalties = st.sampled_from([0.0, 0.0, 0.5, -0.7, 2.0])
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0, 20.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 10, 23, 24, 100])),
        top_p=draw(st.sampled_from([1e-60, 1e-9, 0.05, 0.31, 0.5, 0.77, 0.95, 1.0, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.61, 1.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.6, 1.1, 2.0])),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        logit_bias=tuple(biases.items()),
        min_tokens=draw(st.integers(0, 6)),
    )


def is_clear_cut(logits: Tensor, sampling: Sampling, *context: object) -> bool:
    """Whether neither rounding nor the order of equals decides about a filter's last token."""
    if sampling.temperature == 0.0:
        return True
    before = replace(sampling, top_p=1.0, min_p=0.0)
    shares = transformers_scores(logits.double(), before, *context).softmax(-1)  # type: ignore[arg-type]
    ascending = shares.sort().values
    from_below = ascending.cumsum(-1) - (1 - sampling.top_p)
    by_peak = shares / shares.max() - sampling.min_p
    edges = torch.cat([from_below[:-1], by_peak[(shares > 0) & (shares < shares.max())]])
    num_cut = int((from_below[:-1] <= 0).sum())
    is_tie = (
        sampling.top_p < 1.0
        and num_cut > 0
        and ascending[num_cut] < (ascending[num_cut - 1] + 1e-6)
    )
    return bool((edges.abs() > 1e-4).all()) and not is_tie


@settings(max_examples=150)
@given(
    samplings(),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 2.0, 8.0]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
    st.none() | st.sets(st.integers(6, VOCABULARY - 1), min_size=1).map(sorted),
    st.booleans(),
)
def test_equals_transformers_processors_in_all_combinations(
    sampling: Sampling,
    seed: int,
    scale: float,
    prompt: list[int],
    output: list[int],
    allowed: list[int] | None,
    coarse: bool,
) -> None:
    logits = random_logits(seed, VOCABULARY, scale=scale)
    if coarse:
        logits = (logits * 2).round() / 2  # ties
    logits[[0, 9]] = -torch.inf
    logits[10] = 0.25  # allowed or not, something is left of each mask
    allowed = None if allowed is None else sorted({*allowed, 10})
    if is_clear_cut(logits, sampling, prompt, output, allowed):
        assert_like_transformers(logits, sampling, prompt, output, allowed, count=40)


@pytest.mark.parametrize("top_p", [0.05, 0.31, 0.62, 0.9])
def test_top_p_keeps_as_many_equals_as_transformers(top_p: float) -> None:
    logits = torch.zeros(20)
    logits[[4, 9, 12]] = 1.0
    for first in (logits, logits * 0):
        sampling = Sampling(temperature=1.0, top_p=top_p)
        kept = transformers_scores(first, sampling) > -torch.inf
        order = sorted(range(20), key=lambda token: (-float(first[token]), token))
        found = repeated_choices(first, sampling, 2000)
        assert set(found) == set(order[: int(kept.sum())])


@pytest.mark.parametrize("limit", [{"top_k": 2}, {"min_p": 0.5}, {"min_p": 1.0}])
def test_top_k_and_min_p_keep_all_equals(limit: dict[str, float]) -> None:
    logits = torch.full((20,), -3.0)
    logits[[4, 9, 12, 13]] = 1.0
    sampling = replace(SAMPLED, **limit)  # type: ignore[arg-type]
    kept = transformers_scores(logits, sampling) > -torch.inf
    assert kept.nonzero()[:, 0].tolist() == [4, 9, 12, 13]
    assert set(repeated_choices(logits, sampling)) == {4, 9, 12, 13}


@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_p=0.999),
        Sampling(temperature=1.0, top_k=511),
        Sampling(temperature=1.0, top_k=513),
        Sampling(temperature=1.0, top_k=900, top_p=0.6),
        Sampling(temperature=1.0, min_p=0.003),
        Sampling(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01),
    ],
)
def test_a_large_vocabulary_equals_transformers(sampling: Sampling, scale: float) -> None:
    logits = random_logits(7, 9000, scale=scale)
    if sampling.top_p == 0.6:
        logits = logits.bfloat16().float()  # with ties
    # transformers in float64: its sums run over the whole tail first
    scores = transformers_scores(logits.double(), sampling)
    assert_best(repeated_choices(logits, sampling, 50), scores, sampling)


def kept_by_sorting(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the tokens that filters keep: bool [vocabulary], by sorting scores that peak at 0."""
    ids = scores.sort(descending=True, stable=True).indices  # the lowest id first among equals
    values = scores[ids]
    is_kept = values >= values[(min(sampling.top_k, len(ids)) or len(ids)) - 1]
    if 0 < sampling.top_k < len(ids):
        scores = scores.masked_fill(scores < values[sampling.top_k - 1], -torch.inf)
    above = torch.cat([torch.zeros(1), scores.double().softmax(-1)[ids].cumsum(-1).float()[:-1]])
    if sampling.top_p < 1.0:
        is_kept &= above < torch.tensor(sampling.top_p, dtype=torch.float32)
    is_kept &= values.double().exp() >= sampling.min_p
    is_kept[0] = True
    return torch.zeros(len(ids), dtype=torch.bool).index_put_((ids[is_kept],), torch.tensor(True))


@settings(max_examples=100)
@given(
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.2, 1.0, 3.0, 20.0]),
        top_k=st.sampled_from([0, 1, 3, 60, 99, 100, 2000]),
        top_p=st.sampled_from([1e-60, 1e-9, 0.05, 0.31, 0.5, 0.77, 0.95, 0.999, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.61, 1.0]),
        seed=st.integers(0, 2**63 - 1),
    ),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    st.booleans(),
    st.sampled_from([1, 4, 100]),
)
def test_filters_keep_what_sorting_keeps(
    sampling: Sampling, seed: int, scale: float, coarse: bool, candidates: int
) -> None:
    logits = random_logits(seed, 100, scale=scale)
    logits = (logits * 4).round() / 4 if coarse else logits
    if seed % 3 == 0:
        logits[1 + seed % 60 :] = -torch.inf
    scores = (logits - logits.max()) / torch.tensor(sampling.temperature, dtype=torch.float32)
    noise = gumbel_noise(torch.full((8,), sampling.seed), torch.arange(8), 100)
    kept = kept_by_sorting(scores, sampling)
    wanted = (scores + noise).masked_fill(~kept, -torch.inf).max(-1).indices.tolist()
    for on_cpu in (module._best_kept_on_cpu, module._best_kept):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_NUM_CANDIDATES", candidates)
            patch.setattr(module, "_best_kept_on_cpu", on_cpu)
            assert repeated_choices(logits, sampling, 8) == wanted


def test_filters_of_flat_logits_sort_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, sort = [0], np.sort

    def counted(table: np.ndarray) -> np.ndarray:
        lengths.append(table.shape[-1])
        return sort(table)

    monkeypatch.setattr(np, "sort", counted)
    logits = random_logits(3, 1, 9000, scale=0.01)
    choices(logits, [sampled_row(replace(SAMPLED, top_p=0.9, min_p=0.5), [0])])
    assert max(lengths) <= 1000


@pytest.mark.parametrize(
    "limit", [{"top_p": 0.9}, {"top_k": 100_000}, {"min_p": 0.99}, {"top_p": 0.5, "min_p": 0.5}]
)
def test_filters_of_flat_logits_take_a_few_times_as_long_as_none(limit: dict[str, float]) -> None:
    logits = random_logits(3, 1, 150_000, scale=0.01)

    def least_s(sampling: Sampling) -> float:
        taken = []
        for position in range(5):
            begin = time.thread_time()
            choices(logits, [sampled_row(sampling, [0], position)])
            taken.append(time.thread_time() - begin)
        return min(taken)

    assert least_s(replace(SAMPLED, **limit)) < 6 * least_s(SAMPLED)  # type: ignore[arg-type]


# --- batches, types and extremes ----------------------------------------------------------------


def mixed_rows(logits: Tensor) -> list[SampledRow]:
    """Rows of all kinds over all reads, some of them chains."""
    kinds = [
        Sampling(),
        SAMPLED,
        PENALISED,
        Sampling(temperature=1.5, top_p=0.8, seed=4),
        Sampling(temperature=0.8, top_k=4, frequency_penalty=0.5, logit_bias=((3, 2.0),)),
        Sampling(min_tokens=30),
    ]
    rows, read = [], 0
    while read < len(logits):
        index = len(rows)
        reads = list(range(read, min(len(logits), read + 1 + index % 4)))
        history = TokenHistory.of([2, 3, 4 + index % 5], 2)
        rows.append(sampled_row(kinds[index % len(kinds)], reads, 20 + index, history=history))
        read += len(reads)
    return rows


@pytest.mark.parametrize("most", [1, 3 * VOCABULARY, 2**17])
def test_a_choice_does_not_depend_on_neighbours_order_or_parts(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(11, 60, VOCABULARY)
    rows = mixed_rows(logits)
    alone = [choices(logits, [row]) for row in rows]
    monkeypatch.setattr(module, "_MAX_PART_CPU", most)
    shuffled = list(enumerate(rows))
    random.Random(0).shuffle(shuffled)
    found = choices(logits, [row for _, row in shuffled])
    assert found == [token for index, _ in shuffled for token in alone[index]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_type_are_not_modified(dtype: torch.dtype) -> None:
    logits = random_logits(12, 60, VOCABULARY).to(dtype)
    before = logits.clone()
    rows = mixed_rows(logits)
    found = choices(logits, rows)
    assert torch.equal(logits, before)
    assert found == choices(logits.float(), rows)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, [7, 3, 20]] = 2.0
    assert choices(logits, [sampled_row(Sampling(logit_bias=((9, 1.0),)), [0, 1])]) == [9, 3]
    assert choices(logits, [sampled_row(Sampling(top_k=2, top_p=0.1), [0, 1])]) == [0, 3]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = random_logits(4, 50, VOCABULARY)
    sampling = Sampling(temperature=temperature, top_p=top_p)
    found = choices(logits, [sampled_row(sampling, list(range(50)))])
    assert found == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_hot_row_is_uniform_over_what_is_possible(temperature: float) -> None:
    logits = random_logits(4, VOCABULARY, scale=5.0)
    logits[[3, 8]] = -torch.inf
    reads = list(range(DRAWS))
    found = choices(
        logits.expand(DRAWS, -1), [sampled_row(Sampling(temperature=temperature), reads)]
    )
    assert p_value_of_draws(found, (logits > -torch.inf).float()) > 0.01


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, Sampling(temperature=0.01, top_k=3), Sampling(temperature=5.0, top_p=0.9, min_p=0.1)],
)
def test_extreme_logits(sampling: Sampling) -> None:
    most = torch.finfo(torch.float32).max
    logits = torch.full((4, VOCABULARY), -torch.inf)
    logits[0] = -most
    logits[0, 6] = most
    logits[1, 7] = -most  # all others impossible
    logits[2] = most
    logits[3, [8, 9]] = torch.tensor([1e30, 1e30])
    found = choices(logits, [sampled_row(sampling, [0, 1, 2, 3])])
    assert found[:2] == [6, 7]
    assert found[3] in (8, 9)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=2.5, top_k=12, top_p=0.8, min_p=0.15),
        replace(PENALISED, logit_bias=((3, 2.0), (5, 3.0)), min_tokens=5),
    ],
)
def test_a_row_of_nans_gets_a_valid_token_and_leaves_other_rows_alone(sampling: Sampling) -> None:
    logits = random_logits(4, 6, 600)
    history = TokenHistory.of([3, 4], 1)
    rows = [sampled_row(sampling, [read], history=history) for read in range(6)]
    expected = choices(logits, rows)
    logits[2] = torch.nan
    logits[4, 17] = torch.nan
    found = choices(logits, rows)
    assert all(0 <= token < 600 for token in found)
    assert [found[read] for read in (0, 1, 3, 5)] == [expected[read] for read in (0, 1, 3, 5)]


# --- log-probabilities --------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(0, VOCABULARY), st.sampled_from([0.0, 0.5, 4.0]))
def test_log_probs_are_ordered_by_number_then_id(seed: int, num_top: int, scale: float) -> None:
    logits = random_logits(seed, 3, VOCABULARY, scale=scale).round()
    logits[1, 4] = -torch.inf
    table = logits.log_softmax(-1)
    tokens = torch.tensor([0, 4, 7])
    own, top, of_top = log_probs_of(table, tokens, num_top)
    assert own.tolist() == [float(table[row, token]) for row, token in enumerate(tokens)]
    for row in range(3):
        order = sorted(range(VOCABULARY), key=lambda token: (-float(table[row, token]), token))
        assert top[row].tolist() == order[:num_top]
        assert of_top[row].tolist() == table[row, order[:num_top]].tolist()


def test_log_probs_take_both_zeros_for_the_same() -> None:
    table = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert log_probs_of(table, torch.tensor([1]), 3)[1].tolist() == [[1, 2, 3]]
