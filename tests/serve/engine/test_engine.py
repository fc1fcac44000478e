from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request

PAD, MASK, BLOCK_SIZE = 0, 3, 4
SPECIAL = SpecialTokens(eos=frozenset({1, 2, 9, 33}), never_emitted=frozenset({PAD, MASK}))
ENDLESS = SpecialTokens(eos=frozenset(), never_emitted=frozenset({PAD, MASK}))
FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]
AR = [(Mode.AR, 0.5), (Mode.THRESHOLD, 1.0)]
MIXED = [
    (Mode.THRESHOLD, 0.05),
    (Mode.THRESHOLD, 0.1),
    (Mode.THRESHOLD, 0.3),
    (Mode.THRESHOLD, 1.0),
    (Mode.AR, 0.05),
]

Models = Callable[[str], PreTrainedModel]
Engines = Callable[..., Engine]
Cached = Callable[[PreTrainedModel, list[int]], tuple[Tensor, Tensor]]
Passes = dict[str, list[list[int]]]


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(4, 64) for _ in range(length)]


def random_requests(count: int, kinds: list[tuple[Mode, float]], seed: int = 0) -> list[Request]:
    """Ragged requests, every fifth with a prompt that does not fit one step."""
    source, requests = random.Random(seed), []
    for index in range(count):
        length = source.randint(70, 150) if index % 5 == 2 else source.randint(1, 40)
        mode, threshold = kinds[index % len(kinds)]
        options = DecodingOptions(source.randint(1, 20), mode, threshold)
        requests.append(Request(str(index), random_prompt(source, length), options))
    return requests


def one_request(
    length: int, max_tokens: int, *, threshold: float = 1.0, name: str = "one", seed: int = 0
) -> Request:
    options = DecodingOptions(max_tokens, Mode.THRESHOLD, threshold)
    return Request(name, random_prompt(random.Random(seed), length), options)


def flat(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


def prompt_of(request: Request) -> list[int]:
    return request.tokens[: request.num_prompt]


def output_of(request: Request) -> list[int]:
    return request.tokens[request.num_prompt :]


def run(engine: Engine, requests: list[Request], *, at_once: int = 6) -> Passes:
    """Step to the end; after the first few, a request joins at each step."""
    queue, passes = deque(requests), defaultdict(list)
    for _ in range(min(at_once, len(queue))):
        engine.add(queue.popleft())
    while queue or engine.has_work:
        for output in engine.step():
            passes[output.request_id].append(output.tokens)
        engine.check_integrity()
        if queue:
            engine.add(queue.popleft())
    assert engine.status().num_free_pages == engine.settings.num_pages
    return passes


def oracle(
    model: PreTrainedModel,
    request: Request,
    special: SpecialTokens = SPECIAL,
    *,
    block_size: int = BLOCK_SIZE,
    mask: int = MASK,
) -> list[list[int]]:
    options = request.options
    return reference.decode(
        model,
        prompt_of(request),
        special,
        max_tokens=options.max_tokens,
        threshold=1.0 if options.mode is Mode.AR else options.threshold,
        num_masks=block_size,
        mask_token_id=mask,
    ).passes


def generate(model: PreTrainedModel, request: Request) -> list[int]:
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=request.options.max_tokens,
        eos_token_id=sorted(SPECIAL.eos),
        suppress_tokens=sorted(SPECIAL.never_emitted),
        pad_token_id=PAD,
    )
    prompt = torch.tensor([prompt_of(request)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=config
    )
    return output[0, prompt.shape[1] :].tolist()


# Exactness


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_a_step_equals_oracle_and_generate(
    tiny_model: Models, make_engine: Engines, family: str
) -> None:
    model, requests = tiny_model(family), random_requests(20, AR)
    passes = run(make_engine(model, SPECIAL), requests)
    for request in requests:
        assert passes[request.id] == oracle(model, request)
        assert output_of(request) == generate(model, request)
    reasons = Counter(request.finish_reason for request in requests)
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_equal_oracle_in_a_mixed_batch(
    tiny_model: Models, make_engine: Engines, family: str
) -> None:
    model, requests = tiny_model(family), random_requests(25, MIXED, seed=1)
    passes = run(make_engine(model, SPECIAL), requests)
    for request in requests:
        assert passes[request.id] == oracle(model, request), request.options
        assert output_of(request) == flat(passes[request.id])
    lengths = Counter(len(tokens) for tokens in flat(passes.values()))
    assert lengths[1] > 0
    assert sum(count for length, count in lengths.items() if length > 1) > 5
    assert max(lengths) <= BLOCK_SIZE + 1


@pytest.mark.parametrize("sizes", [{"page_size": 1}, {"page_size": 7}, {"max_num_seqs": 1}])
def test_sizes_do_not_change_passes(
    tiny_model: Models, make_engine: Engines, sizes: dict[str, int]
) -> None:
    requests = random_requests(10, MIXED, seed=2)
    passes = run(make_engine(tiny_model("qwen2"), SPECIAL, num_pages=400, **sizes), requests)
    for request in requests:
        assert passes[request.id] == oracle(tiny_model("qwen2"), request)


def test_window_that_fills_a_whole_step(tiny_model: Models, make_engine: Engines) -> None:
    model = tiny_model("llama")
    requests = [
        one_request(30 + 20 * index, 70, threshold=0.04, name=str(index), seed=index)
        for index in range(3)
    ]
    engine = make_engine(model, ENDLESS, block_size=64, max_num_batched_tokens=65)
    passes = run(engine, requests)
    for request in requests:
        assert passes[request.id] == oracle(model, request, ENDLESS, block_size=64)
    assert any(len(tokens) > 1 for tokens in flat(passes.values()))


def test_plain_checkpoint_decodes_one_token_a_step(
    tiny_model: Models, make_engine: Engines
) -> None:
    requests = random_requests(6, AR, seed=3)
    passes = run(make_engine(tiny_model("qwen3"), SPECIAL, block_size=None), requests)
    for request in requests:
        assert passes[request.id] == oracle(tiny_model("qwen3"), request)


def test_neighbours_do_not_matter(tiny_model: Models, make_engine: Engines) -> None:
    model = tiny_model("qwen2")
    batch = random_requests(13, MIXED, seed=4)
    together = run(make_engine(model, SPECIAL, max_num_seqs=13, num_pages=400), batch, at_once=13)
    for request in random_requests(13, MIXED, seed=4):
        alone = run(make_engine(model, SPECIAL), [request])
        assert alone[request.id] == together[request.id]


# Ends


@pytest.mark.parametrize("index", [1, 2])
def test_end_token_inside_an_accepted_run_ends_at_once(
    tiny_model: Models, make_engine: Engines, index: int
) -> None:
    request, end, expected = _ends_inside_a_pass(tiny_model("qwen2"), index)
    special = SpecialTokens(frozenset({end, 62, 63}), ENDLESS.never_emitted)
    engine = make_engine(tiny_model("qwen2"), special)
    assert run(engine, [request])[request.id] == expected
    assert request.finish_reason is FinishReason.STOP


def _ends_inside_a_pass(model: PreTrainedModel, index: int) -> tuple[Request, int, list[list[int]]]:
    """A request, a token at place ``index`` of one of its passes that stands nowhere before and
    is not its pass's last, and the passes up to it.
    """
    for seed in range(50):
        request = one_request(6, 24, threshold=0.02, seed=seed)
        before: list[list[int]] = []
        for tokens in oracle(model, request, ENDLESS):
            earlier = {62, 63, *flat(before), *tokens[:index]}
            if len(tokens) > index + 1 and tokens[index] not in earlier:
                return request, tokens[index], [*before, tokens[: index + 1]]
            before.append(tokens)
    raise AssertionError("no request fits")


def test_each_of_several_end_tokens_ends(tiny_model: Models, make_engine: Engines) -> None:
    model, requests = tiny_model("mistral"), random_requests(40, MIXED, seed=5)
    common = Counter(t for r in requests for t in flat(oracle(model, r, ENDLESS)))
    ends = [token for token, _ in common.most_common(3)]
    special = SpecialTokens(frozenset(ends), ENDLESS.never_emitted)
    run(make_engine(model, special), requests)
    stopped = [r for r in requests if r.finish_reason is FinishReason.STOP]
    assert {request.tokens[-1] for request in stopped} == set(ends)
    for request in requests:
        assert not set(output_of(request)[:-1]) & set(ends)


def test_mask_and_padding_are_never_emitted(tiny_model: Models, make_engine: Engines) -> None:
    """Take as mask and padding the two tokens that would be emitted most."""
    model, free = tiny_model("qwen2"), SpecialTokens(frozenset(), frozenset())
    requests = random_requests(10, MIXED, seed=6)
    common = Counter(t for r in requests for t in flat(oracle(model, r, free)))
    (mask, _), (pad, _) = common.most_common(2)
    special = SpecialTokens(frozenset(), frozenset({mask, pad}))
    passes = run(make_engine(model, special, mask=mask), requests)
    for request in requests:
        assert not {mask, pad} & set(output_of(request))
        assert passes[request.id] == oracle(model, request, special, mask=mask)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_an_accepted_run_stays_within_max_tokens(
    tiny_model: Models, make_engine: Engines, max_tokens: int
) -> None:
    request = one_request(5, max_tokens, threshold=1e-9)  # accepts every proposal
    passes = run(make_engine(tiny_model("qwen2"), ENDLESS), [request])[request.id]
    full, rest = divmod(max_tokens, BLOCK_SIZE + 1)
    assert [len(tokens) for tokens in passes] == [BLOCK_SIZE + 1] * full + [rest] * (rest > 0)
    assert request.finish_reason is FinishReason.LENGTH


# Keys and values


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_leave_no_keys_or_values(
    tiny_model: Models, make_engine: Engines, cached: Cached, family: str
) -> None:
    model = tiny_model(family)
    engine = make_engine(model, ENDLESS)
    request = one_request(90, 40, threshold=1e-9)
    engine.add(request)
    while request.num_output < 12:
        engine.step()
    assert request.finish_reason is None
    keys, values = cached(model, request.tokens[: request.num_cached])
    for stored, expected in (
        (engine._attention.keys, keys),
        (engine._attention.values, values),
    ):
        own = stored[:, request.pages].transpose(2, 3).flatten(1, 2)  # [layers, slots, kv_heads, d]
        torch.testing.assert_close(own[:, : request.num_cached], expected, rtol=1e-4, atol=1e-4)
        assert own[:, : request.num_cached].abs().sum() > 0
        assert own[:, request.num_cached :].abs().sum() == 0


# Cancelling

STAGES: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda request: not request.pages,
    "prefill": lambda request: 0 < request.num_cached < request.num_prompt,
    "running": lambda request: 1 < request.num_output < request.options.max_tokens,
}


@pytest.mark.parametrize("stage", STAGES)
def test_cancelling_frees_pages_and_leaves_the_others_alone(
    tiny_model: Models, make_engine: Engines, stage: str
) -> None:
    model = tiny_model("llama")
    engine = make_engine(model, SPECIAL, max_num_seqs=3, num_pages=200)
    victim = one_request(150, 60, name="victim")
    others = random_requests(8, MIXED, seed=7)
    order = [*others, victim] if stage == "waiting" else [victim, *others]
    for request in order:
        engine.add(request)
    passes = defaultdict(list)
    while not STAGES[stage](victim):
        _step_into(passes, engine)
    held, free = len(victim.pages), engine.status().num_free_pages
    assert (held == 0) == (stage == "waiting")
    engine.cancel("victim")
    engine.check_integrity()
    assert engine.status().num_free_pages == free + held
    assert victim.finish_reason is FinishReason.CANCELLED
    given = len(passes["victim"])
    while engine.has_work:
        _step_into(passes, engine)
    assert len(passes["victim"]) == given
    assert engine.status().num_free_pages == engine.settings.num_pages
    for request in others:
        assert passes[request.id] == oracle(model, request)


def _step_into(passes: Passes, engine: Engine) -> None:
    assert engine.has_work
    for output in engine.step():
        passes[output.request_id].append(output.tokens)
    engine.check_integrity()


def test_cancelling_what_is_not_there_is_no_error(tiny_model: Models, make_engine: Engines) -> None:
    engine = make_engine(tiny_model("qwen2"), SPECIAL)
    request = one_request(3, 2)
    run(engine, [request])
    engine.cancel(request.id)
    engine.cancel("never seen")
    engine.check_integrity()
    assert request.finish_reason is not FinishReason.CANCELLED


# Refusals


@pytest.mark.parametrize(
    ("request_", "block_size", "field", "details"),
    [
        (one_request(0, 4), 4, "prompt", ["no tokens"]),
        (one_request(250, 7), 4, "max_tokens", ["250", "7", "257", "256"]),
        (one_request(3, 4, threshold=0.5), None, "mode", ["mars.json", "'ar'"]),
    ],
    ids=["empty", "too long", "plain checkpoint"],
)
def test_check_refuses_naming_the_field(
    tiny_model: Models,
    make_engine: Engines,
    request_: Request,
    block_size: int | None,
    field: str,
    details: list[str],
) -> None:
    engine = make_engine(tiny_model("qwen2"), SPECIAL, block_size=block_size)
    with pytest.raises(UserError) as refusal:
        engine.add(request_)
    assert str(refusal.value).startswith(f"{field}: ")
    assert all(detail in str(refusal.value) for detail in details)
    assert not engine.has_work


def test_check_refuses_what_the_pages_cannot_hold(tiny_model: Models, make_engine: Engines) -> None:
    engine = make_engine(tiny_model("qwen2"), SPECIAL, num_pages=5)
    engine.check(one_request(12, 8))
    with pytest.raises(UserError, match=r"^max_tokens: .* more than the 20 that fit"):
        engine.check(one_request(13, 8))


def test_longest_request_fits(tiny_model: Models, make_engine: Engines) -> None:
    model, request = tiny_model("qwen2"), one_request(252, 4, threshold=0.05)
    passes = run(make_engine(model, ENDLESS), [request])
    assert passes[request.id] == oracle(model, request, ENDLESS)


# Scheduling


@pytest.mark.parametrize("long_comes_first", [False, True])
def test_a_long_prompt_is_chunked_while_others_advance(
    tiny_model: Models, make_engine: Engines, long_comes_first: bool
) -> None:
    engine = make_engine(tiny_model("qwen2"), ENDLESS, num_pages=300)
    short = [one_request(2 + i, 40, threshold=0.3, name=str(i), seed=i) for i in range(4)]
    long = one_request(200, 4, threshold=0.3, name="long")
    for request in [long, *short] if long_comes_first else [*short, long]:
        engine.add(request)
    num_steps = 0
    while not long.num_output:
        before = long.num_cached
        advanced = {output.request_id for output in engine.step()}
        assert advanced >= {request.id for request in short}
        assert 0 < long.num_cached - before <= engine.settings.max_num_batched_tokens
        num_steps += 1
    assert num_steps >= 4  # 200 tokens, 65 positions a step
