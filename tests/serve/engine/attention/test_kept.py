"""Places in which the keys of decoding rows last from step to step."""

import torch

from decoding.engine_requests import make_request, make_row
from mars_serve.engine.attention.kept import KeptCopies, KeptRows
from mars_serve.engine.batch import BatchRow, build_batch
from mars_serve.engine.request import Request

MASK, PAGE = 3, 16


def copies(num_pages: int = 64) -> KeptCopies:
    """Places beside a pool of pages of one layer with one head."""
    return KeptCopies(torch.zeros(1, 2, num_pages, 1, PAGE, 8))


def requests(*lengths: int) -> list[Request]:
    """Requests of which all tokens but the last are cached."""
    return [
        make_request(str(index), [5] * length, num_cached=length - 1)
        for index, length in enumerate(lengths)
    ]


def step(
    kept: KeptCopies, members: list[Request], *, completes: bool = True
) -> tuple[list[KeptRows], list[BatchRow]]:
    """Place the rows of a step that decodes one token of each request."""
    rows = build_batch([make_row(request, 1, (0,)) for request in members], MASK).rows
    placed = kept.place(rows)
    kept.is_complete = completes
    for request in members:
        request.tokens.append(5)
        request.num_cached += 1
    return placed


def fresh(placed: tuple[list[KeptRows], list[BatchRow]]) -> dict[str, bool]:
    """Whether each request's cached tokens are copied from pages, by its id."""
    return {
        row.owner.id: place in each.fresh
        for each in placed[0]
        for place, row in enumerate(each.rows)
        if row.owner is not None
    }


def test_rows_are_copied_when_they_come_and_then_no_more() -> None:
    kept, members = copies(), requests(20, 30, 40)
    assert fresh(step(kept, members[:2])) == {"0": True, "1": True}
    assert fresh(step(kept, members)) == {"0": False, "1": False, "2": True}
    assert fresh(step(kept, members)) == {"0": False, "1": False, "2": False}


def test_the_last_row_moves_into_the_place_of_one_that_has_gone() -> None:
    kept, members = copies(), requests(20, 30, 40)
    step(kept, members)
    placed = step(kept, members[1:])
    assert [row.owner for row in placed[0][0].rows] == [members[2], members[1]]
    assert fresh(placed) == {"2": True, "1": False}


def test_a_row_that_comes_back_or_whose_tokens_changed_is_copied_again() -> None:
    kept, members = copies(), requests(20, 30)
    step(kept, members)
    step(kept, members[:1])
    members[0].num_cached += 1  # a prefix was found
    members[0].tokens.append(5)
    assert fresh(step(kept, members)) == {"0": True, "1": True}


def test_nothing_lasts_beyond_a_step_that_has_failed() -> None:
    kept, members = copies(), requests(20, 30)
    step(kept, members, completes=False)
    assert fresh(step(kept, members)) == {"0": True, "1": True}


def test_a_row_that_outgrows_its_place_gets_a_larger_one() -> None:
    kept, members = copies(), requests(62)
    sizes = [step(kept, members)[0][0].copies.shape[4] for _ in range(5)]
    assert sizes == [64, 64, 64, 96, 96]


def test_rows_without_room_are_left_and_places_never_exceed_the_pages() -> None:
    kept, members = copies(num_pages=13), requests(20, 30, 100)
    placed, left = step(kept, members)
    assert [row.owner for row in left] == members[2:]
    assert sum(each.copies.numel() for each in placed) <= 2 * 13 * PAGE * 8
    placed, left = step(kept, members[2:])
    assert not left
    assert fresh((placed, left)) == {"2": True}


def test_rows_that_come_together_get_their_places_at_once() -> None:
    kept, members = copies(), requests(20, 30, 40, 500)
    assert [each.copies.shape[2] for each in step(kept, members)[0]] == [3, 1]


def test_as_many_of_the_rows_that_come_are_kept_as_there_is_room_for() -> None:
    kept, members = copies(num_pages=13), requests(20, 30, 40, 50)
    placed, left = step(kept, members)
    assert [row.owner for row in left] == members[-1:]
    assert [row.owner for row in placed[0].rows] == members[:-1]
