"""What a model is autoscaled by: the speed of its replicas on each rung, and its settings."""

from __future__ import annotations

import logging
import time

from mars_autoscale.model.capacity import Capacity, StepTime
from mars_autoscale.model.frontier import FRONTIER_FILE, Frontier, ar_only, read_frontier
from mars_autoscale.policy.control import Plan
from mars_platform.errors import UserError
from mars_serve.config.hardware import hardware_name
from mars_serve.config.settings import AutoscalingSettings, ModelSettings
from mars_serve.engine.adaptive.window import StepTimes
from mars_serve.engine.engine import Engine

_MEAN_STORED = 512
"""Tokens that a row is taken to read, where the model's context holds twice as many."""

_DTYPES = {"bf16": "bfloat16"}
"""Names of ``marsray calibrate`` that a server's settings have otherwise."""

_log = logging.getLogger(__name__)


def plan_of(settings: ModelSettings, engine: Engine, times: StepTimes) -> Plan | None:
    """The plan of a model; None where τ is not autoscaled.

    A frontier that is refused is an error in the log, and leaves τ = 1 alone with the step times
    that the engine has measured. One of other hardware or another number type is used, with a
    warning in the log; a rehearsal is meant to go by such a one.

    Args:
        settings: the model's.
        engine: its engine, warm.
        times: of that one's steps.
    """
    autoscaling = settings.autoscaling
    if autoscaling is None or not settings.is_governed:
        return None
    outer = autoscaling.model_copy(
        update={
            "floor_threshold": max(
                autoscaling.floor_threshold, settings.tiers.default_min_threshold
            ),
            "flex_floor_threshold": max(
                autoscaling.flex_floor_threshold, settings.tiers.flex_min_threshold
            ),
        }
    )
    try:
        frontier = read_frontier(engine.checkpoint.path)
        capacity = _capacity(frontier, autoscaling, engine)
    except UserError as error:
        _log.error("autoscaling goes by τ = 1 alone, nothing carries a burst: %s", error)
        return Plan(_ar_capacity(engine, times), outer, str(error), time.time())
    mismatch = _mismatch(frontier, settings, engine)
    return Plan(capacity, outer, made_s=time.time(), mismatch=mismatch)


def _mismatch(frontier: Frontier, settings: ModelSettings, engine: Engine) -> str | None:
    measured = (frontier.hardware, _DTYPES.get(frontier.dtype, frontier.dtype))
    here = (hardware_name("cuda" if settings.num_gpus else "cpu"), settings.dtype)
    if settings.rehearsal is not None or measured == here:
        return None
    mismatch = f"measured on {' in '.join(measured)}; the replica runs on {' in '.join(here)}"
    _log.warning(
        "autoscaling goes by another machine's speed: %s was %s; run marsray calibrate here",
        engine.checkpoint.path / FRONTIER_FILE,
        mismatch,
    )
    return mismatch


def _mean_stored(engine: Engine) -> float:
    return min(_MEAN_STORED, engine.max_length / 2)


def _capacity(frontier: Frontier, autoscaling: AutoscalingSettings, engine: Engine) -> Capacity:
    return frontier.capacity(
        engine.settings.max_num_seqs, _mean_stored(engine), autoscaling.target_threshold
    )


def _ar_capacity(engine: Engine, times: StepTimes) -> Capacity:
    max_num_seqs = engine.settings.max_num_seqs
    stored = max_num_seqs * _mean_stored(engine)
    seconds = [float(times.at(positions, stored)) for positions in times.positions]
    prompts = [positions / times.at(positions, 0) for positions in times.positions]
    if len(seconds) == 1:
        return ar_only(StepTime((0.0, 1.0), (seconds[0], seconds[0])), max_num_seqs, max(prompts))
    step_time = StepTime(tuple(map(float, times.positions)), tuple(seconds))
    return ar_only(step_time, max_num_seqs, max(prompts))
