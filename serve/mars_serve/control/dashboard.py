"""The picture of one model that all dashboards show: an hour of rows, events, and the state now.

The governor keeps a dashboard for each model, autoscaled or not. It is fed by what replicas and
ingress replicas report, and brought forward second by second when somebody reports or looks.
All of it is bounded: see `mars_serve.control.history` for the rows; events and the text of the
state take less than 100 kB more. Imports no Ray.
"""

import json
import math
from collections import Counter, deque
from dataclasses import dataclass
from statistics import fmean

from mars_autoscale.policy.outer_loop import OuterLoop
from mars_autoscale.policy.reports import Phase
from mars_platform.tier import Tier
from mars_serve.config.served import Picture, PublishedThreshold
from mars_serve.control.history import COLUMNS, History
from mars_serve.control.members import ReplicaRegistry, Sums
from mars_serve.control.quantiles import RecentValues
from mars_serve.control.state import state_of
from mars_serve.control.words import change_words, decision_words
from mars_serve.observability.request_telemetry import FIRST_TOKEN_BOUNDS_S, TOKEN_GAP_BOUNDS_S

NUM_EVENTS = 200
"""Number of latest events that are kept."""
_MAX_EVENTS_PER_S = 10
"""Events of one second that are kept; the rest is counted in one more."""
_CHART_S, _TILE_S = 10, 60
"""Seconds over which percentiles are taken: those of rows, and those of the state."""
_MAX_GAP_S = 60
"""Longest time without a report or a look for which rows are made up."""
_SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


@dataclass(frozen=True)
class Event:
    """A sentence about something that has changed."""

    time_s: int
    kind: str
    """``change`` for τ, mode and replicas, ``decision`` for the autoscaler's."""
    text: str


class ModelDashboard:
    """The picture of one model; all methods run on the governor's event loop."""

    def __init__(self) -> None:
        self.members = ReplicaRegistry()
        self._history = History()
        self._events = deque[Event](maxlen=NUM_EVENTS)
        self._chart, self._tile = (
            [RecentValues(seconds, bounds) for bounds in (FIRST_TOKEN_BOUNDS_S, TOKEN_GAP_BOUNDS_S)]
            for seconds in (_CHART_S, _TILE_S)
        )
        self._totals = {name: Counter[str]() for name in ("ended", "rejected", "endpoints")}
        """Sums of these fields of `Sums`."""
        self._next_s: int | None = None
        """Time of the row that is not complete yet."""
        self._state: tuple[int, str] = -1, ""
        """Time and text of the latest state."""
        self._decided_s = 0.0

    def advance(
        self, now_s: float, loop: OuterLoop | None, published: PublishedThreshold | None
    ) -> None:
        """Complete the rows of the seconds that have passed up to ``now_s``, in Unix time.

        ``loop`` is the model's outer loop, None if it is not autoscaled, ``published`` its live τ.
        """
        if self._next_s is None and not self.members.replicas:
            return  # a new governor hears of the replicas that run within a second
        now = int(now_s)
        if self._next_s is None or not -_MAX_GAP_S <= now - self._next_s <= _MAX_GAP_S:
            self._next_s = now  # also after the clock was put back, or nobody reported for long
        while self._next_s < now:
            self._complete(self._next_s, now_s, loop, published)
            self._next_s += 1

    def picture(
        self,
        since_s: int | None,
        loop: OuterLoop | None,
        published: PublishedThreshold | None,
    ) -> Picture:
        """Return the rows and events after a time, or all, and the state at the latest row."""
        last_s = self._history.last_s or 0
        if self._state[0] != last_s:
            state = state_of(self.members, loop, published, last_s + 1.0)
            state["minute"] = self._minute()
            state |= self._totals
            self._state = last_s, json.dumps(state, separators=(",", ":"))
        events = [
            {"time_s": each.time_s, "kind": each.kind, "text": each.text}
            for each in self._events
            if since_s is None or since_s > last_s or each.time_s > since_s
        ]
        columns = f'"columns":{json.dumps(COLUMNS)},' if since_s is None else ""
        text = (
            f'{{{columns}"rows":{self._history.since(since_s)},'
            f'"events":{json.dumps(events)},"state":{self._state[1]}}}'
        )
        return Picture(last_s, text)

    def _complete(
        self,
        at_s: int,
        now_s: float,
        loop: OuterLoop | None,
        published: PublishedThreshold | None,
    ) -> None:
        self.members.forget_gone(now_s)
        sums = self.members.take_sums()
        for windows in (self._chart, self._tile):
            windows[0].add(sums.first_token)
            windows[1].add(sums.token_gap)
        for name, totals in self._totals.items():
            totals.update(getattr(sums, name))
        self._history.add(at_s, {**self._load(), **self._rates(sums), **self._governed(loop)})
        is_pinned = published is not None and published.is_pinned
        words = change_words(self.members.take_changes(), is_pinned=is_pinned)
        if len(words) > _MAX_EVENTS_PER_S:
            num_more = len(words) - _MAX_EVENTS_PER_S
            words = [*words[:_MAX_EVENTS_PER_S], f"{num_more} more changes in this second."]
        self._events += [Event(at_s, "change", each) for each in words]
        self._note_decision(at_s, loop)

    def _note_decision(self, at_s: int, loop: OuterLoop | None) -> None:
        if loop is None or not loop.records:
            return
        record = loop.records[-1]
        if record.time_s == self._decided_s:
            return
        before = loop.records[-2] if len(loop.records) > 1 else None
        is_new = before is None or (before.reason, before.problem) != (
            record.reason,
            record.problem,
        )
        if is_new or record.num_replicas != record.replicas_before:
            self._events.append(Event(at_s, "decision", decision_words(record)))
        self._decided_s = record.time_s

    def _load(self) -> dict[str, float | None]:
        phases = Counter(each.report.phase for each in self.members.replicas)
        serving, lives = self.members.serving(), list(self.members.lives())
        waiting = self.members.waiting_by_tier()
        num_pages = sum(each.engine.num_pages for each in serving)
        free = sum(each.engine.num_free_pages for each in serving)
        rows = sum(each.engine.num_running for each in serving)
        loss = math.fsum(each.engine.num_running * each.decoding.loss for each in serving)
        return {
            "num_ready": phases[Phase.READY],
            "num_starting": phases[Phase.STARTING],
            "num_draining": phases[Phase.DRAINING],
            "num_running": rows,
            "num_waiting": sum(each.engine.num_waiting for each in serving),
            **{f"waiting_{tier.value}": waiting[tier.value] for tier in Tier},
            "threshold": fmean(live.threshold for live in lives) if lives else None,
            "flex_threshold": (
                fmean(live.threshold_of(Tier.FLEX) for live in lives) if lives else None
            ),
            "exact_share": fmean(live.is_exact for live in lives) if lives else None,
            "kv_share": 1 - free / num_pages if num_pages else None,
            "loss": loss / rows if rows else 0.0,
        }

    def _rates(self, sums: Sums) -> dict[str, float | None]:
        counts, ended = sums.replicas, sums.ended
        refused = sum(sums.rejected.values())
        failed = ended["error"]
        generated, prompts = counts["num_generated_tokens"], counts["num_prompt_tokens"]
        passes, hits = counts["num_row_passes"], counts["num_prefix_hit_tokens"]
        row: dict[str, float | None] = {
            "arrived_per_s": sums.arrived,
            "ended_per_s": sum(ended.values()) - refused - failed,
            "failed_per_s": failed,
            "rejected_per_s": refused,
            "batch_lines_per_s": sums.batch_lines.total(),
            "generated_per_s": generated,
            "prompt_per_s": prompts,
            "tokens_per_pass": generated / passes if passes else None,
            "prefix_hit_share": hits / prompts if prompts else None,
        }
        for name, window in zip(("ttft", "gap"), self._chart, strict=True):
            row |= {f"{name}_{key}_s": window.quantile(share) for key, share in _SHARES}
        return row

    def _governed(self, loop: OuterLoop | None) -> dict[str, float | None]:
        if loop is None or loop.basis is None:
            return {}
        return {
            "num_ordered": loop.state.outer.num_replicas or None,
            "spent_share": loop.spent_share,
            "evidence": loop.state.drift.evidence,
        }

    def _minute(self) -> dict[str, dict[str, float | None]]:
        names = ("ttft", "gap")
        return {
            name: {
                "number": window.number,
                **{f"{key}_s": window.quantile(share) for key, share in _SHARES},
            }
            for name, window in zip(names, self._tile, strict=True)
        }
