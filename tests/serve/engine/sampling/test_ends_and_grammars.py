"""How outputs end and match their grammars; mode exact gives the output of mode ar."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest

from decoding.engines import output_of, run
from decoding.modes import AR, EXACT, THRESHOLD
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Sampling,
    Thinking,
    token_set,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarCompiler

# Ends


@pytest.mark.parametrize(
    ("kinds", "sampling"),
    [([AR, *EXACT], Sampling(0.8, seed=1)), ([THRESHOLD], Sampling())],
    ids=["exact", "threshold"],
)
def test_a_stop_token_ends_the_output_inside_a_run(
    engine: Engine, prompts: list[list[int]], kinds: list[DecodingOptions], sampling: Sampling
) -> None:
    """The output equals the one without the stop token, cut after it."""
    plain = replace(kinds[0], sampling=sampling)
    free = [Request(str(i), list(prompt), plain) for i, prompt in enumerate(prompts[:10])]
    run(engine, free)
    outputs, num_inside = [output_of(request) for request in free], 0
    for stop in sorted(set(outputs[0]))[::3]:
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


def test_thinking_ends_with_its_budget_though_that_ends_an_output_of_less_than_min_tokens(
    engine: Engine, prompts: list[list[int]]
) -> None:
    thinking = Thinking(begin=16, end=9, has_begun=True, may_begin=False, budget=1)
    for kind in (AR, *EXACT, THRESHOLD):
        options = replace(kind, sampling=Sampling(min_tokens=5), stop_ids=frozenset({9}))
        request = Request("r", list(prompts[0]), replace(options, thinking=thinking))
        run(engine, [request])
        assert request.finish_reason is FinishReason.STOP
        assert output_of(request)[1:] == [9]


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


@pytest.mark.parametrize(("name", "temperature"), [("schema", 0.9), ("regex", 0.0)])
def test_output_is_in_its_grammar_in_every_mode(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]], name: str, temperature: float
) -> None:
    size = checkpoint.config.vocab_size
    fresh = GrammarCompiler(checkpoint.tokenizer, size, checkpoint.special.eos)
    grammar = fresh.compile(GRAMMARS[name])

    def requests(kinds: list[DecodingOptions], max_tokens: int) -> list[Request]:
        made = []
        for index, prompt in enumerate(prompts[:12]):
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


def test_a_complete_output_ends_before_min_tokens_in_every_mode(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    """A bias keeps end tokens from being the likeliest ones."""
    bias = tuple((token, -50.0) for token in checkpoint.special.eos)
    sampling = Sampling(min_tokens=9, logit_bias=bias)
    grammar = GrammarSpec(GrammarKind.REGEX, "[0-9]{2,3}")
    requests = [
        Request(str(kind), list(prompts[0]), replace(kind, grammar=grammar, sampling=sampling))
        for kind in (AR, *EXACT, THRESHOLD)
    ]
    outputs = run(engine, requests)
    for request in requests:
        assert request.finish_reason is FinishReason.STOP, outputs[request.id][-1].error
        text = checkpoint.tokenizer.decode(output_of(request), skip_special_tokens=True)
        assert re.fullmatch("[0-9]{3}", text), "it goes on while it may"


def test_a_budget_whose_last_token_is_not_allowed_is_to_blame(
    engine: Engine, prompts: list[list[int]]
) -> None:
    thinking = Thinking(begin=16, end=9, has_begun=True, may_begin=False, budget=1)
    options = replace(AR, sampling=Sampling(allowed_ids=token_set([4, 5])), thinking=thinking)
    *_, output = run(engine, [Request("r", list(prompts[0]), options)])["r"]
    assert output.error == (
        "thinking_token_budget: allowed_token_ids or bad_words forbid the token that ends "
        "thinking, or all that may follow; leave that field or this one out"
    )


def test_bad_words_are_to_blame_where_they_forbid_all_that_a_grammar_allows(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    plus, other = checkpoint.tokenizer.convert_tokens_to_ids(["+", "A"])
    sampling = Sampling(bad_words=((plus,),), logit_bias=((other, 100.0),))
    grammar = GrammarSpec(GrammarKind.REGEX, "[+]")
    request = Request("r", list(prompts[0]), replace(AR, grammar=grammar, sampling=sampling))
    (output,) = run(engine, [request])["r"]
    assert output.error == (
        "bad_words: they forbid all that may follow the output so far; leave some out"
    )
