"""How tokens are chosen, through the engine: sampling, log-probabilities, ends and grammars.

Whatever a request asks for, mode exact gives what mode ar gives.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import jsonschema
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen2Config

from mars_platform.checkpoint.directory import (
    Checkpoint,
    SpecialTokens,
    load_model,
    read_checkpoint,
)
from mars_platform.method.mode import Mode
from mars_serve.engine import acceptance
from mars_serve.engine.acceptance import Reads
from mars_serve.engine.adaptive.window import StepTimes, WindowChooser
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Outcomes,
    Request,
    Sampling,
    StepOutput,
)
from mars_serve.engine.sampling.grammar import GrammarCompiler
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.scoring import read_items

MAX_TOKENS = 26
NUM_PROMPTS = 64
AR = DecodingOptions(MAX_TOKENS, Mode.AR)
EXACT = [
    DecodingOptions(MAX_TOKENS, Mode.EXACT),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.ALL),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.LAST),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.ALL, window=2),
]
THRESHOLD = DecodingOptions(MAX_TOKENS, threshold=0.6, window=4)

TIMES = StepTimes((1, 256), (0,), ((10.0,), (20.0,)))
"""Far above what steps take: the engine's own clock changes no choice."""

Engines = Callable[..., Engine]
Passes = dict[str, list[StepOutput]]


@pytest.fixture(scope="module")
def checkpoint(trained) -> Checkpoint:
    return read_checkpoint(trained.model)


@pytest.fixture(scope="module")
def prompts(trained, checkpoint: Checkpoint) -> list[list[int]]:
    file = trained.data / "eval.jsonl"
    items = read_items(
        [file], checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=NUM_PROMPTS
    )
    return [list(item.prompt) for item in items]


@pytest.fixture(scope="module")
def model(trained) -> PreTrainedModel:
    return load_model(trained.model).eval()


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=24, num_pages=400))
    engine._chooser = WindowChooser(TIMES, engine.window)
    return engine


def output_of(request: Request) -> list[int]:
    return request.tokens[request.num_prompt :]


def run(engine: Engine, requests: list[Request]) -> Passes:
    passes = defaultdict[str, list[StepOutput]](list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            passes[output.request_id].append(output)
    engine.check_integrity()
    return passes


# Sampled output of mode exact


def sampled(
    prompts: list[list[int]], options: list[DecodingOptions], sampling: Sampling, num_pairs: int
) -> list[Request]:
    """Requests of so many (prompt, seed) pairs, the options taking turns."""
    return [
        Request(
            str(pair),
            list(prompts[pair % len(prompts)]),
            replace(options[pair % len(options)], sampling=replace(sampling, seed=pair)),
        )
        for pair in range(num_pairs)
    ]


def num_unlike_ar(
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    num_pairs: int,
    alone: Engine | None = None,
) -> int:
    """Pairs whose output in mode exact, beside rows of other modes, is not that of mode ar."""
    plain = sampled(prompts, [AR], sampling, num_pairs)
    run(alone or engine, plain)
    exact = sampled(prompts, EXACT, sampling, num_pairs)
    others = sampled(prompts, [THRESHOLD, AR], replace(sampling, temperature=0.9), num_pairs // 4)
    for request in others:
        request.id = f"other {request.id}"
    mixed = [*others, *exact]
    mixed[::2], mixed[1::2] = mixed[: (len(mixed) + 1) // 2], mixed[(len(mixed) + 1) // 2 :]
    passes = run(engine, mixed)
    lengths = [len(output.tokens) for request in exact for output in passes[request.id]]
    assert sum(lengths) > 1.3 * len(lengths)
    pairs = zip(exact, plain, strict=True)
    return sum(output_of(one) != output_of(other) for one, other in pairs)


@pytest.mark.parametrize("temperature", [0.7, 1.2])
def test_sampled_exact_output_is_that_of_mode_ar(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]], temperature: float
) -> None:
    """For mode ar in batches of another size, too."""
    small = Engine(checkpoint, EngineSettings(max_num_seqs=7, num_pages=100))
    sampling = Sampling(temperature, top_p=0.95)
    assert num_unlike_ar(engine, prompts, sampling, 260, alone=small) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        Sampling(0.0, repetition_penalty=1.2, frequency_penalty=0.3),
        Sampling(0.8, min_tokens=22),
        Sampling(0.9, logit_bias=((20, 3.0), (25, -100.0))),
        Sampling(1.5, top_k=12),
        Sampling(1.3, min_p=0.05),
    ],
    ids=["penalties", "greedy penalties", "min_tokens", "logit_bias", "top_k", "min_p"],
)
def test_every_parameter_gives_in_mode_exact_what_it_gives_in_mode_ar(
    engine: Engine, prompts: list[list[int]], sampling: Sampling
) -> None:
    assert num_unlike_ar(engine, prompts, sampling, 32) == 0


def test_depth_zero_chooses_what_mode_ar_would(engine: Engine, prompts: list[list[int]]) -> None:
    """In mode threshold each pass starts with the token of mode ar behind the same tokens."""
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
    assert unlike > 0  # masks were accepted that are not what mode ar gives


# Distributions

TINY = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 1}))
TINY_VOCABULARY, NUM_DRAWS, TEMPERATURE = 7, 20_000, 1.1


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    """Of five tokens that may be emitted, with drafts that are right at times."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=TINY_VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def p_value(counts: Tensor, shares: Tensor) -> float:
    """Of Pearson's chi-square test; rare outcomes count as one."""
    assert counts[shares == 0].sum() == 0
    expected = shares[shares > 0].double() * counts.sum()
    found, is_rare = counts[shares > 0].double(), expected < 5
    if is_rare.any():
        found = torch.cat([found[~is_rare], found[is_rare].sum()[None]])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@torch.inference_mode()
def joint_shares(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Of the first three tokens, from plain passes: [vocabulary, vocabulary, vocabulary]."""
    pairs = torch.tensor(list(product(range(TINY_VOCABULARY), repeat=2)))
    ids = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
    logits = model(input_ids=ids).logits[:, len(prompt) - 1 :] / TEMPERATURE
    logits[..., sorted(TINY.never_emitted)] = -torch.inf
    first, second, third = (
        logits.softmax(-1).view(TINY_VOCABULARY, TINY_VOCABULARY, 3, TINY_VOCABULARY).unbind(2)
    )
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third


def drawn(
    make_engine: Engines, model: PreTrainedModel, mode: Mode, num_draws: int = NUM_DRAWS
) -> Tensor:
    """How often the engine gave which three tokens, over as many seeds."""
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
        Request(
            str(seed),
            [3, 5],
            replace(options, sampling=replace(options.sampling, seed=seed)),
        )
        for seed in range(num_draws)
    ]
    passes = run(engine, requests)
    lengths = {len(output.tokens) for outputs in passes.values() for output in outputs}
    assert lengths == ({1} if mode is Mode.AR else {1, 2})
    a, b, c = torch.tensor([output_of(request) for request in requests]).unbind(1)
    sizes = (TINY_VOCABULARY,) * 3
    flat = (a * TINY_VOCABULARY + b) * TINY_VOCABULARY + c
    return torch.bincount(flat, minlength=TINY_VOCABULARY**3).view(sizes)


def p_values(counts: Tensor, shares: Tensor) -> list[float]:
    """Of the first token, of the second and of all three together."""
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
    """A rule that takes a draft for right where the model is sure of what follows it."""
    rule = acceptance._num_accepted

    def broken(table: Tensor, reads: Reads) -> Tensor:
        thresholds = torch.full_like(reads.thresholds, 0.3)
        return rule(table, replace(reads, drafts=None, thresholds=thresholds))

    monkeypatch.setattr(acceptance, "_num_accepted", broken)


@pytest.mark.usefixtures("accepts_by_confidence")
def test_a_broken_rule_fails_the_same_checks(
    checkpoint: Checkpoint, prompts: list[list[int]], make_engine: Engines, tiny: PreTrainedModel
) -> None:
    engine = Engine(
        checkpoint, EngineSettings(max_num_seqs=24, num_pages=400, enable_prefix_caching=False)
    )
    assert num_unlike_ar(engine, prompts, Sampling(1.2, top_p=0.95), 32) > 3
    counts = drawn(make_engine, tiny, Mode.EXACT, num_draws=5_000)
    first, _, together = p_values(counts, joint_shares(tiny, [3, 5]))
    assert first > 0.01  # it depends on no draft
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
    """Raw ones, whatever is done to the logits before a token is chosen."""
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


# Ends


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1)])
@pytest.mark.parametrize("kinds", [[AR, *EXACT], [THRESHOLD]], ids=["exact", "threshold"])
def test_a_stop_token_ends_the_output_inside_a_run(
    engine: Engine, prompts: list[list[int]], kinds: list[DecodingOptions], sampling: Sampling
) -> None:
    """It is where the output without it is cut."""
    plain = replace(kinds[0], sampling=sampling)
    free = [Request(str(i), list(prompt), plain) for i, prompt in enumerate(prompts[:10])]
    run(engine, free)
    outputs, num_inside = [output_of(request) for request in free], 0
    for stop in sorted(set(outputs[0]))[::2]:
        stopping = [replace(kind, sampling=sampling, stop_ids=frozenset({stop})) for kind in kinds]
        requests = [
            Request(str(i), list(prompt), stopping[i % len(kinds)])
            for i, prompt in enumerate(prompts[:10])
        ]
        passes = run(engine, requests)
        for request, output in zip(requests, outputs, strict=True):
            if stop in output:
                assert output_of(request) == output[: output.index(stop) + 1]
                assert request.finish_reason is FinishReason.STOP
                num_inside += len(passes[request.id][-1].tokens) > 1
            else:
                assert output_of(request) == output
    assert num_inside > 3


def test_no_end_token_comes_before_min_tokens(
    engine: Engine, model: PreTrainedModel, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    ends, least = sorted(checkpoint.special.eos), 22
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=least,
        eos_token_id=ends,
        suppress_tokens=sorted(checkpoint.special.never_emitted),
        pad_token_id=0,
    )
    kinds = [replace(kind, sampling=Sampling(min_tokens=least)) for kind in [AR, *EXACT]]
    kinds.append(replace(THRESHOLD, sampling=Sampling(min_tokens=least)))
    chosen = prompts[: 3 * len(kinds)]
    requests = [
        Request(str(i), list(prompt), kinds[i % len(kinds)]) for i, prompt in enumerate(chosen)
    ]
    run(engine, requests)
    num_put_off = 0
    for request, prompt in zip(requests, chosen, strict=True):
        assert not set(output_of(request)[:least]) & set(ends)
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        if request.options.mode is not Mode.THRESHOLD:
            assert request.tokens == expected[0].tolist()
        early = Request("early", list(prompt), AR)
        run(engine, [early])
        num_put_off += early.num_output <= least
    assert num_put_off > 3


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=9)])
def test_outputs_of_one_and_two_tokens(
    engine: Engine, prompts: list[list[int]], max_tokens: int, sampling: Sampling
) -> None:
    kinds = [
        replace(kind, max_tokens=max_tokens, sampling=sampling, num_logprobs=1)
        for kind in [AR, *EXACT]
    ]
    for prompt in prompts[:3]:
        requests = [Request(str(i), list(prompt), kind) for i, kind in enumerate(kinds)]
        passes = run(engine, requests)
        assert len({tuple(output_of(request)) for request in requests}) == 1
        for request in requests:
            assert request.num_output == max_tokens
            assert sum(len(output.logprobs) for output in passes[request.id]) == max_tokens


# Grammars

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": -20, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}
PATTERN = r"[1-9][0-9]{0,2}( (plus|minus) [1-9][0-9]{0,2}){1,3} is [0-9]{1,4}\."
GRAMMARS = {
    "schema": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": GrammarSpec(GrammarKind.REGEX, PATTERN),
}


def check_text(name: str, text: str) -> None:
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_in_its_grammar_in_every_mode(
    engine: Engine,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    name: str,
    temperature: float,
) -> None:
    size = checkpoint.config.vocab_size
    fresh = GrammarCompiler(checkpoint.tokenizer, size, checkpoint.special.eos)
    grammar = fresh.compile(GRAMMARS[name])

    def requests(kinds: list[DecodingOptions], max_tokens: int) -> list[Request]:
        made = []
        for index, prompt in enumerate(prompts[:16]):
            options = replace(
                kinds[index % len(kinds)],
                max_tokens=max_tokens,
                grammar=GRAMMARS[name],
                sampling=Sampling(temperature, seed=index),
            )
            made.append(Request(f"{kinds[0].mode} {index}", list(prompt), options))
        return made

    for max_tokens in (9, 110):
        plain, exact = requests([AR], max_tokens), requests(EXACT, max_tokens)
        threshold = requests([THRESHOLD], max_tokens)
        run(engine, [*plain, *exact, *threshold])
        assert [output_of(one) for one in exact] == [output_of(one) for one in plain]
        for request in [*plain, *exact, *threshold]:
            tokens = output_of(request)
            assert grammar.matcher().advance(tokens) == len(tokens)
            if request.finish_reason is FinishReason.STOP:
                text = checkpoint.tokenizer.decode(tokens, skip_special_tokens=True)
                check_text(name, text)
            else:
                assert request.finish_reason is FinishReason.LENGTH
                assert len(tokens) == max_tokens
        reasons = {request.finish_reason for request in [*plain, *exact, *threshold]}
        assert (FinishReason.LENGTH if max_tokens == 9 else FinishReason.STOP) in reasons


@pytest.mark.parametrize("kind", [AR, *EXACT[:2], THRESHOLD])
def test_a_grammar_that_allows_nothing_fails_its_own_request_alone(
    engine: Engine, prompts: list[list[int]], kind: DecodingOptions
) -> None:
    """Behind the digit only the mask fits, which is never emitted."""
    grammar = GrammarSpec(GrammarKind.LARK, 'start: "4" <|mask|>')
    victim = Request("victim", list(prompts[0]), replace(kind, grammar=grammar))
    kinds = [AR, *EXACT, replace(EXACT[0], grammar=GRAMMARS["regex"])]
    together, alone = (
        [Request(str(i), list(prompts[i]), options) for i, options in enumerate(kinds)]
        for _ in range(2)
    )
    for request in alone:
        run(engine, [request])
    passes = run(engine, [*together[:3], victim, *together[3:]])
    assert victim.finish_reason is FinishReason.ERROR
    assert "grammar" in (passes["victim"][-1].error or "")
    for one, other in zip(together, alone, strict=True):
        assert output_of(one) == output_of(other)
        assert one.finish_reason is other.finish_reason
    assert engine.status().num_free_pages == engine.num_pages
