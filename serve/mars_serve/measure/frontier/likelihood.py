"""Log-likelihoods of outputs under the model in plain AR decoding. Knows no text and no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a prompt and of an output, at least one each."""

_SCORE_ONLY = DecodingOptions(0, Mode.AR, num_prompt_logprobs=0)


def log_likelihoods(
    engine: Engine, texts: Sequence[Text], on_progress: Callable[[int], None]
) -> list[float]:
    """Log-likelihood of each output behind its prompt, in nats, the end token's included.

    Args:
        engine: without other requests; each text fits its context.
        texts: none at all is fine.
        on_progress: called with the number of finished texts whenever some have finished.
    """
    assert not engine.has_work, "scoring has its engine to itself"
    waiting = iter(enumerate(texts))
    found: list[list[float]] = [[] for _ in texts]
    num_added = num_done = 0
    while num_done < len(texts):
        room = 2 * engine.settings.max_num_seqs - (num_added - num_done)
        for index, (prompt, output) in islice(waiting, room):
            engine.add(Request(str(index), [*prompt, *output], _SCORE_ONLY))
            num_added += 1
        num_before = num_done
        for step in engine.step():
            found[int(step.request_id)] += [entry.logprob for entry in step.prompt_logprobs]
            num_done += step.finish_reason is not None
        if num_done > num_before:
            on_progress(num_done)
    return [_of_output(*text, line) for text, line in zip(texts, found, strict=True)]


def _of_output(prompt: Sequence[int], output: Sequence[int], found: Sequence[float]) -> float:
    assert len(found) == len(prompt) + len(output) - 1, "each token but the first has a number"
    return math.fsum(found[-len(output) :])
