"""How the engine chooses tokens: sampled output, its distribution, and log-probabilities.

Mode exact gives the output of mode ar.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engines import output_of, run
from decoding.modes import AR, EXACT, THRESHOLD
from decoding.sampled_rows import p_value
from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution import acceptance, forward
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings

Engines = Callable[..., Engine]

# Sampled output of mode exact

PARAMETERS = {
    "temperature and top_p": Sampling(0.7, top_p=0.95),
    "hot": Sampling(1.2, top_p=0.95),
    "penalties": Sampling(1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "greedy penalties": Sampling(0.0, repetition_penalty=1.2, frequency_penalty=0.3),
    "min_tokens": Sampling(0.8, min_tokens=22),
    "logit_bias": Sampling(0.9, logit_bias=((20, 3.0), (25, -100.0))),
    "top_k": Sampling(1.5, top_k=12),
    "min_p": Sampling(1.3, min_p=0.05),
}


def sampled(
    prompts: list[list[int]], options: list[DecodingOptions], sampling: Sampling, num_pairs: int
) -> list[Request]:
    """Return requests for many (prompt, seed) pairs, with the options in turn."""
    return [
        Request(
            str(pair),
            list(prompts[pair % len(prompts)]),
            replace(options[pair % len(options)], sampling=replace(sampling, seed=pair)),
        )
        for pair in range(num_pairs)
    ]


def unlike_ar(
    engine: Engine,
    prompts: list[list[int]],
    parameters: dict[str, Sampling],
    num_pairs: int,
    alone: Engine | None = None,
) -> list[str]:
    """Return the parameters of each output of mode exact that differs from mode ar's.

    There are ``num_pairs`` of each of the parameters, beside rows of other modes.
    """
    plain, exact, names = list[Request](), list[Request](), list[str]()
    for name, sampling in parameters.items():
        for made, kinds in ((plain, [AR]), (exact, EXACT)):
            own = sampled(prompts, kinds, sampling, num_pairs)
            for request in own:
                request.id = f"{name} {request.id}"
            made += own
        names += [name] * num_pairs
    run(alone or engine, plain)
    others = sampled(prompts, [THRESHOLD, AR], Sampling(0.9), len(exact) // 4)
    random.Random(0).shuffle(mixed := [*others, *exact])
    passes = run(engine, mixed)
    lengths = [len(output.tokens) for request in exact for output in passes[request.id]]
    assert sum(lengths) > 1.3 * len(lengths)
    return [
        name
        for name, one, other in zip(names, exact, plain, strict=True)
        if output_of(one) != output_of(other)
    ]


def test_sampled_exact_output_is_that_of_mode_ar_whatever_the_parameters(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    """The outputs of mode ar come from batches of another size."""
    small = Engine(checkpoint, EngineSettings(max_num_seqs=7, num_pages=100))
    assert unlike_ar(engine, prompts, PARAMETERS, 12, alone=small) == []


def test_depth_zero_chooses_what_mode_ar_would(engine: Engine, prompts: list[list[int]]) -> None:
    """Each pass of mode threshold begins with the token that mode ar gives there."""
    sampling = Sampling(0.9, top_p=0.95)
    requests = sampled(prompts, [THRESHOLD, replace(THRESHOLD, window=0)], sampling, 16)
    passes = run(engine, requests)
    unlike = 0
    for request in requests:
        again, firsts, begin = [], [], request.num_prompt
        for output in passes[request.id]:
            options = replace(AR, max_tokens=1, sampling=request.options.sampling)
            again.append(Request(f"{begin}", request.tokens[:begin], options))
            firsts.append(output.tokens[0])
            begin += len(output.tokens)
        run(engine, again)
        assert [output_of(one)[0] for one in again] == firsts
        plain = Request("ar", list(request.tokens[: request.num_prompt]), request.options)
        plain.options = replace(AR, sampling=request.options.sampling)
        run(engine, [plain])
        if request.options.window == 0:
            assert output_of(plain) == output_of(request)
        unlike += output_of(plain) != output_of(request)
    assert unlike > 0  # accepted masks may differ from mode ar


# Distributions

TINY = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 1}))
TINY_VOCABULARY, NUM_DRAWS, TEMPERATURE = 7, 3_000, 1.1


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    """Return a model with five tokens that may be emitted, whose drafts are sometimes right."""
    return build_model(
        vocab_size=TINY_VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
    )


@torch.inference_mode()
def joint_shares(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Return probabilities of the first three tokens: [vocabulary, vocabulary, vocabulary]."""
    pairs = torch.tensor(list(product(range(TINY_VOCABULARY), repeat=2)))
    ids = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
    logits = model(input_ids=ids).logits[:, len(prompt) - 1 :] / TEMPERATURE
    logits[..., sorted(TINY.never_emitted)] = -torch.inf
    first, second, third = (
        logits.softmax(-1).view(TINY_VOCABULARY, TINY_VOCABULARY, 3, TINY_VOCABULARY).unbind(2)
    )
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third


def drawn(make_engine: Engines, model: PreTrainedModel, mode: Mode) -> Tensor:
    """Return how often the engine gave each combination of three tokens, over many seeds."""
    options = DecodingOptions(3, mode, sampling=Sampling(TEMPERATURE))
    engine = make_engine(
        model,
        TINY,
        block_size=1,
        mask=1,
        page_size=8,
        num_pages=1000,
        max_num_seqs=500,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )
    requests = [
        Request(str(seed), [3, 5], replace(options, sampling=replace(options.sampling, seed=seed)))
        for seed in range(NUM_DRAWS)
    ]
    passes = run(engine, requests, checks_each_step=False)
    lengths = {len(output.tokens) for outputs in passes.values() for output in outputs}
    assert lengths == ({1} if mode is Mode.AR else {1, 2})
    a, b, c = torch.tensor([output_of(request) for request in requests]).unbind(1)
    sizes = (TINY_VOCABULARY,) * 3
    flat = (a * TINY_VOCABULARY + b) * TINY_VOCABULARY + c
    return torch.bincount(flat, minlength=TINY_VOCABULARY**3).view(sizes)


def p_values(counts: Tensor, shares: Tensor) -> list[float]:
    """Return p-values for the first token, the second token and all three together."""
    return [
        p_value(counts.sum((1, 2)), shares.sum((1, 2))),
        p_value(counts.sum((0, 2)), shares.sum((0, 2))),
        p_value(counts, shares),
    ]


@pytest.mark.parametrize("mode", [Mode.AR, Mode.EXACT])
def test_draws_follow_the_models_distribution(
    make_engine: Engines, tiny: PreTrainedModel, mode: Mode
) -> None:
    counts = drawn(make_engine, tiny, mode)
    assert counts.sum() == NUM_DRAWS
    shares = joint_shares(tiny, [3, 5])
    assert shares.sum() == pytest.approx(1.0)
    assert min(p_values(counts, shares)) > 0.01


@pytest.fixture
def accepts_by_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the rule of acceptance by one that trusts the confidence of the next token."""

    def broken(row: ScheduledRow, _: list[int], confidences: list[float]) -> int:
        return 1 + acceptance.num_sure(confidences[1 : row.num_proposed], 0.3)

    monkeypatch.setattr(forward, "num_accepted", broken)


@pytest.mark.usefixtures("accepts_by_confidence")
def test_a_broken_rule_fails_the_same_checks(
    checkpoint: Checkpoint, prompts: list[list[int]], make_engine: Engines, tiny: PreTrainedModel
) -> None:
    engine = Engine(
        checkpoint, EngineSettings(max_num_seqs=24, num_pages=400, enable_prefix_caching=False)
    )
    hot = {"hot": PARAMETERS["hot"]}
    assert len(unlike_ar(engine, prompts, hot, 32)) > 3
    counts = drawn(make_engine, tiny, Mode.EXACT)
    first, _, together = p_values(counts, joint_shares(tiny, [3, 5]))
    assert first > 0.01  # the first token depends on no draft
    assert together < 1e-6


# Log-probabilities


def plain_log_probs(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("num_top", [0, 5])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=8, seed=4)])
def test_log_probs_are_those_of_a_plain_pass(
    engine: Engine,
    model: PreTrainedModel,
    prompts: list[list[int]],
    num_top: int,
    sampling: Sampling,
) -> None:
    """Log-probabilities are raw, whatever the sampling parameters do to the logits."""
    kinds = [replace(kind, num_logprobs=num_top, sampling=sampling) for kind in [AR, *EXACT]]
    requests = [Request(str(i), list(prompts[i]), kind) for i, kind in enumerate(kinds * 2)]
    silent = Request("silent", list(prompts[0]), THRESHOLD)
    passes = run(engine, [*requests, silent])
    for request in requests:
        found = [entry for output in passes[request.id] for entry in output.logprobs]
        log_probs = plain_log_probs(model, request.tokens)[request.num_prompt - 1 : -1]
        assert len(found) == len(output_of(request)) == len(log_probs)
        for entry, token, expected in zip(found, output_of(request), log_probs, strict=True):
            assert not entry.from_mask
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
            values, ids = expected.topk(num_top)
            assert [number for _, number in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
            assert {token for token, _ in entry.top} == set(ids.tolist())
    assert all(output.logprobs == [] for output in passes["silent"])


def test_log_probs_of_masks_say_so(
    engine: Engine, model: PreTrainedModel, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    assert checkpoint.metadata is not None
    request = Request("one", list(prompts[2]), replace(THRESHOLD, num_logprobs=2))
    passes, num_from_masks = run(engine, [request])["one"], 0
    begin = request.num_prompt
    for output in passes:
        masks = [checkpoint.metadata.mask_token_id] * output.num_masks
        log_probs = plain_log_probs(model, request.tokens[:begin] + masks)[begin - 1 :]
        assert [entry.from_mask for entry in output.logprobs] == [
            depth > 0 for depth in range(len(output.tokens))
        ]
        for entry, token, expected in zip(output.logprobs, output.tokens, log_probs, strict=False):
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
            assert [token for token, _ in entry.top] == expected.topk(2).indices.tolist()
        num_from_masks += len(output.tokens) - 1
        begin += len(output.tokens)
    assert num_from_masks > 2
