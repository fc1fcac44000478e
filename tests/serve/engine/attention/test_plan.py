"""Any layout of rows fits a shape that has enough positions, rows and pages, and is cut whole."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.engine_requests import make_request, make_row
from mars_serve.engine.attention.plan import Rows, StepShape, Tiling, plan
from mars_serve.engine.batch import StepBatch, build_batch
from mars_serve.engine.kernels.attention import COMBINE_FIELDS, PIECE_FIELDS
from mars_serve.engine.request import Draft

PAGE = 5
ROWS = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.integers(1, 70),
        st.lists(st.integers(0, 8), min_size=1, max_size=9).map(tuple),
    ),
    max_size=12,
)
TILINGS = st.builds(
    Tiling,
    heads=st.sampled_from([1, 2, 3, 7, 8, 40]),
    page_size=st.just(PAGE),
    block_n=st.sampled_from([3, 16]),
    num_pieces=st.integers(1, 60),
    fewest_blocks=st.integers(1, 4),
)


def batch_of(rows: list[tuple[int, int, tuple[int, ...]]]) -> StepBatch:
    """A step of rows of cached tokens, fed tokens and masks by outcome."""
    scheduled = []
    for num_cached, tokens, masks in rows:
        prompt = [5] * (num_cached + tokens)
        request = make_request("", prompt, num_cached=num_cached, pages=range(100))
        request.drafts = [Draft(6, 0.5)] * (len(masks) - 1)
        scheduled.append(make_row(request, tokens, masks))
    return build_batch(scheduled, 3)


def planned(batch: StepBatch, shape: StepShape, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    pieces = np.zeros((tiling.most_pieces(shape), PIECE_FIELDS), dtype=np.int64)
    combine = np.zeros((shape.num_positions, COMBINE_FIELDS), dtype=np.int64)
    plan(Rows.of(batch), shape, tiling, pieces, combine)
    return pieces, combine


@given(rows=ROWS, tiling=TILINGS, more=st.tuples(*[st.integers(0, 40)] * 3))
def test_pieces_cover_each_query_and_key_once(
    rows: list[tuple[int, int, tuple[int, ...]]], tiling: Tiling, more: tuple[int, int, int]
) -> None:
    batch = batch_of(rows)
    shape = StepShape.of(batch, PAGE)
    shape = StepShape(
        shape.num_positions + more[0], shape.num_rows + more[1], shape.num_pages + more[2]
    )
    pieces, combine = planned(batch, shape, tiling)
    tiles = defaultdict[tuple[int, ...], list[tuple[int, int, int]]](list)
    for *tile, begin, stop, slot in pieces[pieces[:, 1] < pieces[:, 2]].tolist():
        tiles[tuple(tile)].append((begin, stop, slot))
    queries, slots = [], []
    for (row, first, end, start, num_cached), parts in tiles.items():
        assert end - first <= tiling.tile(shape)
        queries += range(first, end)
        parts.sort()
        blocks = [block for begin, stop, _ in parts for block in range(begin, stop)]
        num_own = end - start
        num_blocks = -(-num_cached // tiling.block_n) - (-num_own // tiling.block_n)
        assert blocks == list(range(num_blocks))
        if first < batch.num_positions:
            own = batch.rows[row]
            assert (start, num_cached) == (own.start, own.num_cached)
            assert start <= first < end <= start + own.length
        else:
            assert not blocks
        if len(parts) == 1:
            assert parts[0][2] == -1
            assert (combine[first:end, 1] == 0).all()
        else:
            slots += [slot for _, _, slot in parts]
            assert (combine[first:end, 0] == parts[0][2]).all()
            assert (combine[first:end, 1] == len(parts)).all()
            assert combine[first:end, 2].tolist() == list(range(end - first))
    assert sorted(queries) == list(range(shape.num_positions))
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= tiling.num_slots(shape)


@pytest.mark.parametrize(("context", "pieces"), [(32768, 33), (1024, 9), (64, 1)])
def test_one_long_row_is_cut_for_the_whole_device(context: int, pieces: int) -> None:
    tiling = Tiling(heads=7, page_size=64, block_n=64, num_pieces=33)
    request = make_request("", [5] * (context + 1), num_cached=context, pages=range(600))
    batch = build_batch([make_row(request, 1, (8,))], 3)
    found, _ = planned(batch, StepShape(10, 10, 512), tiling)
    used = found[(found[:, 1] < batch.num_positions) & (found[:, 1] < found[:, 2])]
    assert len(used) == pieces
    sizes = used[:, 6] - used[:, 5]
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("num_rows", [1, 2, 8, 20, 33])
def test_rows_of_one_length_give_each_multiprocessor_one_piece_at_most(num_rows: int) -> None:
    tiling = Tiling(heads=7, page_size=64, block_n=64, num_pieces=33)
    rows = []
    for index in range(num_rows):
        request = make_request(str(index), [5] * 4105, num_cached=4104, pages=range(600))
        rows.append(make_row(request, 1, (7,)))
    batch = build_batch(rows, 3)
    found, _ = planned(batch, StepShape.of(batch, 64), tiling)
    used = found[found[:, 5] < found[:, 6]]
    assert 0.6 * 33 <= len(used) <= 33
