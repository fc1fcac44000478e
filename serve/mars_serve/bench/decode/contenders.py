"""Decodes a benchmark's requests by the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mars_platform.errors import UserError
from mars_serve.bench.decode.drawing import DrawingEngine
from mars_serve.bench.decode.models import BenchModel
from mars_serve.bench.decode.workload import BenchRequest, Draws
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import decoding_positions, settings_with_room


@dataclass(frozen=True)
class DecodedRun:
    """The result of one run over all requests."""

    outputs: list[list[int]]
    """Output tokens of each request, end token included, in the order of the requests."""
    num_passes: int
    """Number of forward passes, counted for each request from its first token to its last."""
    num_positions: int
    """Number of positions in those passes, the prompts before their last token left out."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return sum(map(len, self.outputs))


Contender = Callable[[Sequence[BenchRequest]], DecodedRun]
"""A way to decode at one batch size, which is called once for each run."""


def build_engine(
    model: BenchModel,
    requests: Sequence[BenchRequest],
    batch: int,
    draws: Draws | None = None,
    *,
    exact: bool = False,
) -> Engine:
    """Build an engine with pages for any ``batch`` of the requests, and warm it up.

    The engine gets a copy of the model. ``draws``, if any, replace the acceptance rule. With
    ``exact``, steps of mode exact, which are wider, are expected.
    """
    settings = settings_with_room(
        model.checkpoint,
        [len(request.prompt) + request.max_tokens for request in requests],
        max_num_seqs=batch,
        exact=exact,
        device=model.device,
    )
    make: Callable[..., Engine] = partial(DrawingEngine, draws=draws) if draws else Engine
    engine = make(
        model.checkpoint,
        # rounds repeat the same prompts, whose keys and values must not be found again
        settings.model_copy(update={"enable_prefix_caching": False}),
        model=model.create(),
        device=model.device,
    )
    engine.warm_up()
    return engine


def decode_with_engine(
    requests: Sequence[BenchRequest],
    *,
    engine: Callable[[], Engine],
    options: DecodingOptions,
) -> DecodedRun:
    """Decode with marsray's engine, which gets all requests at once and admits them as others end.

    Each request's ``max_tokens`` replaces that of ``options``, and its place the sampling's seed.
    """
    running = []
    for place, each in enumerate(requests):
        sampling = replace(options.sampling, seed=place)
        own = replace(options, max_tokens=each.max_tokens, sampling=sampling)
        running.append(Request(each.id, list(each.prompt), own))
    passes: dict[str, list[StepOutput]] = {request.id: [] for request in running}
    for request in running:
        engine().add(request)
    while engine().has_work:
        for output in engine().step():
            if output.error is not None:
                raise UserError(f"mode {options.mode}: the engine fails: {output.error}")
            passes[output.request_id].append(output)
    return DecodedRun(
        outputs=[request.tokens[request.num_prompt :] for request in running],
        num_passes=sum(map(len, passes.values())),
        num_positions=sum(map(decoding_positions, passes.values())),
    )
