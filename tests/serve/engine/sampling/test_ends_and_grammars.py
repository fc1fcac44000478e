"""How outputs end and match their grammars; mode exact gives the output of mode ar."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from decoding.engines import output_of, run
from decoding.modes import AR, EXACT, MAX_TOKENS, THRESHOLD
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Sampling,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarCompiler

# Ends


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1)])
@pytest.mark.parametrize("kinds", [[AR, *EXACT], [THRESHOLD]], ids=["exact", "threshold"])
def test_a_stop_token_ends_the_output_inside_a_run(
    engine: Engine, prompts: list[list[int]], kinds: list[DecodingOptions], sampling: Sampling
) -> None:
    """The output equals the one without the stop token, cut after it."""
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
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]], name: str, temperature: float
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
    """After the digits only the mask fits, which is never emitted."""
    assert engine.checkpoint.metadata is not None
    mask = engine.checkpoint.metadata.mask_token_id
    grammar = GrammarSpec(GrammarKind.LARK, f'start: "4444" <[{mask}]>', frozenset({mask}))
    victim = Request("victim", list(prompts[0]), replace(kind, grammar=grammar))
    kinds = [AR, *EXACT, replace(EXACT[0], grammar=GRAMMARS["regex"])]
    together, alone = (
        [Request(str(i), list(prompts[i]), options) for i, options in enumerate(kinds)]
        for _ in range(2)
    )
    for request in alone:
        run(engine, [request])
    passes = run(engine, [*together[:3], victim, *together[3:]])
    assert victim.finish_reason is FinishReason.REFUSED
    assert (passes["victim"][-1].error or "").startswith("grammar: ")
    assert engine.checkpoint.tokenizer.decode(output_of(victim)) == "4444"  # all before counts
    for one, other in zip(together, alone, strict=True):
        assert output_of(one) == output_of(other)
        assert one.finish_reason is other.finish_reason
    assert engine.status().num_free_pages == engine.num_pages
