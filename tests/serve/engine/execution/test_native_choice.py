"""Tokens chosen by functions of C++: by sampling, and drafts by a head behind the token before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from decoding.adapters import with_random_head
from decoding.engine_requests import PROMPT, make_request, make_row
from decoding.engines import passes_of, run
from decoding.sampled_rows import choices, random_logits
from decoding.tiny_models import build_model
from mars_platform.checkpoint.adapter.draft_head import NUM_CANDIDATES, DraftHead
from mars_platform.checkpoint.calibration import Calibration, DepthCalibration
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import DraftHeadSettings, MarsMetadata
from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.native_choice import NativeChoice
from mars_serve.engine.execution.proposals import build_reads, unpack
from mars_serve.engine.kernels.native import LANES, native_for
from mars_serve.engine.request import Draft, LoraReference, Request
from mars_serve.engine.sampling.sampler import SampledRow
from mars_serve.engine.settings import EngineSettings

BANNED = torch.tensor([0, 7])
SPECIAL = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset(BANNED.tolist()))
KINDS = [DraftHeadSettings(rank=5), DraftHeadSettings(rank=5, kind="static")]


def expected_chain(
    head: DraftHead, logits: Tensor, hidden: Tensor, token: int
) -> list[tuple[int, float]]:
    """Return the drafts of a group of masks behind a token, with their probabilities."""
    found = []
    for row, state in zip(logits.float(), hidden.float(), strict=True):
        allowed = row.index_fill(-1, BANNED, -torch.inf)
        shared = head.share_out(allowed[None], state[None], torch.tensor([token]))[0]
        token = int(shared.argmax())
        found.append((token, float(torch.exp(shared[token] - row.logsumexp(-1)))))
    return found


@pytest.mark.parametrize("settings", KINDS, ids=["gated", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [100, 9000])
# Filters that keep the likeliest token alone have to find it behind the head.
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(2.0, top_p=1e-9), Sampling(2.0, top_k=1)]
)
def test_functions_of_cpp_choose_what_the_head_does(
    settings: DraftHeadSettings, dtype: torch.dtype, vocabulary: int, sampling: Sampling
) -> None:
    torch.manual_seed(vocabulary)
    native = native_for(torch.device("cpu"), dtype)
    assert native is not None
    head = DraftHead(settings, vocabulary, 6).requires_grad_(False)
    for weights in head.parameters():
        weights.normal_()
    lora = LoraReference("own", "", "", has_masks=True)
    exact, *others = (make_request(mode=Mode.EXACT, sampling=sampling) for _ in range(3))
    for request in others:
        request.drafts = [Draft(3, 0.5)]
    others[1].lora = lora
    exact.drafts = [Draft(4, 0.5), Draft(5, 0.5)]
    rows = [
        make_row(exact, 1, (2, 4, 3)),
        make_row(make_request(threshold=0.1, sampling=sampling), 1, (3,)),
        *(make_row(request, 1, (4, 2)) for request in others),
    ]
    logits = torch.randn(12 + 4 + 8 + 8, vocabulary) * 3
    for row in logits:  # no other token ties with the likeliest ones, in bfloat16 either
        row[torch.randperm(vocabulary - 8)[:NUM_CANDIDATES] + 8] += 30
    logits = logits.to(dtype)
    logits[0, 4] = logits[1, 6] = logits[16, 9] = logits[24, 9] = 100.0  # one draft, then none
    hidden = torch.randn(len(logits), 6).to(dtype)
    reads = build_reads(rows, None)
    plain = native.propose(logits, BANNED, reads.native_divisors())
    head.widen(-5 % LANES)
    choice = NativeChoice(native, head, BANNED)
    assert all(map(choice.takes, rows))
    table = choice.propose(logits, hidden, reads, rows)
    found = list(zip(*unpack(table), strict=True))
    chains = {(5, 9): 6, (13, 16): found[12][0], (18, 22): 9}
    for (begin, end), token in chains.items():
        place = slice(begin, end)
        for one, other in zip(
            found[place], expected_chain(head, logits[place], hidden[place], token), strict=True
        ):
            assert one == (other[0], pytest.approx(other[1], rel=1e-4))
    is_chosen = torch.zeros(len(table), dtype=torch.bool)
    for begin, end in chains:
        is_chosen[begin:end] = True
    assert torch.equal(table[~is_chosen], plain[~is_chosen])
    assert (table[is_chosen] != plain[is_chosen]).any(1).all()


def test_a_head_whose_weights_are_too_large_is_left_out() -> None:
    native = native_for(torch.device("cpu"), torch.float32)
    assert native is not None
    head = DraftHead(DraftHeadSettings(rank=LANES, kind="static"), 100, 6).requires_grad_(False)
    for weights in head.parameters():
        weights.fill_(1e30)
    row = make_row(make_request(threshold=0.1), 1, (3,))
    logits, hidden = random_logits(7, row.num_reads, 100), torch.ones(row.num_reads, 6)
    reads = build_reads([row], None)
    table = NativeChoice(native, head, BANNED).propose(logits, hidden, reads, [row])
    assert torch.equal(table, native.propose(logits, BANNED, reads.native_divisors()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1e-30),
        Sampling(1e300),
        Sampling(0.7, top_p=0.95),
        Sampling(1.0, top_p=1e-60),
        Sampling(1.0, top_k=1),
        Sampling(1.3, top_k=40, seed=2**63 - 1),
        Sampling(1.0, min_p=0.02),
        Sampling(1.5, top_k=900, top_p=0.6, min_p=1e-3),
    ],
)
def test_functions_of_cpp_sample_as_the_sampler_does(
    sampling: Sampling, scale: float, dtype: torch.dtype
) -> None:
    native = native_for(torch.device("cpu"), dtype)
    assert native is not None
    choice, count, size = NativeChoice(native, None, BANNED), 60, 5000
    logits = (random_logits(5, count, size) * scale).to(dtype)
    logits[:, BANNED] = 99.0
    logits[3, 9], logits[4] = torch.nan, -torch.inf
    requests = [
        make_request(str(index), mode=Mode.AR, sampling=sampling, prompt=1 + index)
        for index in range(count)
    ]
    rows = [make_row(request, 1) for request in requests]
    reads = build_reads(rows, None)
    table = choice.propose(logits, logits, reads, rows)
    tokens, confidences = unpack(table)
    allowed = logits.float().index_fill(-1, BANNED, -torch.inf)
    sampled = [SampledRow(sampling, [i], 1 + i, 0) for i in range(count)]
    assert tokens[5:] == choices(allowed, sampled)[5:]
    assert [index for index, each in enumerate(confidences) if each != each] == [3, 4]
    assert len(set(tokens)) > 20 or sampling.temperature < 1e-20 or sampling.top_k == 1
    assert all(request.num_choices == 1 and request.sampling_s > 0 for request in requests)


def at_borders(scores: Tensor, index: int) -> Sampling:
    """Return a sampling in which a filter ends where a token of ``scores``, [vocabulary], does.

    ``scores`` are logits minus the largest one, divided by .7.
    """
    rank = 3 + index % 40
    ordered = scores.sort(descending=True).values.double()
    shares = ordered.softmax(-1).cumsum(-1)
    filters = (
        {"top_p": float(shares[rank])},
        {"min_p": math.exp(ordered[rank])},
        {"top_k": rank},
        {"top_p": float(shares[2 * rank]), "min_p": math.exp(ordered[rank]), "top_k": 3 * rank},
    )
    return Sampling(0.7, seed=index, **filters[index % len(filters)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [576, 32_000])
def test_functions_of_cpp_keep_the_same_tokens_at_borders_of_filters(
    size: int, dtype: torch.dtype
) -> None:
    native, count = native_for(torch.device("cpu"), dtype), 60
    assert native is not None
    logits = random_logits(6, count, size, scale=3.0).to(dtype)
    logits[::3] = logits[::3].round()  # many tie
    logits[1::9] = torch.where(logits[1::9] > 1, 1.0, -torch.inf)  # all tie
    allowed = logits.float().index_fill(-1, BANNED, -torch.inf)
    scores = (allowed - allowed.max(-1, keepdim=True).values) / 0.7
    samplings = [at_borders(each, index) for index, each in enumerate(scores)]
    rows = [make_row(make_request(mode=Mode.AR, sampling=each, prompt=9), 1) for each in samplings]
    table = NativeChoice(native, None, BANNED).propose(
        logits, logits, build_reads(rows, None), rows
    )
    sampled = [SampledRow(each, [index], 9, 0) for index, each in enumerate(samplings)]
    assert unpack(table)[0] == choices(allowed, sampled)


@pytest.mark.parametrize("has_head", [True, False])
def test_neither_mode_nor_step_decides_which_functions_choose(has_head: bool) -> None:
    native = native_for(torch.device("cpu"), torch.float32)
    assert native is not None
    choice = NativeChoice(native, DraftHead(KINDS[0], 100, 6) if has_head else None, BANNED)
    ways = [
        {},
        {"sampling": Sampling(0.7, top_p=0.9)},
        {"reports_rejected": True},
        {"num_logprobs": 1},
        {"confidence": Confidence.MARGIN},
        {"confidence": Confidence.MARGIN, "reports_rejected": True},
        {"sampling": Sampling(presence_penalty=0.1)},
    ]
    feeds = [
        (Mode.AR, ()),
        *((mode, (n,)) for mode in (Mode.THRESHOLD, Mode.EXACT) for n in (0, 3)),
    ]
    taken = [
        {choice.takes(make_row(make_request(mode=mode, **way), 1, masks)) for mode, masks in feeds}
        for way in ways
    ]
    assert taken == [{True}, {True}, {True}, {not has_head}, {False}, {False}, {False}]


SAMPLINGS = [
    Sampling(),
    Sampling(0.8, seed=3),
    Sampling(0.7, top_p=0.9, seed=4),
    Sampling(0.8, top_p=0.8, frequency_penalty=0.4),
]


@pytest.mark.parametrize("temperatures", [None, (1.0, 0.6, 1.5, 2.0, 0.8)])
def test_steps_draft_alike_with_functions_of_cpp_or_without_and_leave_outputs_alone(
    temperatures: Sequence[float] | None,
) -> None:
    calibration = None
    if temperatures is not None:
        depths = [
            DepthCalibration(temperature=each, num_fitted=1, num_checked=0) for each in temperatures
        ]
        calibration = Calibration(weights="", num_items=1, depths=tuple(depths))
    found = []
    for has_head in (True, False):
        model = build_model()
        if has_head:
            with_random_head(model, KINDS[0])
        checkpoint = Checkpoint(
            None, model.config, None, MarsMetadata(block_size=4, mask_token_id=7), SPECIAL
        )
        checkpoint = replace(checkpoint, calibration=calibration)
        engine = Engine(checkpoint, EngineSettings(num_pages=60, max_num_seqs=4), model=model)
        for choice in (engine._runner._choice, None):
            engine._runner._choice = choice
            found.append(passes_of_kinds(engine, calibrated=temperatures is not None))
    native, torch_alone, plain, plain_torch = found
    assert native == torch_alone != plain == plain_torch
    tokens = [list(chain(*passes)) for passes in native]
    tokens_of_ar = [list(chain(*passes)) for passes in plain[2 * len(SAMPLINGS) :]]
    for index in range(len(tokens)):
        mode, sampling = divmod(index, len(SAMPLINGS))
        assert mode == 1 or tokens[index] == tokens_of_ar[sampling]


def test_a_row_is_chosen_alike_whatever_functions_choose_its_neighbours() -> None:
    """A neighbour with penalties is not for functions of C++, nor is one that reports logits."""
    checkpoint = Checkpoint(
        None, build_model().config, None, MarsMetadata(block_size=4, mask_token_id=7), SPECIAL
    )
    model = with_random_head(build_model(), KINDS[0])
    engine = Engine(checkpoint, EngineSettings(num_pages=60, max_num_seqs=4), model=model)
    choice = engine._runner._choice
    assert choice is not None
    threshold = DecodingOptions(
        9, Mode.THRESHOLD, 0.3, window=3, ignore_eos=True, num_logprobs=2, calibrated=False
    )
    options = [
        replace(threshold, num_logprobs=None),
        threshold,
        replace(threshold, mode=Mode.EXACT, threshold=None, window=None),
        replace(threshold, sampling=SAMPLINGS[-1]),
        replace(threshold, sampling=SAMPLINGS[-1], confidence=Confidence.MARGIN),
    ]

    def request(index: int) -> Request:
        return Request(str(index), list(PROMPT), options[index])

    indices = range(len(options))
    alone = [run(engine, [request(index)])[str(index)] for index in indices]
    together = run(engine, map(request, indices))
    taken = [choice.takes(make_row(request(index), 1, (3,))) for index in indices]
    assert taken == [True, False, False, False, False]
    for index, own in enumerate(alone):
        theirs = together[str(index)]
        assert [t for each in theirs for t in each.tokens] == [
            t for each in own for t in each.tokens
        ]
        ours = [each.logprob for step in own for each in step.logprobs]
        assert ours == pytest.approx([e.logprob for s in theirs for e in s.logprobs], abs=1e-4)
        assert bool(ours) is (options[index].num_logprobs is not None)


def passes_of_kinds(engine: Engine, *, calibrated: bool) -> list[list[list[int]]]:
    """Return the passes of requests in modes exact, threshold and ar, each with all samplings."""
    exact = DecodingOptions(24, Mode.EXACT, outcomes=Outcomes.ALL, ignore_eos=True)
    modes = exact, replace(exact, mode=Mode.THRESHOLD, threshold=0.3, outcomes=None)
    requests = [
        Request(
            f"{index} {number}",
            list(PROMPT),
            replace(options, sampling=sampling, calibrated=calibrated),
        )
        for index, options in enumerate((*modes, replace(exact, mode=Mode.AR, outcomes=None)))
        for number, sampling in enumerate(SAMPLINGS)
    ]
    return list(passes_of(run(engine, requests)).values())
