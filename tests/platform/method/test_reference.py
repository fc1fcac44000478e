from itertools import product

import pytest
import torch

from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence
from mars_platform.method.reference import decode
from mars_platform.method.rules import confidence

MASK, PAD = 60, 0
PLAIN = SpecialTokens(eos=frozenset(), never_emitted=frozenset({MASK, PAD}))
PROMPTS = [[5, 9, 33], [7], [12, 44, 2, 19, 58, 31, 8]]
ALWAYS = 1e-12  # a threshold that every proposal reaches


@pytest.fixture(scope="module")
def model():
    return build_model(seed=3, intermediate_size=48, initializer_range=0.4)


def windowed(model, prompt, special=PLAIN, threshold=ALWAYS, max_tokens=24, num_masks=3, **options):
    return decode(
        model,
        prompt,
        special,
        max_tokens=max_tokens,
        threshold=threshold,
        num_masks=num_masks,
        mask_token_id=MASK,
        **options,
    )


@pytest.fixture
def fed(model):
    """Token ids of every forward pass."""
    calls = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    yield calls
    handle.remove()


def generate(model, prompt, num_tokens, **options):
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        suppress_tokens=[MASK, PAD],
        pad_token_id=PAD,
        **options,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_threshold_one_equals_greedy_generation(model, prompt):
    decoded = windowed(model, prompt, threshold=1.0)
    assert decoded.tokens == generate(model, prompt, 24)
    assert [len(tokens) for tokens in decoded.passes] == [1] * 24
    assert len(set(decoded.tokens)) > 3  # the model does not merely repeat itself


def test_threshold_one_needs_and_feeds_no_mask(model, fed):
    decoded = windowed(model, PROMPTS[0], threshold=1.0, max_tokens=3)
    assert fed == [PROMPTS[0] + decoded.tokens[:num] for num in range(3)]
    assert decode(model, PROMPTS[0], PLAIN, max_tokens=3) == decoded
    assert windowed(model, PROMPTS[0], max_tokens=3, num_masks=0) == decoded


def plain_pass(model, committed, threshold, measure):
    """Tokens of one pass, by a plain loop over depths that ends at the first unsure one."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([committed + [MASK] * 3])).logits[0]
    run = []
    for scores in logits[len(committed) - 1 :]:
        allowed = [token for token in range(64) if token not in PLAIN.never_emitted]
        best = max(allowed, key=lambda token, scores=scores: float(scores[token]))
        if run and float(confidence(scores, torch.tensor(best), measure)) < threshold:
            break
        run.append(best)
    return run


@pytest.mark.parametrize(
    ("measure", "threshold"),
    [
        *product([Confidence.PROBABILITY, Confidence.MARGIN], [0.25, 0.4, 0.6]),
        *product([Confidence.ENTROPY], [0.05, 0.1, 0.2]),
    ],
)
def test_passes_equal_those_of_a_plain_loop(model, threshold, measure):
    lengths = set()
    for prompt in PROMPTS:
        options = {} if measure is Confidence.PROBABILITY else {"measure": measure}  # the default
        decoded = windowed(model, prompt, threshold=threshold, max_tokens=40, **options)
        committed = list(prompt)
        for tokens in decoded.passes[:-1]:  # max_tokens may cut the last one
            assert tokens == plain_pass(model, committed, threshold, measure)
            committed += tokens
        lengths |= {len(tokens) for tokens in decoded.passes}
    assert len(lengths) > 1  # runs of more than one length occurred


@pytest.mark.parametrize(
    ("values", "masks", "lengths"),
    [
        ({"num_masks": [0, 3, 1, 5]}, [0, 3, 1, 5], [1, 4, 2, 5]),
        ({"threshold": [ALWAYS, 1.0, 1.0, ALWAYS]}, [3, 0, 0, 3], [4, 1, 1, 4]),
    ],
)
def test_each_pass_uses_its_own_window_and_threshold(model, fed, values, masks, lengths):
    decoded = windowed(model, PROMPTS[0], max_tokens=sum(lengths), **values)
    assert [len(tokens) for tokens in decoded.passes] == lengths
    assert [ids.count(MASK) for ids in fed] == masks


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_masks": [3, 3]}, "num_masks: those of 2 passes"),
        ({"threshold": [1.0]}, "threshold: those of 1 passes"),
    ],
)
def test_too_short_a_sequence_of_values_is_refused(model, values, message):
    with pytest.raises(UserError, match=message):
        windowed(model, PROMPTS[0], max_tokens=9, **values)


def test_an_end_token_inside_a_run_cuts_it(model):
    first = windowed(model, PROMPTS[0]).passes[0]
    end = next(token for token in first[1:-1] if token != first[0])
    special = SpecialTokens(frozenset({end}), PLAIN.never_emitted)
    decoded = windowed(model, PROMPTS[0], special)
    assert decoded.passes == [first[: first.index(end) + 1]]
    assert len(decoded.tokens) < len(first)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 11])
def test_max_tokens_cuts_the_last_pass(model, max_tokens):
    free = windowed(model, PROMPTS[2], max_tokens=40)
    decoded = windowed(model, PROMPTS[2], max_tokens=max_tokens)
    assert decoded.tokens == free.tokens[:max_tokens]
    assert len(decoded.passes) == -(-max_tokens // 4)  # four tokens a pass


@pytest.mark.parametrize("threshold", [ALWAYS, 1.0])
def test_banned_tokens_are_never_emitted(model, threshold):
    free = windowed(model, PROMPTS[0], threshold=threshold)
    banned = frozenset({MASK, PAD, *free.tokens[:4]})
    decoded = windowed(model, PROMPTS[0], SpecialTokens(frozenset(), banned), threshold=threshold)
    assert len(decoded.tokens) == 24
    assert not banned & set(decoded.tokens)
