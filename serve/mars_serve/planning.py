"""What a model is autoscaled by: the speed of its replicas on each rung, and its settings."""

from __future__ import annotations

import logging

from mars_autoscale.capacity import Capacity, StepTime
from mars_autoscale.control import Plan
from mars_autoscale.frontier import ar_only, read_frontier
from mars_platform.errors import UserError
from mars_serve.engine.engine import Engine
from mars_serve.engine.window import StepTimes
from mars_serve.settings import AutoscalingSettings, ModelSettings

_MEAN_STORED = 512
"""Tokens that a row is taken to read, where the model's context holds twice as many."""

_log = logging.getLogger(__name__)


def plan_of(settings: ModelSettings, engine: Engine, times: StepTimes) -> Plan | None:
    """The plan of a model; None where τ is not autoscaled.

    A frontier that is refused is an error in the log, and leaves τ = 1 alone with the step times
    that the engine has measured.

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
        return Plan(_capacity(autoscaling, engine), outer)
    except UserError as error:
        _log.error("autoscaling goes by τ = 1 alone, nothing carries a burst: %s", error)
        return Plan(_ar_capacity(engine, times), outer, refused=str(error))


def _mean_stored(engine: Engine) -> float:
    return min(_MEAN_STORED, engine.max_length / 2)


def _capacity(autoscaling: AutoscalingSettings, engine: Engine) -> Capacity:
    frontier = read_frontier(engine.checkpoint.path)
    return frontier.capacity(
        engine.settings.max_batch, _mean_stored(engine), autoscaling.target_threshold
    )


def _ar_capacity(engine: Engine, times: StepTimes) -> Capacity:
    num_slots = engine.settings.max_batch
    stored = num_slots * _mean_stored(engine)
    seconds = [float(times.at(positions, stored)) for positions in times.positions]
    prompts = [positions / times.at(positions, 0) for positions in times.positions]
    if len(seconds) == 1:
        return ar_only(StepTime((0.0, 1.0), (seconds[0], seconds[0])), num_slots, max(prompts))
    step_time = StepTime(tuple(map(float, times.positions)), tuple(seconds))
    return ar_only(step_time, num_slots, max(prompts))
