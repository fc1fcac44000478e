"""Grammars are tried in a process that is ended when they take too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from decoding.grammar_specs import VOCABULARY, lark, regex, schema
from mars_platform.errors import UserError
from mars_serve.engine.sampling import grammar_trial
from mars_serve.engine.sampling.grammar import (
    GrammarCompiler,
    GrammarLimits,
    _start_with_stack,
)

LIMITS = GrammarLimits(compile_s=0.4, compile_bytes=2**28)
PATTERNS = {f"^{chr(97 + i // 26)}{chr(97 + i % 26)}.*$": {"type": "string"} for i in range(400)}
ENDLESS = schema({"type": "object", "patternProperties": PATTERNS})
"""A schema of 11 kB that compiles for many seconds; each pair of patterns is compared."""


@pytest.fixture(scope="module")
def isolated(tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, LIMITS)
    compiler.isolate()
    yield compiler
    compiler.close()


def trial_process() -> psutil.Process:
    (process,) = [
        child
        for child in psutil.Process().children()
        if any(part.endswith("grammar_trial") for part in child.cmdline())
    ]
    return process


def test_usable_and_unusable_grammars_are_told_apart(isolated: GrammarCompiler) -> None:
    assert isolated.compile(regex("a+")).matcher().allowed().any()
    assert isolated.compile(schema({"type": "object"})).matcher().allowed().any()
    with pytest.raises(UserError, match=r"^grammar: the regular.*unclosed group"):
        isolated.compile(regex("(a"))
    with pytest.raises(UserError, match="no token that may come next"):
        isolated.compile(schema({"$ref": "#"}))


def test_a_grammar_that_takes_too_long_is_refused_and_remembered(
    isolated: GrammarCompiler,
) -> None:
    with pytest.raises(UserError, match=r"cannot be used \(compiling it takes more than 0\.4 s"):
        isolated.compile(ENDLESS)
    process = trial_process()
    process.suspend()  # nothing is tried again
    with pytest.raises(UserError, match=r"more than 0\.4 s"):
        isolated.compile(ENDLESS)
    process.resume()
    assert isolated.compile(regex("b+")).matcher().allowed().any()


def test_a_small_grammar_does_not_wait_for_large_ones(isolated: GrammarCompiler) -> None:
    """They compile side by side, and one grammar for several requests once."""
    large = [schema({**PATTERNS, "title": str(i), "patternProperties": PATTERNS}) for i in range(2)]
    with ThreadPoolExecutor(5) as pool:
        slow = [pool.submit(isolated.compile, spec) for spec in large]
        small = [pool.submit(isolated.compile, regex("small")) for _ in range(3)]
        first, *others = (future.result() for future in small)
        assert not any(future.done() for future in slow)
        assert all(other is first for other in others)
        assert all(isinstance(future.exception(), UserError) for future in slow)


def test_a_grammar_that_needs_too_much_memory_is_refused(
    tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    limits = GrammarLimits(compile_bytes=2**25, compile_fuel=10**7, compile_s=20)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, limits)
    compiler.isolate()
    doubling = "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(20))
    with pytest.raises(UserError, match="or 32 MiB"):
        compiler.compile(lark(f'start: A0\n{doubling}\nA20: "a"'))
    compiler.close()


def test_the_process_is_started_again(isolated: GrammarCompiler) -> None:
    isolated.compile(regex("c"))
    process = trial_process()
    process.kill()
    process.wait(10)
    assert isolated.compile(regex("d")).matcher().allowed().any()
    assert trial_process().pid != process.pid


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_that_hangs_or_dies_in_a_trial_is_replaced(
    isolated: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    isolated.compile(regex("e"))
    process = trial_process()
    process.suspend()
    if not is_killed:
        monkeypatch.setattr(grammar_trial, "_WAIT_S", 1)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(isolated.compile, regex(f"{is_killed}{i}")) for i in range(2)]
        with pytest.raises(TimeoutError):
            waiting[0].result(timeout=0.3)
        monkeypatch.undo()  # the next process may take its time
        if is_killed:
            process.kill()
        assert all(future.result().matcher().allowed().any() for future in waiting)
    assert trial_process().pid != process.pid


def test_a_grammar_is_not_blamed_for_a_process_that_cannot_run(
    tokenizer: PreTrainedTokenizerBase, ends: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, LIMITS)
    compiler.isolate()
    with monkeypatch.context() as broken:
        broken.setattr(grammar_trial.sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="does not answer"):
            compiler.compile(regex("a"))
    assert compiler.compile(regex("a")).matcher().allowed().any()
    compiler.close()


def test_closing_ends_the_process(tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, LIMITS)
    compiler.close()
    compiler.isolate()
    before = set(psutil.Process().children())
    compiler.compile(regex("a"))
    (process,) = set(psutil.Process().children()) - before
    compiler.close()
    assert not process.is_running()


def test_compiling_gives_way_to_steps(isolated: GrammarCompiler) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    thread = _start_with_stack(lambda: os.getpriority(os.PRIO_PROCESS, 0), 2**20)
    assert thread.result() == min(own + grammar_trial.NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    isolated.compile(regex("[ab]+"))
    assert trial_process().nice() == min(own + grammar_trial.NICENESS, 19)
