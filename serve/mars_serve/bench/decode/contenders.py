"""Decodes a benchmark's requests greedily: by marsray's engine, or by Hugging Face ``generate``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
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
    num_positions: int | None = None
    """Number of positions in those passes, the prompts before their last token left out; None if it
    is not known."""

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

    Each request's ``max_tokens`` replaces that of ``options``.

    Raises:
        UserError: the engine fails a request.
    """
    running = [
        Request(each.id, list(each.prompt), replace(options, max_tokens=each.max_tokens))
        for each in requests
    ]
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


def decode_with_generate(
    requests: Sequence[BenchRequest],
    *,
    model: Callable[[], PreTrainedModel],
    special: SpecialTokens,
    batch: int,
) -> DecodedRun:
    """Decode with ``generate`` on static batches, left-padded, with its default cache.

    Requests are sorted by the length of their prompts, which saves padding. A batch, of which the
    last may be smaller, runs until its longest output is done; only the tokens that a request asked
    for count.
    """
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    outputs: dict[str, list[int]] = {}
    for start in range(0, len(ordered), batch):
        outputs |= _generate(model(), special, ordered[start : start + batch])
    decoded = [outputs[request.id] for request in requests]
    return DecodedRun(decoded, num_passes=sum(map(len, decoded)))


def _generate(
    model: PreTrainedModel, special: SpecialTokens, requests: Sequence[BenchRequest]
) -> dict[str, list[int]]:
    width = max(len(request.prompt) for request in requests)
    padding = [width - len(request.prompt) for request in requests]
    # any id will do: the attention mask hides the padding
    ids = [[0] * n + list(r.prompt) for n, r in zip(padding, requests, strict=True)]
    visible = [[0] * n + [1] * (width - n) for n in padding]
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(request.max_tokens for request in requests),
        eos_token_id=sorted(special.eos) or None,
        pad_token_id=0,
        suppress_tokens=sorted(special.never_emitted) or None,
    )
    model.generation_config = config  # a checkpoint's own would replace what is None
    output = model.generate(
        torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(visible, device=model.device),
        generation_config=config,
    )
    rows = output[:, width:].tolist()
    return {
        request.id: _own_tokens(row[: request.max_tokens], special)
        for request, row in zip(requests, rows, strict=True)
    }


def _own_tokens(tokens: list[int], special: SpecialTokens) -> list[int]:
    """Return the tokens up to the first end token; the rest is padding."""
    ends = [index for index, token in enumerate(tokens) if token in special.eos]
    return tokens[: ends[0] + 1] if ends else tokens
