from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import Engines, Models, oracle, output_of, passes_of, prompt_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

PAD, MASK, BLOCK_SIZE = 0, 3, 4
SPECIAL = SpecialTokens(eos=frozenset({1, 2, 9, 33}), never_emitted=frozenset({PAD, MASK}))
ENDLESS = SpecialTokens(eos=frozenset(), never_emitted=frozenset({PAD, MASK}))
FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]
PLAIN = [(Mode.AR, 0.05), (Mode.THRESHOLD, 1.0)]
MIXED = [
    (Mode.THRESHOLD, 0.05),
    (Mode.THRESHOLD, 0.1),
    (Mode.THRESHOLD, 0.3),
    (Mode.THRESHOLD, 1.0),
    (Mode.AR, 0.05),
]


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(4, 64) for _ in range(length)]


def random_requests(count: int, kinds: list[tuple[Mode, float]], seed: int = 0) -> list[Request]:
    """Requests of different lengths, every fifth with a prompt longer than one step."""
    source, requests = random.Random(seed), []
    for index in range(count):
        length = source.randint(70, 150) if index % 5 == 2 else source.randint(1, 40)
        mode, threshold = kinds[index % len(kinds)]
        max_tokens, prompt = source.randint(1, 20), random_prompt(source, length)
        options = {"mode": mode, "threshold": threshold}
        requests.append(make_request(str(index), prompt, max_tokens, **options))
    return requests


def request_of(
    length: int, max_tokens: int, *, threshold: float = 1.0, name: str = "one", seed: int = 0
) -> Request:
    prompt = random_prompt(random.Random(seed), length)
    return make_request(name, prompt, max_tokens, threshold=threshold)


def flat(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


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
def test_passes_equal_oracle_in_a_mixed_batch_and_generate_at_threshold_one(
    tiny_model: Models, make_engine: Engines, family: str
) -> None:
    model, requests = tiny_model(family), random_requests(25, MIXED, seed=1)
    passes = passes_of(run(make_engine(model, SPECIAL), requests))
    for request in requests:
        assert passes[request.id] == oracle(model, request, SPECIAL), request.options
        assert output_of(request) == flat(passes[request.id])
        if (request.options.mode, request.options.threshold) in PLAIN:
            assert output_of(request) == generate(model, request)
    reasons = Counter(request.finish_reason for request in requests)
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH}
    lengths = Counter(len(tokens) for tokens in flat(passes.values()))
    assert lengths[1] > 0
    assert sum(count for length, count in lengths.items() if length > 1) > 5
    assert max(lengths) <= BLOCK_SIZE + 1


def test_a_window_may_fill_a_whole_step(tiny_model: Models, make_engine: Engines) -> None:
    model = tiny_model("llama")
    requests = [
        request_of(30 + 20 * index, 70, threshold=0.04, name=str(index), seed=index)
        for index in range(3)
    ]
    engine = make_engine(model, ENDLESS, block_size=64, max_num_batched_tokens=65)
    passes = passes_of(run(engine, requests))
    for request in requests:
        assert passes[request.id] == oracle(model, request, ENDLESS, num_masks=64)
    assert any(len(tokens) > 1 for tokens in flat(passes.values()))


def test_plain_checkpoint_decodes_one_token_a_step(
    tiny_model: Models, make_engine: Engines
) -> None:
    requests = random_requests(6, PLAIN, seed=3)
    passes = passes_of(run(make_engine(tiny_model("qwen3"), SPECIAL, block_size=None), requests))
    for request in requests:
        assert passes[request.id] == oracle(tiny_model("qwen3"), request, SPECIAL)


# Ends


def test_mask_and_padding_are_never_emitted(tiny_model: Models, make_engine: Engines) -> None:
    """Mask and padding are the two tokens that would otherwise be emitted most."""
    model, free = tiny_model("qwen2"), SpecialTokens(frozenset(), frozenset())
    requests = random_requests(10, MIXED, seed=6)
    common = Counter(t for r in requests for t in flat(oracle(model, r, free)))
    (mask, _), (pad, _) = common.most_common(2)
    special = SpecialTokens(frozenset(), frozenset({mask, pad}))
    passes = passes_of(run(make_engine(model, special, mask=mask), requests))
    for request in requests:
        assert not {mask, pad} & set(output_of(request))
        assert passes[request.id] == oracle(model, request, special, mask=mask)


def test_all_tokens_that_are_never_emitted_have_logits(
    tiny_model: Models, make_engine: Engines
) -> None:
    with pytest.raises(AssertionError, match="banned tokens have logits"):
        make_engine(tiny_model("qwen2"), SpecialTokens(frozenset(), frozenset({MASK, 10**6})))


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
    victim = request_of(150, 60, name="victim")
    others = random_requests(8, MIXED, seed=7)
    order = [*others, victim] if stage == "waiting" else [victim, *others]
    for request in order:
        engine.add(request)
    outputs = list[StepOutput]()
    while not STAGES[stage](victim):
        outputs += engine.step()
    held, free = len(victim.pages), engine.status().num_free_pages
    assert (held == 0) == (stage == "waiting")
    engine.cancel("victim")
    engine.check_integrity()
    assert engine.status().num_free_pages == free + held
    assert victim.finish_reason is FinishReason.CANCELLED
    while engine.has_work:
        further = engine.step()
        assert "victim" not in {output.request_id for output in further}
        outputs += further
        engine.check_integrity()
    assert engine.status().num_free_pages == engine.num_pages
    for request in others:
        own = [output.tokens for output in outputs if output.request_id == request.id]
        assert own == oracle(model, request, SPECIAL)


def test_an_unknown_or_ended_request_can_be_cancelled(
    tiny_model: Models, make_engine: Engines
) -> None:
    engine = make_engine(tiny_model("qwen2"), SPECIAL)
    request = request_of(3, 2)
    run(engine, [request])
    engine.cancel(request.id)
    engine.cancel("never seen")
    engine.check_integrity()
    assert request.finish_reason is not FinishReason.CANCELLED


# Refusals


@pytest.mark.parametrize(
    ("request_", "block_size", "field", "details"),
    [
        (request_of(0, 4), 4, "prompt", ["no tokens"]),
        (request_of(250, 7), 4, "max_tokens", ["250", "7", "257", "256"]),
        (request_of(3, 4, threshold=0.5), None, "mode", ["mars.json", "'ar'"]),
    ],
    ids=["empty", "too long", "plain checkpoint"],
)
def test_a_refusal_names_the_field(
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


def test_a_request_that_the_pages_cannot_hold_is_refused(
    tiny_model: Models, make_engine: Engines
) -> None:
    engine = make_engine(tiny_model("qwen2"), SPECIAL, num_pages=5)
    engine.check(request_of(12, 8))
    with pytest.raises(UserError, match=r"^max_tokens: .* more than the 20 that fit"):
        engine.check(request_of(13, 8))


def test_the_longest_request_fits(tiny_model: Models, make_engine: Engines) -> None:
    model, request = tiny_model("qwen2"), request_of(252, 4, threshold=0.05)
    passes = passes_of(run(make_engine(model, ENDLESS), [request]))
    assert passes[request.id] == oracle(model, request, ENDLESS)
