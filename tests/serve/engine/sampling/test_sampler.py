from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

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

from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.sampling import sampler as module
from mars_serve.engine.sampling.sampler import (
    SampledRow,
    TokenHistory,
    choose_tokens,
    gumbel_noise,
    log_probs_of,
)

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


def row_of(sampling: Sampling, reads: list[int], position: int = 0, **others: object) -> SampledRow:
    plain = SampledRow(sampling, reads, position, num_output=position, end_tokens=ENDS)
    return replace(plain, **others)  # type: ignore[arg-type]


def choices(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Tokens in the order of the rows' reads."""
    reads, tokens = choose_tokens(logits, rows)
    assert sorted(reads.tolist()) == sorted(read for row in rows for read in row.reads)
    token_of = dict(zip(reads.tolist(), tokens.tolist(), strict=True))
    return [token_of[read] for row in rows for read in row.reads]


def repeated_choices(
    logits: Tensor, sampling: Sampling, count: int = 200, **others: object
) -> list[int]:
    """Choices from one row of logits at many positions."""
    rows = [row_of(sampling, [index], index, **others) for index in range(count)]
    return choices(logits.expand(count, -1), rows)


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
    """Processed float [vocabulary]."""
    steps = processors(sampling, list(prompt), list(output), allowed)
    return steps(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]


def assert_best(found: list[int], scores: Tensor, sampling: Sampling) -> None:
    """Position by position, the highest sum of score and noise was chosen, up to rounding."""
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
            end_tokens=ENDS,
            history=history,
            allow=None if mask is None else lambda _: mask,
        )
        for index in range(count)
    ]
    found = choices(logits.expand(count, -1), rows)
    assert_best(found, scores, sampling)


ALONE = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=2.5),
    "cold": Sampling(temperature=0.3),
    "top_k": Sampling(temperature=3.0, top_k=5),
    "top_k of one": Sampling(temperature=3.0, top_k=1),
    "top_k beyond all": Sampling(temperature=3.0, top_k=1000),
    "top_p": Sampling(temperature=2.0, top_p=0.7),
    "tiny top_p": Sampling(temperature=2.0, top_p=1e-9),
    "top_p that is 0 in float32": Sampling(temperature=2.0, top_p=1e-60),
    "min_p": Sampling(temperature=3.0, min_p=0.2),
    "min_p of one": Sampling(temperature=3.0, min_p=1.0),
    "repetition": Sampling(temperature=2.0, repetition_penalty=1.7),
    "repetition rewarded": Sampling(temperature=2.0, repetition_penalty=0.5),
    "presence": Sampling(temperature=2.0, presence_penalty=1.5),
    "frequency": Sampling(temperature=2.0, frequency_penalty=-0.8),
    "bias": Sampling(temperature=2.0, logit_bias=((3, 4.0), (7, -100.0), (20, 1.5))),
    "min_tokens": Sampling(temperature=3.0, min_tokens=5),
    "enough tokens": Sampling(temperature=3.0, min_tokens=4),
    "filters": Sampling(temperature=2.5, top_k=12, top_p=0.8, min_p=0.15),
    "all": Sampling(
        temperature=2.0,
        top_k=14,
        top_p=0.9,
        min_p=0.02,
        seed=2**63 - 1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((3, 2.0), (5, 3.0)),
        min_tokens=5,
    ),
}


@pytest.mark.parametrize("sampling", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("grammar", [False, True])
def test_equals_transformers_processors(sampling: Sampling, grammar: bool) -> None:
    allowed = [0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 20, 21] if grammar else None
    for seed in range(5):
        logits = random_logits(seed, VOCABULARY)
        assert_like_transformers(logits, sampling, [2, 3, 3, 4], [4, 6, 6, 6], allowed)


@pytest.mark.parametrize("name", sorted(set(ALONE) - {"greedy", "enough tokens"}))
def test_every_parameter_of_these_cases_has_an_effect(name: str) -> None:
    logits = random_logits(0, VOCABULARY)
    logits[list(ENDS)] += 4.0  # so that min_tokens matters
    neutral = Sampling(temperature=ALONE[name].temperature and 1.0)
    history = TokenHistory.of([2, 3, 3, 4, int(logits.argmax()), 6, 6, 6], 4)
    if name == "top_k beyond all":
        neutral = Sampling(temperature=3.0)
    found = [
        repeated_choices(logits, sampling, history=history, num_output=4)
        for sampling in (ALONE[name], neutral)
    ]
    assert (found[0] == found[1]) == (name == "top_k beyond all")


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    tokens = st.integers(0, VOCABULARY - 1)
    biases = draw(st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=4))
    penalties = st.sampled_from([0.0, 0.0, 0.5, -0.7, 2.0])
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0, 20.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 10, 23, 24, 100])),
        top_p=draw(st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.95, 1.0, 1.0])),
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


@settings(deadline=None, max_examples=150)
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


@settings(deadline=None, max_examples=100)
@given(samplings(), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 2.0]), st.booleans())
def test_few_candidates_choose_as_the_whole_vocabulary_does(
    sampling: Sampling, seed: int, scale: float, coarse: bool
) -> None:
    logits = random_logits(seed, VOCABULARY, scale=scale)
    logits = logits.round() if coarse else logits
    if seed % 3 == 0:
        logits[1 + seed % 20 :] = -torch.inf
    history = TokenHistory.of([2, 3], 1)
    found = []
    for candidates in [(VOCABULARY,), (4, 9)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_NUM_CANDIDATES", candidates)
            found.append(repeated_choices(logits, sampling, 30, history=history))
    assert found[0] == found[1]


# --- penalties ----------------------------------------------------------------------------------


def penalised(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> int:
    """Greedy choice in plain Python."""
    scores = list(logits)
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(output):
        scores[token] -= sampling.presence_penalty
        scores[token] -= sampling.frequency_penalty * output.count(token)
    return max(range(len(scores)), key=lambda token: scores[token])


@settings(deadline=None)
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
    row = SampledRow(sampling, list(range(depths)), 9, len(output), (), history)
    expected = list(output)
    for depth in range(depths):
        expected.append(penalised(logits[depth].tolist(), sampling, prompt, expected))
    assert choices(logits, [row]) == expected[len(output) :]
    assert history.counts == Counter(output)  # left as it was


def test_a_history_grows_as_one_that_is_built_anew() -> None:
    tokens = [3, 4, 3, 9, 9, 2, 3]
    grown = TokenHistory.of(tokens[:4], 3)
    twin = grown.copy()
    grown.extend(tokens[4:])
    built = TokenHistory.of(tokens, 3)
    assert grown.counts == built.counts == {9: 2, 2: 1, 3: 1}
    assert grown.prompt.tolist() == built.prompt.tolist() == [3, 4]
    assert twin.counts == {9: 1}


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
            row_of(replace(sampling, seed=index), reads, 10 + index, num_output=1, history=history)
        )
    plain = row_of(SAMPLED, [17, 18, 19], 3)  # reads that the last row left
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


def test_min_tokens_counts_the_depths_before() -> None:
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5] = 3.0  # an end token
    logits[:, 8] = 2.0
    row = row_of(Sampling(min_tokens=4), list(range(6)), num_output=1)
    assert choices(logits, [row]) == [8, 8, 8, 5, 5, 5]


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
    row = row_of(Sampling(temperature=1.0, top_k=3), [0, 1, 2, 3, 4], allow=allow)
    assert choices(logits, [row]) == [4, 5, 6, 20, 21]
    assert seen == [[], [4], [4, 5], [4, 5, 6], [4, 5, 6, 20]]


def test_rows_with_and_without_grammars_share_a_step() -> None:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[[10, 12]] = True
    logits = random_logits(3, 6, VOCABULARY)
    rows = [
        row_of(Sampling(), [0, 3]),
        row_of(Sampling(), [2, 1], allow=lambda _: mask),
        row_of(Sampling(), [5], allow=lambda _: mask),
        row_of(Sampling(), [4]),
    ]
    raw = logits.argmax(-1).tolist()
    among = (10 + 2 * (logits[:, 12] > logits[:, 10]).long()).tolist()
    assert choices(logits, rows) == [raw[0], raw[3], among[2], among[1], among[5], raw[4]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_where_masks_leave_nothing_the_likeliest_token_is_chosen(
    temperature: float, top_k: int
) -> None:
    logits = random_logits(0, 3, VOCABULARY)
    logits[1] = -torch.inf
    logits[1, [1, 5]] = torch.tensor([0.5, 1.0])  # end tokens alone
    sampling = Sampling(temperature=temperature, top_k=top_k, min_tokens=9)
    nothing = torch.zeros(VOCABULARY, dtype=torch.bool)
    rows = [
        row_of(sampling, [0], allow=lambda _: nothing),
        row_of(sampling, [1]),
        row_of(sampling, [2], allow=lambda _: ~nothing),
    ]
    first, second, third = choices(logits, rows)
    assert (first, second) == (int(logits[0].argmax()), 5)
    assert third == choices(logits, [row_of(sampling, [2])])[0]


# --- noise --------------------------------------------------------------------------------------

WORD = 2**64 - 1


def mixed(state: int) -> int:
    """SplitMix64's output function in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 300))
def test_noise_is_what_its_definition_says(seed: int, position: int, token: int) -> None:
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


def test_noise_does_not_depend_on_what_it_is_made_with() -> None:
    seeds, positions = torch.arange(9) * 1000, torch.arange(9) + 4
    together = gumbel_noise(seeds, positions, 700)
    order = torch.tensor([3, 1, 4, 0, 8, 2])
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 700), together[order])
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 13), together[2:3, :13])


# --- distributions ------------------------------------------------------------------------------

SHARES = torch.tensor([0.35, 0.25, 0.17, 0.12, 0.07, 0.037] + [0.0005] * 6)


def p_value(draws: list[int], shares: Tensor) -> float:
    """Return the p-value of Pearson's chi-square test."""
    counts = torch.bincount(torch.tensor(draws), minlength=len(shares)).double()
    expected = shares.double() / shares.double().sum() * len(draws)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


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
    monkeypatch.setattr(module, "_noise", noise)
    assert p_value(draw(sampling, "positions"), shares) < 0.001


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
        rows.append(row_of(kinds[index % len(kinds)], reads, 20 + index, history=history))
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
def test_logits_of_any_type_are_left_alone(dtype: torch.dtype) -> None:
    logits = random_logits(12, 60, VOCABULARY).to(dtype)
    before = logits.clone()
    rows = mixed_rows(logits)
    found = choices(logits, rows)
    assert torch.equal(logits, before)
    assert found == choices(logits.float(), rows)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, [7, 3, 20]] = 2.0
    assert choices(logits, [row_of(Sampling(logit_bias=((9, 1.0),)), [0, 1])]) == [9, 3]
    assert choices(logits, [row_of(Sampling(top_k=2, top_p=0.1), [0, 1])]) == [0, 3]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_next_to_no_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = random_logits(4, 50, VOCABULARY)
    sampling = Sampling(temperature=temperature, top_p=top_p)
    found = choices(logits, [row_of(sampling, list(range(50)))])
    assert found == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_hot_row_is_uniform_over_what_is_possible(temperature: float) -> None:
    logits = random_logits(4, VOCABULARY, scale=5.0)
    logits[[3, 8]] = -torch.inf
    reads = list(range(DRAWS))
    found = choices(logits.expand(DRAWS, -1), [row_of(Sampling(temperature=temperature), reads)])
    assert p_value(found, (logits > -torch.inf).float()) > 0.01


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
    found = choices(logits, [row_of(sampling, [0, 1, 2, 3])])
    assert found[:2] == [6, 7]
    assert found[3] in (8, 9)


@pytest.mark.parametrize("name", ["greedy", "temperature", "filters", "all"])
def test_a_row_without_numbers_gets_a_valid_token_and_harms_no_other(name: str) -> None:
    logits = random_logits(4, 6, 600)
    history = TokenHistory.of([3, 4], 1)
    rows = [row_of(ALONE[name], [read], history=history) for read in range(6)]
    expected = choices(logits, rows)
    logits[2] = torch.nan
    logits[4, 17] = torch.nan
    found = choices(logits, rows)
    assert all(0 <= token < 600 for token in found)
    assert [found[read] for read in (0, 1, 3, 5)] == [expected[read] for read in (0, 1, 3, 5)]


def test_no_rows_no_choices() -> None:
    reads, tokens = choose_tokens(torch.zeros(2, VOCABULARY), [])
    assert reads.shape == tokens.shape == (0,)
    assert reads.dtype == tokens.dtype == torch.long


# --- log-probabilities --------------------------------------------------------------------------


@settings(deadline=None)
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
