"""``GET /v1/about``: what a model can do, what it costs to decode it faster, and what to ask it."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.model.frontier import Frontier, read_frontier
from mars_autoscale.model.frontier_points import FrontierPoint
from mars_autoscale.policy.settings import InnerSettings
from mars_platform.checkpoint.examples import read_card, read_examples
from mars_platform.checkpoint.manifest import refuse_links_out
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.api.incoming.options import modes_of
from mars_serve.api.keys import Caller
from mars_serve.api.schema import Shape, errors_described
from mars_serve.api.tools.formats import find_format
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ServeSettings
from mars_serve.http.endpoints.audit import MeasuredRate
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.recent import Recent

_MEAN_CACHED = 512
"""Cached tokens that a request is assumed to have; half the model's context if that is less."""
_MAX_AGE_S = 10.0
"""Seconds for which what the checkpoint's files say is kept."""
_Result = TypeVar("_Result")


class FrontierRung(Shape):
    """Measured quality and expected speed of one way to decode."""

    mode: Mode
    confidence_threshold: float
    """τ; 1 in modes ar and exact."""
    quality: float
    """Quality by the frontier's measure, in points of 100."""
    loss: MeasuredRate | None
    """Points of quality lost against mode ar, paired by item; null for mode ar itself."""
    tokens_per_forward: float
    """Tokens of a forward pass with all masks."""
    tokens_per_s: list[float]
    """Output tokens per second of a replica with each of ``batches``, on the measured hardware."""
    gain: list[float]
    """Speed with each of ``batches`` as a multiple of the fastest decoding without loss."""
    break_even_batch: int
    """Largest batch at which this way is faster than all that lose nothing; 0 if there is none."""


class FrontierReport(Shape):
    """The measured trade of quality for speed."""

    measure: Literal["accuracy", "likelihood"]
    num_items: int
    """Number of held-out conversations that quality was measured on."""
    hardware: str
    dtype: str
    batches: list[int]
    """Numbers of requests that run at once, for which speeds are given."""
    min_gain: float
    """Lowest gain for which the autoscaler gives up quality. What gains less is the dead zone."""
    rungs: list[FrontierRung]
    """Modes ar and exact, then falling τ."""


class ExampleMessage(Shape):
    """A message of an example."""

    role: Literal["system", "user", "assistant"]
    content: str


class ExamplePrompt(Shape):
    """A conversation that the model is to answer."""

    messages: list[ExampleMessage]


class KeyAbilities(Shape):
    """Permissions of the request's key."""

    tiers: list[str]
    min_confidence_threshold: float
    """Lowest τ of its requests, as a threshold of probability; 0 for none."""
    admin: bool


class AboutModel(Shape):
    """A model, for people who try it out."""

    model: str
    modes: list[Mode]
    parent: str | None
    """Name of the model that a LoRA adapter acts on, whose frontier, card and examples these are;
    null for a model."""
    mode: Mode
    """Mode of requests that name neither a mode nor a τ."""
    confidence_threshold: float
    """The live τ, of requests in mode threshold that give none."""
    adapter: str | None
    """Name of the directory of the adapter that proposes tokens; null for a whole model."""
    block_size: int | None
    """Most tokens that a forward pass proposes; null for a plain AR model."""
    max_model_len: int
    max_output_tokens: int | None
    """The server's limit on the tokens of an output; null for none."""
    calibrated: bool
    """Whether ``calibrated`` may be set in requests."""
    chat: bool
    """Whether the model has a chat template."""
    tools: bool
    """Whether the chat template has a known format for tools."""
    file_bytes: int | None
    """Largest file of requests that the server takes, in bytes; null where it keeps no files,
    batches and responses."""
    frontier: FrontierReport | None
    card: str | None
    """Text of the model's card."""
    examples: list[ExamplePrompt]
    missing: dict[Literal["frontier", "card", "examples"], str]
    """For each part that is not there, the reason and the remedy."""
    key: KeyAbilities


def about_router(models: Mapping[str, ServedModel], settings: ServeSettings) -> APIRouter:
    """Return the router of the endpoint that tells about a model."""
    router = APIRouter()
    recent = {
        name: Recent(partial(asyncio.to_thread, _files, model)) for name, model in models.items()
    }

    @router.get("/v1/about", responses={200: {"model": AboutModel}, **errors_described()})
    async def about(model: str, request: Request) -> JSONResponse:
        """Tell what a model can do, its measured frontier, its card and example prompts."""
        served, caller = find_model(models, model), request.state.caller
        live, files = await asyncio.gather(
            served.backend.live_threshold(), recent[served.settings.name](_MAX_AGE_S)
        )
        return JSONResponse(
            {
                **_abilities(served),
                "confidence_threshold": live.threshold,
                "max_output_tokens": settings.limits.output_tokens,
                "file_bytes": settings.storage.file_bytes if settings.storage.path else None,
                **files,
                "key": _key(caller),
            }
        )

    return router


def _abilities(model: ServedModel) -> dict[str, Any]:
    checkpoint, settings = model.checkpoint, model.settings
    return {
        "model": model.name,
        "parent": settings.name if model.lora else None,
        "modes": modes_of(model),
        "mode": model.default_mode,
        "adapter": model.adapter_name,
        "block_size": checkpoint.metadata.block_size if checkpoint.metadata else None,
        "max_model_len": model.max_length,
        "calibrated": checkpoint.calibration is not None,
    }


def _key(caller: Caller) -> dict[str, Any]:
    return {
        "tiers": sorted(caller.tiers),
        "min_confidence_threshold": caller.min_threshold,
        "admin": caller.is_admin,
    }


def _files(model: ServedModel) -> dict[str, Any]:
    """Return what the checkpoint's files say; a part that cannot be read is one that is missing."""
    path, missing = model.checkpoint.own_path, dict[str, str]()

    def read(part: str, reader: Callable[[], _Result]) -> _Result | None:
        try:
            refuse_links_out(path)  # the files may have changed since the model was read
            return reader()
        except UserError as error:
            missing[part] = str(error).replace(f"{path}/", "").replace(str(path), "the checkpoint")
            return None

    frontier = None
    if model.checkpoint.metadata is None:
        missing["frontier"] = "the model has no mars.json, so it gives one token a pass"
    else:
        frontier = read("frontier", lambda: _frontier_report(read_frontier(path), model))
    card = read("card", lambda: read_card(path))
    examples = read("examples", lambda: read_examples(path)) or []
    if card is None:
        missing.setdefault("card", "the checkpoint has no README.md")
    if not examples:
        missing.setdefault("examples", "marsray calibrate writes them into examples.json")
    return {
        "chat": bool(model.checkpoint.tokenizer.chat_template),
        "tools": _takes_tools(model),
        "frontier": frontier,
        "card": card,
        "examples": [example.model_dump() for example in examples],
        "missing": missing,
    }


def _takes_tools(model: ServedModel) -> bool:
    try:
        return find_format(model.checkpoint.tokenizer) is not None
    except UserError:  # there is no template, or it has no place for tools
        return False


def _frontier_report(frontier: Frontier, model: ServedModel) -> dict[str, Any]:
    most = model.settings.engine.max_num_seqs
    capacity = frontier.capacity(most, min(_MEAN_CACHED, model.max_length / 2))
    batches = [1 << power for power in range(most.bit_length())]
    if batches[-1] != most:
        batches.append(most)
    order = {Mode.AR: 0, Mode.EXACT: 1, Mode.THRESHOLD: 2}
    points = sorted(frontier.points, key=lambda point: (order[point.mode], -point.threshold))
    return {
        "measure": frontier.measure,
        "num_items": frontier.num_items,
        "hardware": frontier.hardware,
        "dtype": frontier.dtype,
        "batches": batches,
        "min_gain": _min_gain(model),
        "rungs": [_rung(point, capacity, batches) for point in points],
    }


def _min_gain(model: ServedModel) -> float:
    autoscaling = model.settings.autoscaling
    return (autoscaling.inner if autoscaling else InnerSettings()).min_gain


def _rung(point: FrontierPoint, capacity: Capacity, batches: list[int]) -> dict[str, Any]:
    rung = capacity.rung(point.mode, point.threshold)
    return {
        "mode": point.mode,
        "confidence_threshold": point.threshold,
        "quality": point.quality,
        "loss": point.loss and point.loss.model_dump(),
        "tokens_per_forward": point.tokens_per_forward,
        "tokens_per_s": [capacity.tokens_per_s(rung, batch) for batch in batches],
        "gain": [capacity.gain(rung, batch) for batch in batches],
        "break_even_batch": capacity.break_even_batch(rung),
    }
