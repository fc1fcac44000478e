"""Computes log-likelihoods of outputs under the model in plain AR decoding."""

import math
from collections.abc import Callable, Sequence

from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import steps_of

PromptAndOutput = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its output, at least one each."""

_SCORE_ONLY = DecodingOptions(0, Mode.AR, num_prompt_logprobs=0)


def log_likelihoods(
    engine: Engine, texts: Sequence[PromptAndOutput], on_progress: Callable[[int], None]
) -> list[float]:
    """Return the log-likelihood of each output given its prompt, in nats, end token included.

    The engine has no other requests, and its context fits each text. ``on_progress`` gets the
    number of finished texts whenever it has grown.
    """
    requests = (
        Request(str(index), [*prompt, *output], _SCORE_ONLY)
        for index, (prompt, output) in enumerate(texts)
    )
    found: list[list[float]] = [[] for _ in texts]
    num_done = 0
    for outputs in steps_of(engine, requests):
        num_before = num_done
        for step in outputs:
            found[int(step.request_id)] += [entry.logprob for entry in step.prompt_logprobs]
            num_done += step.finish_reason is not None
        if num_done > num_before:
            on_progress(num_done)
    for (prompt, output), line in zip(texts, found, strict=True):
        assert len(line) == len(prompt) + len(output) - 1, "each token but the first has a number"
    return [math.fsum(line[-len(out) :]) for (_, out), line in zip(texts, found, strict=True)]
