"""The bounds of the varied bed against distributions that are summed over all continuations."""

import json

import numpy as np
import pytest
import torch
from bench.beds.bounds import (
    BONUS_KNOWN,
    IDEAL,
    IDEAL_AT_1,
    MASKS,
    PAIR,
    Tally,
    Target,
    Text,
    all_drafts,
    marginals,
    quartiles,
)
from bench.beds.make import write_new
from bench.beds.tasks import draw_varied

from decoding.tiny_models import build_model
from mars_train.data.demo import write_demo_data

PROMPT, OUTPUT = (7, 8, 9), (4, 6, 5, 4, 6)
CHOICES = [4, 5, 6]
EOS, MASK = 2, 3


@pytest.fixture(scope="module")
def target():
    """A model that emits three tokens, each by what stands before it."""
    model = build_model("qwen2")
    model.apply(lambda part: [w.data.mul_(6) for w in part.parameters(recurse=False) if w.ndim > 1])
    others = frozenset(range(model.config.vocab_size)) - {*CHOICES}
    return Target(model, never_emitted=others, eos=frozenset({EOS}))


def probabilities(target, tokens):
    logits = target.model(torch.tensor([tokens])).logits[0, -1, CHOICES]
    return logits.double().softmax(-1)


@torch.inference_mode()
def test_marginals_are_sums_over_all_that_may_stand_between(target):
    text = Text(PROMPT, OUTPUT, temperature=1.0, seed=1)
    found_ahead, found_pair = marginals(target, text, 1.0, depths=2, rollouts=400)

    for number in range(len(OUTPUT) - 1):
        prefix = [*PROMPT, *OUTPUT[:number]]
        first = probabilities(target, prefix)
        second = torch.stack([probabilities(target, [*prefix, one]) for one in CHOICES])
        third = torch.stack(
            [torch.stack([probabilities(target, [*prefix, one, two]) for two in CHOICES])
             for one in CHOICES]
        )  # fmt: skip
        joint = first[:, None] * second
        known = joint[:, CHOICES.index(OUTPUT[number + 1])]
        behind = known @ third[:, CHOICES.index(OUTPUT[number + 1])] / known.sum()
        ahead = [first, joint.sum(0), torch.einsum("ij,ijk->k", joint, third)]

        assert found_ahead[number][:, CHOICES].numpy() == pytest.approx(
            torch.stack(ahead).numpy(), abs=0.04
        )
        assert found_pair[number, 1, CHOICES].numpy() == pytest.approx(behind.numpy(), abs=0.04)
        actual = second[CHOICES.index(OUTPUT[number])]
        assert found_pair[number, 0, CHOICES].numpy() == pytest.approx(actual.numpy(), abs=1e-4)


@torch.inference_mode()
def test_masks_of_a_deterministic_model_have_no_bound_but_the_block(target):
    tokens = list(PROMPT)
    for _ in range(13):
        tokens.append(CHOICES[int(probabilities(target, tokens).argmax())])
    text = Text(PROMPT, tuple(tokens[3:]), temperature=0.0, seed=0)
    drafts = all_drafts(target, text, depths=3, rollouts=8, mask_token_id=MASK)
    tallies = {name: Tally() for name in drafts}
    for name, chosen in drafts.items():
        tallies[name].add(chosen, text)

    assert {*tallies} == {IDEAL, BONUS_KNOWN, PAIR, IDEAL_AT_1, MASKS}
    for name in (IDEAL, BONUS_KNOWN, PAIR):
        assert tallies[name].given[0].tolist() == [4] * 9 + [4, 3, 2, 1]
        assert tallies[name].passes == [1 + 12 // 4]
    assert tallies[MASKS].passes[0] > 4  # these masks have learned nothing


def test_prefixes_are_told_apart_by_the_entropy_of_what_follows():
    chosen = quartiles([torch.tensor([0.0, 0.0, 0.0, 4.0, 4.0])], depths=1)

    assert [which[0].tolist() for which in chosen] == [
        [True, True, False, False],
        [False] * 4,
        [False, False, True, False],
        [False, False, False, True],
    ]
    tally = Tally(tokens=[5], passes=[2], given=[np.array([1, 3, 5, 7])])
    assert [cell.split()[0] for cell in tally.cells(chosen[:1])] == ["2.50", "2.00"]


def test_new_conversations_ask_what_the_data_does_not(tmp_path):
    write_demo_data(tmp_path, draw_varied, num_train=40, num_eval=5, seed=1_000)
    write_new(tmp_path / "new.jsonl", 30, tmp_path)

    def questions(name):
        rows = map(json.loads, (tmp_path / name).read_text().splitlines())
        return {row["messages"][0]["content"] for row in rows}

    new = questions("new.jsonl")
    assert len(new) == 30
    assert not new & (questions("train.jsonl") | questions("eval.jsonl"))
