"""A grammar that fails or takes long in use harms its own request alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decoding.engines import output_of, run
from decoding.grammar_specs import ambiguous, regex
from decoding.modes import AR, EXACT, THRESHOLD
from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Sampling,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarCompiler, GrammarLimits
from mars_serve.engine.sampling.grammar_budget import GrammarBudget
from mars_serve.engine.settings import EngineSettings

# Each passes its trial. The first fails when its second token is taken, the second when the tokens
# behind that one are looked for.
FAILING = {
    "taking": ambiguous("D D x", 900),
    "looking": ambiguous('D D ("1" x | "2" x | "3" x)', 900),
}


def ended(engine: Engine, request: Request) -> StepOutput:
    """Run one request alone and return its last output."""
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    return outputs[-1]


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("kind", [AR, THRESHOLD], ids=["ar", "threshold"])
def test_grammars_that_fail_do_not_count_as_failed_steps(
    engine: Engine, prompts: list[list[int]], name: str, kind: DecodingOptions
) -> None:
    """In mode threshold they fail in the first step, which no step that succeeds comes before."""
    for number in range(5):  # an engine gives up after three steps that fail altogether
        options = replace(kind, grammar=FAILING[name])
        last = ended(engine, Request(str(number), list(prompts[number]), options))
        assert last.finish_reason is FinishReason.REFUSED
        assert (last.error or "").startswith("grammar: it failed while the output was written (")
    assert engine.status().num_free_pages == engine.num_pages


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("kind", [AR, EXACT[0], THRESHOLD], ids=["ar", "exact", "threshold"])
def test_the_other_rows_of_its_step_go_on(
    engine: Engine, prompts: list[list[int]], name: str, kind: DecodingOptions
) -> None:
    kinds = [AR, *EXACT[:2], replace(EXACT[0], grammar=regex("[0-9]+ is"))]
    together, alone = (
        [Request(str(i), list(prompts[i]), options) for i, options in enumerate(kinds)]
        for _ in range(2)
    )
    for request in alone:
        run(engine, [request])
    victims = [
        Request(f"victim {i}", list(prompts[i]), replace(kind, grammar=FAILING[name]))
        for i in range(2)
    ]
    embedding, calls = engine._runner.model.get_input_embeddings(), list[None]()
    hook = embedding.register_forward_hook(lambda *_: calls.append(None))
    passes_before = engine.status().num_forward_passes
    run(engine, [*victims, *together])
    hook.remove()
    assert {victim.finish_reason for victim in victims} == {FinishReason.REFUSED}
    assert [output_of(request) for request in together] == [output_of(one) for one in alone]
    assert len(calls) == engine.status().num_forward_passes - passes_before, "no step ran twice"


def test_waiting_for_time_does_not_change_outputs(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests() -> list[Request]:
        grammar = regex("[0-9]{1,3}( plus| minus| is)+ [0-9]{1,9}")
        kinds = [replace(kind, grammar=grammar) for kind in (AR, AR, *EXACT)]
        return [
            Request(str(i), list(prompts[i]), replace(kind, sampling=Sampling(0.8, seed=i)))
            for i, kind in enumerate([*kinds, AR, EXACT[0]])
        ]

    plain, waiting = requests(), requests()
    run(engine, plain)
    before = engine.status().num_forward_passes
    monkeypatch.setattr(engine._runner, "_grammars", GrammarBudget(step_s=1e-4, light_s=0.0))
    run(engine, waiting)
    assert engine.status().num_forward_passes - before > max(each.num_output for each in plain)
    assert [output_of(each) for each in waiting] == [output_of(each) for each in plain]


def test_a_checked_request_is_added_without_compiling(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """The stepping thread adds requests, and compiling would hold it."""
    request = Request("one", list(prompts[0]), replace(AR, grammar=regex("[ab]{3}c")))
    engine.check(request)
    matcher = request.matcher
    assert matcher is not None
    engine.add(request)
    assert request.matcher is matcher
    engine.cancel(request.id)


@pytest.mark.parametrize("kind", [AR, EXACT[0], THRESHOLD], ids=["ar", "exact", "threshold"])
def test_a_grammar_that_leaves_no_token_ends_its_request_behind_what_fits(
    engine: Engine, prompts: list[list[int]], kind: DecodingOptions
) -> None:
    """After the digits only the mask fits, which is never emitted."""
    assert engine.checkpoint.metadata is not None
    mask = engine.checkpoint.metadata.mask_token_id
    grammar = GrammarSpec(GrammarKind.LARK, f'start: "4444" <[{mask}]>', frozenset({mask}))
    request = Request("victim", list(prompts[0]), replace(kind, grammar=grammar))
    last = ended(engine, request)
    assert last.finish_reason is FinishReason.REFUSED
    assert (last.error or "").startswith("grammar: ")
    assert engine.checkpoint.tokenizer.decode(output_of(request)) == "4444"


@pytest.mark.parametrize("kind", [AR, EXACT[0], THRESHOLD], ids=["ar", "exact", "threshold"])
def test_an_output_that_uses_up_a_grammars_states_fails_alone(
    mars_dir: Path, kind: DecodingOptions
) -> None:
    """All outputs of a grammar share the states of its lexer until these are used up."""
    checkpoint = read_checkpoint(mars_dir)
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=6, num_pages=64))
    tokenizer, ends = checkpoint.tokenizer, checkpoint.special.eos
    limits = GrammarLimits(num_states=120)
    engine.grammars = GrammarCompiler(tokenizer, checkpoint.config.vocab_size, ends, limits)
    # needs as many states as there are runs of a and b, and few for a text that begins with c
    grammar = regex("(a|b)*a(a|b){12}!|c[0-9 ]{40}")

    def request(name: str, seed: int, bias: float) -> Request:
        of_runs = tokenizer.convert_tokens_to_ids(["a", "b"])
        biases = tuple((token, bias) for token in of_runs)
        sampling = Sampling(1.0, seed=seed, logit_bias=biases)
        options = replace(kind, max_tokens=90, sampling=sampling, grammar=grammar)
        return Request(f"{name} {seed}", tokenizer.encode("What is 3"), options)

    alone = [request("alone", seed, -100.0) for seed in range(3)]
    for each in alone:
        run(engine, [each])
    good = [request("good", seed, -100.0) for seed in range(3)]
    bad = [request("bad", seed, 100.0) for seed in range(3)]
    run(engine, [*good, *bad])
    assert [each.finish_reason for each in good] == [FinishReason.STOP] * 3
    assert [each.finish_reason for each in bad] == [FinishReason.REFUSED] * 3
    assert [output_of(each) for each in good] == [output_of(each) for each in alone]
