"""The state of a model at one moment, as dashboards show it. Imports no Ray."""

import math
from collections import Counter
from typing import Any

from mars_autoscale.policy.outer_loop import AutoscalingBasis, OuterLoop
from mars_autoscale.policy.reports import Phase, ReplicaReport
from mars_platform.tier import Tier
from mars_serve.config.served import PublishedThreshold
from mars_serve.control.members import SILENT_S, Heard, ReplicaRegistry
from mars_serve.control.words import BY_HAND, CAUSES, decision_words, mode_words

_MAX_REPLICAS = 100
"""Number of replicas that are listed one by one."""


def state_of(
    members: ReplicaRegistry,
    loop: OuterLoop | None,
    published: PublishedThreshold | None,
    now_s: float,
) -> dict[str, Any]:
    """Return everything that a dashboard shows beside rows and events, as JSON values."""
    replicas = members.replicas
    is_pinned = published is not None and published.is_pinned
    basis = loop.basis if loop is not None else None
    return {
        "replicas": [_replica(each, now_s, is_pinned) for each in replicas[:_MAX_REPLICAS]],
        "num_not_listed": max(len(replicas) - _MAX_REPLICAS, 0),
        "nodes": _nodes(replicas, now_s),
        "is_pinned": is_pinned,
        "decision": _decision(loop),
        "budget": _budget(loop),
        "audit": _audit(loop),
        "frontier": _frontier(basis, members.serving()),
    }


def _word(each: Heard, now_s: float) -> str:
    return "silent" if now_s - each.heard_s > SILENT_S else each.report.phase.value


def _replica(each: Heard, now_s: float, is_pinned: bool) -> dict[str, Any]:
    report, engine = each.report, each.report.engine
    found = {
        "name": report.replica,
        "node": report.node,
        "state": _word(each, now_s),
        "state_s": max(now_s - each.since_s, 0.0),
    }
    if report.phase is Phase.STARTING:
        return found
    live = report.decoding.live
    return found | {
        "num_running": engine.num_running,
        "num_waiting": engine.num_waiting,
        "threshold": live.threshold,
        "flex_threshold": live.threshold_of(Tier.FLEX),
        "mode": mode_words(live),
        "cause": BY_HAND if is_pinned else CAUSES[report.decoding.cause],
        "kv_share": engine.kv_share,
    }


def _nodes(replicas: list[Heard], now_s: float) -> dict[str, dict[str, int]]:
    nodes: dict[str, Counter[str]] = {}
    for each in replicas:
        nodes.setdefault(each.report.node, Counter())[_word(each, now_s)] += 1
    return {node: dict(states) for node, states in sorted(nodes.items())}


def _decision(loop: OuterLoop | None) -> dict[str, Any] | None:
    if loop is None or not loop.records:
        return None
    record = loop.records[-1]
    return {"text": decision_words(record), **record.model_dump()}


def _budget(loop: OuterLoop | None) -> dict[str, Any] | None:
    if loop is None or loop.basis is None:
        return None
    return {
        "points": loop.basis.settings.loss_budget,
        "spent_share": loop.spent_share,
        "is_overspent": loop.state.outer.is_overspent,
    }


def _audit(loop: OuterLoop | None) -> dict[str, Any] | None:
    if loop is None or loop.basis is None:
        return None
    drift = loop.state.drift
    counts = drift.tally.values()
    return {
        "evidence": drift.evidence,
        "loss_factor": drift.loss_factor,
        "refuted_s": drift.refuted_s,
        "num_outputs": sum(each.num_outputs for each in counts),
        "num_tokens": sum(each.num_tokens for each in counts),
        "num_diverged": sum(each.num_diverged for each in counts),
    }


def _frontier(
    basis: AutoscalingBasis | None, serving: list[ReplicaReport]
) -> dict[str, Any] | None:
    if basis is None:
        return None
    capacity = basis.capacity
    target = capacity.target
    rows = sum(each.engine.num_running for each in serving)
    weights = [(each.engine.num_running if rows else 1, each.decoding) for each in serving]
    total = sum(weight for weight, _ in weights)
    return {
        "points": [
            {
                "mode": rung.mode,
                "threshold": rung.threshold,
                "loss": max(rung.loss - target.loss, 0.0),
                "gain": capacity.gain(rung),
                "tokens_per_forward": capacity.window(rung).tokens_per_forward,
            }
            for rung in capacity.rungs
        ],
        "now": {
            "loss": math.fsum(weight * each.loss for weight, each in weights) / total,
            "gain": math.fsum(weight * each.gain for weight, each in weights) / total,
        }
        if total
        else None,
        "floor_threshold": basis.settings.floor_threshold,
        "target_threshold": capacity.target_threshold,
        "num_slots": capacity.max_num_seqs,
        "tokens_per_s": capacity.tokens_per_s(capacity.base()),
        "max_replicas": basis.settings.max_replicas,
        "refused": basis.refused,
        "mismatch": basis.mismatch,
    }
