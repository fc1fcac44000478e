"""The engine's view of all sources of drafts."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.engine_requests import make_request
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Outcomes
from mars_serve.engine.drafting.sources import DraftSources
from mars_serve.engine.request import Draft, Request

TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def request_of(**options: Any) -> Request:
    return make_request("r", [*TEXT, *TEXT], 50, **{"mode": Mode.EXACT, **options})


def taken(sources: DraftSources, request: Request, own: list[Draft] | None = None) -> list[int]:
    """Commit one token of a text that repeats itself, and return the drafts behind it."""
    request.tokens.append(TEXT[request.num_output % len(TEXT)])
    sources.take(request, 1, own or [], 0.0)
    return [draft.token for draft in request.drafts]


def test_the_text_drafts_as_much_as_the_setting_allows() -> None:
    assert taken(DraftSources(3, 8), request_of()) == TEXT[1:4]
    assert DraftSources(3, 8).max_drafts == 8
    assert DraftSources(12, 8).max_drafts == 12


@pytest.mark.parametrize(
    "options", [{"window": 2}, {"outcomes": Outcomes.ALL}, {"mode": Mode.AR}], ids=str
)
def test_requests_that_pin_their_masks_or_check_nothing_get_none(options: dict[str, Any]) -> None:
    assert taken(DraftSources(8, 4), request_of(**options)) == []


def test_without_lookup_the_masks_drafts_are_all() -> None:
    sources, own = DraftSources(0, 4), [Draft(5, 0.9), Draft(6, 0.8)]
    request = request_of()
    assert taken(sources, request, own) == [5, 6]
    assert (request.num_own_drafts, request.num_lookup_drafts) == (2, 0)


def test_drafts_behind_a_wrong_one_are_those_of_the_tokens_to_come() -> None:
    sources, request = DraftSources(8, 4), make_request("r", [1], 50, mode=Mode.EXACT)
    request.set_drafts([Draft(token, 0.9) for token in (21, 22, 23)])
    request.tokens.append(30)
    sources.take(request, 1, [], 0.0)
    assert [draft.token for draft in request.drafts] == [22, 23]


@pytest.mark.parametrize(("has_states", "num_drafts"), [(False, 32), (True, 8)])
def test_the_log_of_states_bounds_the_drafts_of_audits(has_states: bool, num_drafts: int) -> None:
    sources, request = DraftSources(3, 8, has_states=has_states), request_of()
    request.audited = (TEXT * 6)[:50]
    assert taken(sources, request) == request.audited[1 : 1 + num_drafts]


def test_a_request_that_has_ended_leaves_nothing_behind() -> None:
    sources = DraftSources(4, 4)
    taken(sources, request_of())
    sources.forget("r")
    sources.forget("never seen")
    again = make_request("r", [2, 3, 4, 5, 6, 7, 8] * 2, 50, mode=Mode.EXACT)
    again.tokens.append(2)
    sources.take(again, 1, [], 0.0)
    assert [draft.token for draft in again.drafts] == [3, 4, 5, 6]
