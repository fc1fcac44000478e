from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mars_serve.bench.decode.models import PRESETS, untrained_model
from mars_serve.bench.decode.workload import (
    RaggedShape,
    agreeing,
    generated_requests,
    paper_acceptance,
)


def test_requests_lie_in_their_ranges_and_follow_from_the_seed() -> None:
    shape = RaggedShape(prompt=(3, 9), output=(2, 5))
    requests = generated_requests(400, shape, [7, 8], seed=1)
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert {request.max_tokens for request in requests} == set(range(2, 6))
    assert {token for request in requests for token in request.prompt} == {7, 8}
    assert len({request.id for request in requests}) == 400
    assert generated_requests(30, shape, [7, 8], seed=1) == requests[:30]
    assert generated_requests(400, shape, [7, 8], seed=2) != requests


def test_the_papers_distribution_has_its_mean() -> None:
    acceptance = paper_acceptance()
    assert acceptance.mean == pytest.approx(1.79, abs=1e-4)
    assert list(acceptance.tokens_per_forward) == [1, 2, 3, 4, 5]
    draws = [acceptance.draw(0, str(index), 3, 5) for index in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(1.79, abs=0.03)
    assert set(draws) == {1, 2, 3, 4, 5}


def test_draws_depend_only_on_seed_request_and_output_length() -> None:
    acceptance = paper_acceptance()

    def draws(seed: int, name: str) -> list[int]:
        return [acceptance.draw(seed, name, place, 5) for place in range(60)]

    assert draws(0, "a") == draws(0, "a")
    assert draws(0, "a") != draws(0, "b")
    assert draws(0, "a") != draws(1, "a")
    assert len(set(draws(0, "a"))) > 1


def test_fewer_proposals_limit_a_draw() -> None:
    acceptance = paper_acceptance()
    for place in range(60):
        full = acceptance.draw(0, "a", place, 5)
        for proposed in range(1, 5):
            assert acceptance.draw(0, "a", place, proposed) == min(full, proposed)


@pytest.mark.parametrize("agreement", [0.0, 0.8, 1.0])
def test_each_draft_is_right_with_the_given_probability(agreement: float) -> None:
    acceptance = agreeing(agreement, 4)
    assert sum(acceptance.tokens_per_forward.values()) == pytest.approx(1.0)
    assert acceptance.chance(1) == pytest.approx(agreement)
    for depth in (2, 3, 4):
        assert acceptance.chance(depth) == pytest.approx(agreement)
    assert acceptance.chance(5) == 0.0
    draws = [acceptance.draw(0, str(index), 3, 5) for index in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(acceptance.mean, abs=0.04)
    assert acceptance.mean == pytest.approx(sum(agreement**right for right in range(5)))


def test_untrained_weights_follow_from_the_seed(config: Path) -> None:
    model = untrained_model(str(config), torch.float32, "cpu", 5)
    first, second = model.create(), model.create()
    other = untrained_model(str(config), torch.float32, "cpu", 6).create()
    name = "model.layers.1.mlp.up_proj.weight"
    assert first.get_parameter(name).equal(second.get_parameter(name))
    assert not first.get_parameter(name).equal(other.get_parameter(name))
    first.set_attn_implementation("eager")
    assert second.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "millions"), [("qwen2-100m", 100), ("qwen2.5-0.5b", 494), ("qwen2.5-7b", 7616)]
)
def test_a_preset_has_the_published_size(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PRESETS[name]))
    assert round(model.num_parameters() / 1e6) == millions
    assert model.config.rope_parameters["rope_theta"] == 1_000_000.0
