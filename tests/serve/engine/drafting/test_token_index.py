from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from mars_serve.engine.drafting.token_index import TokenIndex, num_agreed

LONGEST = 16


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=3))
def test_the_place_found_is_the_newest_with_the_longest_agreement(
    tokens: list[int], drafts: list[int]
) -> None:
    """With at most 16 places of the last two tokens, the search misses none."""
    index = TokenIndex(200)
    for length in range(0, len(tokens) + 1, 7):
        index.extend(tokens[:length])  # in pieces, as an output grows
    index.extend(tokens)
    end = [*tokens, *drafts][-LONGEST:]
    place, length = index.longest_match(tokens, end)
    agreed = {i: num_agreed(tokens, i, end) for i in range(2, len(tokens))}
    same = [i for i, count in agreed.items() if count >= 2]
    if len(same) <= 16:
        longest = max((agreed[i] for i in same), default=0)
        assert length == longest
        assert place == max((i for i in same if agreed[i] == longest), default=0)
    assert length == 0 or tokens[place - length : place] == end[len(end) - length :]


def test_a_long_text_is_indexed_in_pieces() -> None:
    tokens = list(range(5000))
    index = TokenIndex(6000)
    calls = 0
    while index.num_indexed < len(tokens):
        before = index.num_indexed
        index.extend(tokens)
        calls += 1
        assert before < index.num_indexed <= before + 2048
    assert calls == 3
    assert index.longest_match(tokens, tokens[700:716]) == (716, 16)


def test_an_index_takes_at_most_128_kib_and_4_bytes_a_token() -> None:
    tokens = [7] * 60_000
    tracemalloc.start()
    try:
        index = TokenIndex(2_000_000)
        while index.num_indexed < len(tokens):
            index.extend(tokens)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < (128 << 10) + 5 * len(tokens)  # an array grows by an eighth at a time
