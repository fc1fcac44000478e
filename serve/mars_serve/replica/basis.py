"""Makes the basis on which a model is autoscaled: its replicas' speed on each rung."""

import logging
import time

from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.frontier import FRONTIER_FILE, Frontier, read_frontier
from mars_autoscale.model.step_times import StepTimes
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_platform.errors import UserError
from mars_serve.config.hardware import hardware_name
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.engine import Engine

_MEAN_CACHED = 512
"""Cached tokens that a row is assumed to read; half the model's context if that is less."""

_log = logging.getLogger(__name__)


def autoscaling_basis(
    settings: ModelSettings, engine: Engine, times: StepTimes
) -> AutoscalingBasis | None:
    """Make the basis of a model's autoscaling; None if its τ is not autoscaled.

    A frontier that is refused is logged as an error; only τ = 1 remains, with ``times``, the steps
    that the engine has measured. A frontier of other hardware or another number type is used and
    logged as a warning.
    """
    autoscaling = settings.autoscaling
    if autoscaling is None:
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
        frontier = read_frontier(engine.checkpoint.own_path)
        capacity = frontier.capacity(
            engine.settings.max_num_seqs, _mean_cached(engine), autoscaling.target_threshold
        )
    except UserError as error:
        _log.error("autoscaling uses τ = 1 alone, which carries no burst: %s", error)
        refused = str(error).replace(f"{engine.checkpoint.own_path}/", "")  # clients see it
        return AutoscalingBasis(
            _ar_capacity(engine, times), outer, refused=refused, made_s=time.time()
        )
    mismatch = _mismatch(frontier, settings, engine)
    return AutoscalingBasis(
        capacity,
        outer,
        made_s=time.time(),
        mismatch=mismatch,
        expectations=frontier.expectations(),
    )


def _mismatch(frontier: Frontier, settings: ModelSettings, engine: Engine) -> str | None:
    """Describe how the frontier's hardware and number type differ from the replica's, and warn."""
    measured = (frontier.hardware, frontier.dtype)
    here = (
        hardware_name("cuda" if settings.num_gpus else "cpu"),
        str(engine.dtype).removeprefix("torch."),
    )
    if measured == here:
        return None
    mismatch = f"measured on {' in '.join(measured)}; the replica runs on {' in '.join(here)}"
    _log.warning(
        "autoscaling uses the speed of another machine: %s was %s; run marsray calibrate here",
        engine.checkpoint.own_path / FRONTIER_FILE,
        mismatch,
    )
    return mismatch


def _mean_cached(engine: Engine) -> float:
    return min(_MEAN_CACHED, engine.max_length / 2)


def _ar_capacity(engine: Engine, times: StepTimes) -> Capacity:
    max_num_seqs = engine.settings.max_num_seqs
    step_time = times.at_cached(max_num_seqs * _mean_cached(engine))
    prefill_tokens_per_s = max(positions / times.at(positions, 0) for positions in times.positions)
    return Capacity(step_time, (AR,), max_num_seqs, prefill_tokens_per_s)
