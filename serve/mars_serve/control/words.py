"""Says in words what the autoscaler decides and why τ and replicas change. Imports no Ray."""

from collections import Counter
from collections.abc import Sequence

from mars_autoscale.policy.decision import AutoscalerDecision, Reason
from mars_autoscale.policy.inner_loop import Cause
from mars_autoscale.policy.reports import Phase
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.control.members import Change

CAUSES = {
    Cause.START: "it is where it was at the start",
    Cause.LOAD: "more requests run and wait than are served fast enough",
    Cause.ARRIVALS: "the arrivals need more speed than the ready replicas have",
    Cause.EASED: "the load has eased",
    Cause.FLOOR: "the floor for τ has risen",
    Cause.PROMPTS: "prompts are the load, and no τ makes those faster",
    Cause.ROWS: "at this number of running requests another τ is worth its loss",
}
BY_HAND = "it was set by hand"

_REASONS = {
    Reason.STEADY: "as many as the load needs",
    Reason.LOAD: "the arriving requests need them",
    Reason.QUEUE: "requests have waited longer than the objective, whatever speed was measured",
    Reason.DEBT: "τ has been low for long, and one more replica lets it rise",
    Reason.BURSTS: "the arrivals need fewer, but bursts that have come again need them",
    Reason.IDLE: "fewer have been enough for a while",
    Reason.WAITING: "fewer would be enough, but not for long enough yet",
    Reason.HELD: "the reports are too old or not finite, so nothing changes",
}
_PHASES = {
    Phase.STARTING: "starts",
    Phase.READY: "is ready",
    Phase.DRAINING: "drains: it takes no more requests",
    Phase.OVERDUE: "is overdue: its engine shows no sign of life",
}


def decision_words(record: AutoscalerDecision) -> str:
    """Return a decision and its reason as sentences."""
    before, after = record.replicas_before, record.num_replicas
    verb = "Keep" if after == before else "Go to"
    number = f"{after} replica{'s' if after != 1 else ''}"
    number += f" from {before}" if after != before else ""
    is_short = record.reason is Reason.STEADY and record.needed > after + 0.01
    reason = "as many as are allowed" if is_short else _REASONS[record.reason]
    parts = [f"{verb} {number}: {reason}."]
    if record.requests_per_s is not None:
        parts.append(
            f"{record.requests_per_s:.2g} requests arrive each second; "
            f"they need {record.needed:.2g} replicas."
        )
    if record.pace < 0.9:
        parts.append(f"Replicas work at {record.pace:.0%} of the calibrated speed.")
    if record.is_refuted:
        parts.append("Audits contradict the frontier, so no quality may be lost.")
    elif record.is_overspent:
        parts.append("The loss budget is spent, so τ stays at the target.")
    elif record.floor_threshold < 1:
        parts.append(f"τ may fall to {record.floor_threshold:g}.")
    if record.is_saturated:
        parts.append("Nothing is left to give: requests that would come too late are refused.")
    if record.problem is not None:
        parts.append(f"It could not be decided: {record.problem}.")
    return " ".join(parts)


def change_words(changes: Sequence[Change], *, is_pinned: bool) -> list[str]:
    """Return what has changed within a second as sentences, alike changes of τ in one."""
    words = [_state_words(each) for each in changes if each.is_of_state]
    moves = Counter[tuple[LiveDecoding, LiveDecoding, Cause]]()
    for each in changes:
        if not each.is_of_state and each.before is not None and each.after is not None:
            before, after = each.before.decoding, each.after.decoding
            moves[before.live, after.live, after.cause] += 1
    for (old, new, cause), num in moves.items():
        reason = BY_HAND if is_pinned or cause is Cause.START else CAUSES[cause]
        where = "" if num == 1 else f" on {num} replicas"
        words += [f"{what}{where}: {reason}." for what in _live_words(old, new)]
    return words


def mode_words(live: LiveDecoding) -> str:
    """Return how requests of tier default are decoded that name neither mode nor τ."""
    if live.threshold < 1:
        return "threshold"
    return "exact" if live.is_exact else "ar"


def _live_words(before: LiveDecoding, after: LiveDecoding) -> list[str]:
    words = []
    if before.threshold != after.threshold:
        verb = "falls" if after.threshold < before.threshold else "rises"
        words.append(f"τ {verb} from {before.threshold:g} to {after.threshold:g}")
    flex = before.threshold_of(Tier.FLEX), after.threshold_of(Tier.FLEX)
    if flex[0] != flex[1] and flex[1] != after.threshold:
        verb = "falls" if flex[1] < flex[0] else "rises"
        words.append(f"τ of tier flex {verb} from {flex[0]:g} to {flex[1]:g}")
    modes = mode_words(before), mode_words(after)
    if modes[0] != modes[1]:
        words.append(f"Mode changes from {modes[0]} to {modes[1]}")
    return words


def _state_words(change: Change) -> str:
    report = change.after or change.before
    assert report is not None, "a change has one of them"
    what = "has gone" if change.after is None else _PHASES[report.phase]
    if change.before is None and report.phase is Phase.READY:
        what = "ran before this governor started"  # others are starting when they first report
    name = report.replica.rsplit("#", 1)[-1]  # Ray Serve puts application and deployment before it
    return f"Replica {name} on {report.node} {what}."
