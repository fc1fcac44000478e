"""Output in mode exact is that of mode ar, whatever the request's own text drafts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from decoding.engines import output_of, run
from decoding.tiny_models import build_model
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    GrammarKind,
    GrammarSpec,
    Outcomes,
    Sampling,
    token_set,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

TIMES = StepTimes((1, 256), (0,), ((10.0,), (20.0,)))
FEW = frozenset(range(5, 10))
SAMPLINGS = {
    "greedy": Sampling(allowed_ids=token_set(FEW)),
    "sampled": Sampling(0.7, top_p=0.95),
    "penalised": Sampling(0.3, frequency_penalty=0.1),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"enum": ["alice", "bob"]},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["customer", "quantity"],
    "additionalProperties": False,
}
GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def requests_of(prompts: list[list[int]], options: DecodingOptions) -> list[Request]:
    """Return one request for each prompt, each with a seed of its own."""
    return [
        Request(
            str(index),
            list(prompt),
            replace(options, sampling=replace(options.sampling, seed=index)),
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("adapts", [True, False])
def test_a_plain_checkpoint_decodes_exactly_and_faster_from_its_own_text(
    checkpoint: Checkpoint, *, name: str, adapts: bool
) -> None:
    """A random model with few tokens to choose from falls into loops, which its text foresees."""
    plain = replace(checkpoint, metadata=None, calibration=None)
    vocabulary = checkpoint.config.vocab_size
    model = build_model(vocab_size=vocabulary, seed=3)
    settings = EngineSettings(max_num_seqs=6, num_pages=24, page_size=8, num_lookup_drafts=16)
    engine = Engine(plain, settings, model=model)
    if adapts:
        engine.adapt_windows(TIMES)
    prompts = [[(index * 7 + place * place) % 50 + 5 for place in range(12)] for index in range(8)]
    options = DecodingOptions(48, Mode.AR, sampling=SAMPLINGS[name], ignore_eos=True)
    ones = requests_of(prompts, options)
    run(engine, ones)
    several = requests_of(prompts, replace(options, mode=Mode.EXACT))
    passes = run(engine, several)
    assert [output_of(each) for each in several] == [output_of(each) for each in ones]
    assert engine.status().num_preemptions > 0
    num_passes = sum(map(len, passes.values()))
    assert name != "greedy" or sum(len(output_of(each)) for each in several) > 1.5 * num_passes


def test_a_plain_checkpoint_that_may_not_look_up_decodes_in_mode_ar_only(
    checkpoint: Checkpoint,
) -> None:
    plain = replace(checkpoint, metadata=None, calibration=None)
    engine = Engine(plain, EngineSettings(num_pages=8, num_lookup_drafts=0))
    with pytest.raises(UserError, match=r"mode 'exact'; use mode 'ar'$"):
        engine.check(Request("r", [5, 6], DecodingOptions(4, Mode.EXACT)))


def test_fewer_steps_are_needed_with_drafts_from_the_text(
    checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    num_passes, outputs = [], []
    for num_drafts in (0, 16):
        settings = EngineSettings(num_pages=200, num_lookup_drafts=num_drafts)
        engine = Engine(checkpoint, settings)
        engine.adapt_windows(TIMES)
        requests = requests_of(
            [2 * prompt for prompt in prompts[:12]], DecodingOptions(40, Mode.EXACT)
        )
        num_passes.append(sum(map(len, run(engine, requests).values())))
        outputs.append([output_of(each) for each in requests])
    assert outputs[0] == outputs[1]
    assert num_passes[1] < num_passes[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("outcomes", [None, Outcomes.ALL])
def test_masks_propose_what_the_grammar_allows(
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    outcomes: Outcomes | None,
    temperature: float,
) -> None:
    engine = Engine(checkpoint, EngineSettings(num_pages=200))
    sampling = Sampling(temperature)
    options = DecodingOptions(40, Mode.EXACT, outcomes=outcomes, sampling=sampling, grammar=GRAMMAR)
    ones = requests_of(prompts[:8], replace(options, mode=Mode.AR, outcomes=None))
    run(engine, ones)
    requests = requests_of(prompts[:8], options)
    for request in requests:
        engine.add(request)
    num_drafts = num_right = 0
    while engine.has_work:
        before = {request.id: request.num_output for request in requests}
        for output in engine.step():
            request = requests[int(output.request_id)]
            num_right += request.num_output - before[request.id] - 1
            if output.finish_reason is not None or request.matcher is None:
                continue
            tokens = list[int]()
            for draft in request.drafts[: request.num_own_drafts]:
                allowed = request.matcher.allowed_after(tokens)
                if allowed is None:
                    break  # the output may have ended
                assert allowed[draft.token]
                tokens.append(draft.token)
                num_drafts += 1
        engine.check_integrity()
    assert [output_of(each) for each in requests] == [output_of(each) for each in ones]
    assert num_drafts > 50
    assert num_right > 0
