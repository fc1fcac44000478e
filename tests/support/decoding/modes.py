"""Options of the decoding modes, and runs of an engine, for tests that compare the modes."""

from __future__ import annotations

from collections import defaultdict

from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

MAX_TOKENS = 26
AR = DecodingOptions(MAX_TOKENS, Mode.AR)
EXACT = [
    DecodingOptions(MAX_TOKENS, Mode.EXACT),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.ALL),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.LAST),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.ALL, window=2),
]
THRESHOLD = DecodingOptions(MAX_TOKENS, threshold=0.6, window=4)
Passes = dict[str, list[StepOutput]]
"""The outputs of each request, by its id."""


def output_of(request: Request) -> list[int]:
    """Return the output tokens of a request."""
    return request.tokens[request.num_prompt :]


def run(engine: Engine, requests: list[Request]) -> Passes:
    """Run requests together to their ends, and check that no page leaks."""
    passes = defaultdict[str, list[StepOutput]](list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            passes[output.request_id].append(output)
    engine.check_integrity()
    return passes
