"""Decodes held-out items through the engine in one setting after the other.

Items and decoded items are plain data: a set can be split over processes, and its parts put
together in any order. Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import islice

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.metadata import locate_model
from mars_platform.checkpoint.number_type import NumberType, stored_dtype
from mars_platform.data.conversations import is_correct
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.api.text import decode
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason, Outcomes, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.items import EvalItem

_NUM_SEEDS = 2**63


@dataclass(frozen=True)
class DecodingSetting:
    """One way of decoding."""

    mode: Mode
    threshold: float
    """τ in (0, 1]; only mode threshold uses it."""
    outcomes: Outcomes | None = None
    """Outcomes that get masks in mode exact; None leaves the choice to the engine."""
    window: int | None = None
    """Masks of a step, in mode exact of each outcome; None for as many as the model knows."""
    calibrated: bool = False
    """Whether τ is compared with the calibrated confidence."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling parameters; an item's seed is theirs plus the item's index."""

    def sampled(self, temperature: float, seed: int) -> DecodingSetting:
        """Return the same setting at a temperature, 0 for greedy, with the seed of its noise."""
        sampling = replace(self.sampling, temperature=temperature, seed=seed)
        return replace(self, sampling=sampling)


ONE_TOKEN = DecodingSetting(Mode.AR, 1.0)


@dataclass(frozen=True)
class DecodedItem:
    """The output of one item in one setting."""

    source: str
    tokens: tuple[int, ...]
    """Output tokens, the end token included."""
    num_passes: int
    num_positions: int
    """Number of positions in those passes; see `decoding_positions`."""
    finish_reason: FinishReason
    correct: bool | None
    """Whether the output is correct; None if the item has no answer."""

    @property
    def is_whole(self) -> bool:
        """Whether the output ended at an end token or its limit, and not by a failure."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.tokens)


def device_and_dtype(device: str, dtype: NumberType | None, model: str) -> tuple[str, NumberType]:
    """Return the device to run on, for ``auto`` CUDA if there is one, and the type of the weights.

    Without a ``dtype`` it is the one that the weights of ``model``, a directory or hub id, are
    stored in, as a server takes it.

    Raises:
        UserError: the device is ``cuda`` and there is none, or the model's type is not known.
    """
    return available_device(device), dtype or stored_dtype(locate_model(model))


def available_device(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for a device, which may be ``auto``: CUDA if there is one."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device: there is no CUDA device on this machine; use cpu")
    return "cuda" if available and device != "cpu" else "cpu"


def evaluation_engine(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    *,
    max_tokens: int,
    max_num_seqs: int,
    exact: bool = False,
    min_pool_tokens: int = 1,
    model: PreTrainedModel | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Engine:
    """Build an engine with pages for any ``max_num_seqs`` of the items at once.

    An output has at most ``max_tokens``; the context may leave fewer. ``exact`` says whether a
    setting is of mode exact, whose steps are wider, and pages hold ``min_pool_tokens`` at least. A
    ``model`` is taken over: the engine moves it, sets it to evaluation and changes its attention,
    so one in training must be copied first. Without it, the weights are loaded.
    """
    settings = settings_with_room(
        checkpoint,
        [min(len(item.prompt) + max_tokens, checkpoint.max_length) for item in items],
        max_num_seqs=max_num_seqs,
        exact=exact,
        min_pool_tokens=min_pool_tokens,
        device=device,
    )
    if model is not None:
        model = model.eval()
    return Engine(checkpoint, settings, model=model, dtype=dtype, device=device)


def settings_with_room(
    checkpoint: Checkpoint,
    lengths: Sequence[int],
    *,
    max_num_seqs: int,
    exact: bool,
    min_pool_tokens: int = 1,
    device: str,
) -> EngineSettings:
    """Return settings with pages for any ``max_num_seqs`` requests and positions for their masks.

    ``lengths`` are the tokens of each request that will be run, prompt and output together.
    ``exact`` says whether one decodes in mode exact, whose steps are wider; pages hold
    ``min_pool_tokens`` at least.
    """
    defaults = EngineSettings()
    page_size = defaults.page_size_on(torch.device(device).type)
    pages = [-(-length // page_size) for length in lengths]
    window = checkpoint.metadata.block_size if checkpoint.metadata else 0
    return EngineSettings(
        num_pages=max(sum(nlargest(max_num_seqs, pages)), -(-min_pool_tokens // page_size)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(
            defaults.max_num_batched_tokens, max_num_seqs * widest_row(window, exact=exact)
        ),
    )


def widest_row(window: int, *, exact: bool) -> int:
    """Return the most positions that a decoding row uses, with room for all of its masks.

    In mode threshold these are up to window + 1 uncached tokens and the masks; in mode exact, the
    pending token, the drafts, and a mask group for each outcome.
    """
    return (window + 1) ** 2 if exact else 2 * window + 1


def steps_of(engine: Engine, requests: Iterable[Request]) -> Iterator[list[StepOutput]]:
    """Run requests in an engine without others, and yield the outputs of each step.

    Between two steps any of the requests may be cancelled.
    """
    assert not engine.has_work, "a measurement has its engine to itself"
    waiting = iter(requests)
    while True:
        # Twice the batch keeps the batch full, and memory does not grow with the number of items.
        room = 2 * engine.settings.max_num_seqs - engine.status().num_requests
        for request in islice(waiting, room):
            engine.add(request)
        if not engine.has_work:
            return
        yield engine.step()


def run_setting(
    engine: Engine,
    items: Sequence[EvalItem],
    setting: DecodingSetting,
    *,
    max_tokens: int,
    on_progress: Callable[[int, str], None] | None = None,
) -> list[DecodedItem]:
    """Decode every item, batched, in an engine without other requests; see `evaluation_engine`.

    ``on_progress`` gets the number of finished items whenever it has grown, and their quality and
    speed so far in words. The decoded items are in the order of the items.
    """
    running: dict[str, Request] = {}
    passes: list[list[StepOutput]] = [[] for _ in items]
    decoded: dict[int, DecodedItem] = {}

    def requests() -> Iterator[Request]:
        for index, item in enumerate(items):
            options = _options(item, setting, min(max_tokens, engine.max_length - len(item.prompt)))
            running[str(index)] = Request(str(index), list(item.prompt), options)
            yield running[str(index)]

    for outputs in steps_of(engine, requests()):
        num_before = len(decoded)
        for output in outputs:
            index = int(output.request_id)
            passes[index].append(output)
            if output.finish_reason is not None:
                request = running.pop(output.request_id)
                decoded[index] = _decoded_item(engine, items[index], request, passes[index])
        if on_progress is not None and len(decoded) > num_before:
            on_progress(len(decoded), _words(decoded.values()))
    engine.check_integrity()
    return [decoded[index] for index in range(len(items))]


def _words(decoded: Collection[DecodedItem]) -> str:
    checked = [each.correct for each in decoded if each.correct is not None]
    num_passes = sum(each.num_passes for each in decoded)
    speed = f"{sum(each.num_tokens for each in decoded) / num_passes:.2f} tokens a pass"
    return f"{sum(checked) / len(checked):.1%} right, {speed}" if checked else speed


def decoding_positions(passes: Sequence[StepOutput]) -> int:
    """Return the number of positions in all passes of a request, in order.

    Of the first pass, which reads the end of the prompt, only the prompt's last token and the masks
    count: the rest of the prompt is no part of decoding.
    """
    first, *others = passes
    return 1 + first.num_masks + sum(output.num_positions for output in others)


def _options(item: EvalItem, setting: DecodingSetting, max_tokens: int) -> DecodingOptions:
    seed = (setting.sampling.seed + item.index) % _NUM_SEEDS
    return DecodingOptions(
        max_tokens,
        setting.mode,
        setting.threshold,
        outcomes=setting.outcomes,
        window=setting.window,
        calibrated=setting.calibrated,
        sampling=replace(setting.sampling, seed=seed),
    )


def _decoded_item(
    engine: Engine, item: EvalItem, request: Request, passes: Sequence[StepOutput]
) -> DecodedItem:
    assert request.finish_reason is not None
    tokens = request.tokens[request.num_prompt :]
    correct = None
    if item.answer is not None:
        # Not every tokenizer treats each end token as special and leaves it out of the text.
        said = tokens[:-1] if request.finish_reason is FinishReason.STOP else tokens
        correct = is_correct(decode(engine.checkpoint.tokenizer, said), item.answer)
    return DecodedItem(
        source=item.source,
        tokens=tuple(tokens),
        num_passes=len(passes),
        num_positions=decoding_positions(passes),
        finish_reason=request.finish_reason,
        correct=correct,
    )
