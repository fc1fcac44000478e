"""Prefixes that texts share, on a model with recurrent layers: the same outputs with them as
without, and the same hits in all modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import output_of, run
from decoding.families import build_family
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Mode
from mars_serve.engine.engine import Engine

PAGE = 4
SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
MODES = {
    "ar": {"mode": Mode.AR},
    "exact": {"mode": Mode.EXACT},
    "threshold": {"mode": Mode.THRESHOLD, "threshold": 0.1, "window": 3},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_family("qwen3_5_text")


def conversation(engine: Engine, length: int, mode: str) -> tuple[list[list[int]], list[int], int]:
    """Answer texts that share ``length`` tokens, and one that follows.

    Returns:
        The outputs, the hits of each text, and the number of passes.
    """
    stem = [4 + (7 * index) % 50 for index in range(length)]
    first, second, third = ([*stem, token, token + 1, 9, 9, 9] for token in (20, 30, 40))
    outputs, hits, num_passes = list[list[int]](), list[int](), 0
    for text in (first, second, first, third, []):
        prompt = text or [*first, *outputs[0], 5, 6]
        request = make_request(f"{mode} {length}", prompt, 9, **MODES[mode])
        request.cache_salt = request.id
        passes = run(engine, [request])[request.id]
        num_passes += len(passes)
        outputs.append(output_of(request))
        hits.append(request.num_prefix_hit_tokens)
    return outputs, hits, num_passes


def test_texts_that_share_a_prefix_are_answered_as_alone_at_every_length(
    model: PreTrainedModel, make_engine: Callable[..., Engine]
) -> None:
    sizes = {"num_pages": 400, "page_size": PAGE, "max_num_seqs": 2, "num_lookup_drafts": 4}
    cached = make_engine(model, SPECIAL, **sizes)
    alone = make_engine(model, SPECIAL, **sizes, enable_prefix_caching=False)
    num_passes = Counter[str]()
    for length in range(2 * PAGE, 3 * PAGE):
        whole, shared = (length + 4) // PAGE * PAGE, length // PAGE * PAGE
        for mode in MODES:
            outputs, hits, count = conversation(cached, length, mode)
            num_passes[mode] += count
            if mode != "exact":  # whose outputs are those of mode ar
                expected, none, _ = conversation(alone, length, mode)
                assert none == [0] * 5
            assert outputs == expected
            assert hits[:4] == [0, 0, whole, shared], "as in every mode"
            assert whole + PAGE <= hits[4] <= (length + 5 + 9) // PAGE * PAGE
    assert num_passes["threshold"] < num_passes["exact"] < num_passes["ar"]


def test_requests_that_come_together_compute_their_prefix_once(
    model: PreTrainedModel, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, SPECIAL, num_pages=400, page_size=PAGE, max_num_seqs=8)
    stem = [4 + (7 * index) % 50 for index in range(30)]
    requests = [
        make_request(str(index), [*stem, 40 + index, 9], 6, mode=Mode.AR) for index in range(8)
    ]
    run(engine, requests)
    status = engine.status()
    assert status.num_prefix_hit_tokens == 7 * 28
    assert (status.num_held_states, status.num_computed_again) == (0, 0)
    assert 0 < status.num_state_snapshots <= 80
    alone = make_engine(model, SPECIAL, num_pages=400, page_size=PAGE, max_num_seqs=1)
    for request in requests:
        again = make_request("alone", request.tokens[:32], 6, mode=Mode.AR)
        run(alone, [again])
        assert output_of(again) == output_of(request)


def test_an_audit_drafts_no_more_than_the_log_of_a_state_holds(
    model: PreTrainedModel, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, SPECIAL, num_pages=400, page_size=PAGE, max_num_seqs=2)
    served, audit = (make_request(name, 9, 23, mode=Mode.EXACT) for name in ("text", "text"))
    run(engine, [served])
    audit.audited = output_of(served)
    passes = [output.tokens for output in run(engine, [audit])["text"]]
    assert [token for tokens in passes for token in tokens] == output_of(served)
    assert list(map(len, passes)) == [5, 5, 5, 5, 3]
