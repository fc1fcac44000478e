from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_serve.engine.pages import PagePool, page_key, root_key


def chain(tokens: str, tenant: str = "") -> list[bytes]:
    """Keys of pages of one token each."""
    keys = [root_key(tenant)]
    for token in tokens:
        keys.append(page_key(keys[-1], [ord(token)]))
    return keys[1:]


def hold(pool: PagePool, tokens: str) -> list[int]:
    """Allocate and register pages as a request that feeds these tokens does."""
    keys = chain(tokens)
    pages = pool.match(keys)
    pages += pool.allocate(len(keys) - len(pages))
    return [pool.register(page, key) for page, key in zip(pages, keys, strict=True)]


@dataclass
class Holder:
    tokens: str
    pages: list[int] = field(default_factory=list)
    num_registered: int = 0


@given(st.integers(1, 12), st.randoms(), st.integers(1, 60))
def test_pool_keeps_integrity(num_pages: int, source: random.Random, num_operations: int) -> None:
    """Holders find, allocate, register and release pages in any order."""
    pool, holders = PagePool(num_pages, page_size=1), list[Holder]()
    for _ in range(num_operations):
        if holders and source.random() < 0.3:
            pool.release(holders.pop(source.randrange(len(holders))).pages)
        elif holders and source.random() < 0.6:
            _extend(pool, source.choice(holders))
        else:
            holders.append(Holder("".join(source.choices("ab", k=source.randint(1, 6)))))
            holders[-1].pages = pool.match(chain(holders[-1].tokens))
            holders[-1].num_registered = len(holders[-1].pages)
        _check(pool, holders)
    for holder in holders:
        pool.release(holder.pages)
    _check(pool, [])
    assert pool.num_free == num_pages


def _extend(pool: PagePool, holder: Holder) -> None:
    """Allocate a page, or register the holder's first page that is not registered."""
    if holder.num_registered < len(holder.pages):
        index = holder.num_registered
        page = pool.register(holder.pages[index], chain(holder.tokens)[index])
        holder.pages[index] = page
        holder.num_registered += 1
    elif pool.num_free and len(holder.pages) < len(holder.tokens):
        holder.pages += pool.allocate(1)


def _check(pool: PagePool, holders: list[Holder]) -> None:
    pool.check_integrity(holder.pages for holder in holders)
    assert pool.num_free == pool.num_pages - len({p for holder in holders for p in holder.pages})
    registered = {pool.key_of(page) for page in range(pool.num_pages)}
    for holder in holders:
        keys = chain(holder.tokens)
        held = [pool.key_of(page) for page in holder.pages]
        assert held[: holder.num_registered] == keys[: holder.num_registered]
        assert set(held[holder.num_registered :]) <= {None}
    for tokens in ("aaaaaa", "ababab", "bbbbbb", "baabab"):
        present = [key in registered for key in chain(tokens)]
        assert present == sorted(present, reverse=True), "a prefix lost its beginning"


def test_keys_tell_tokens_order_beginnings_and_tenants_apart() -> None:
    keys = [*chain("ab"), *chain("ba"), *chain("bb"), *chain("ab", tenant="other")]
    assert chain("ab") == chain("abc")[:2]
    assert len(set(keys)) == len(keys) - 1  # "ba" and "bb" begin with the same page
    assert page_key(b"", [1, 256]) != page_key(b"", [256, 1]) != page_key(b"", [257])


def test_a_prefix_is_found_while_held_and_after() -> None:
    pool = PagePool(8, page_size=1)
    pages = hold(pool, "abc")
    shared = pool.match(chain("abd"))
    assert shared == pages[:2]
    pool.check_integrity([pages, shared])
    pool.release(shared)
    first = list(pages)
    pool.release(pages)
    assert pages == []
    assert pool.num_free == 8
    assert pool.match(chain("abce")) == first
    assert pool.num_free == 5


def test_a_gap_ends_a_match() -> None:
    pool = PagePool(8, page_size=1)
    pages = hold(pool, "abc")
    assert pool.match([chain("abc")[0], chain("x")[0], chain("abc")[1]]) == pages[:1]
    assert pool.match(chain("xabc")) == []


def test_least_recently_used_pages_are_evicted_first_and_from_their_end() -> None:
    pool = PagePool(6, page_size=1)
    old, new = hold(pool, "abc"), hold(pool, "xyz")
    pool.release(old)
    pool.release(new)
    pool.release(pool.match(chain("a")))  # used again: now the last to go
    taken = pool.allocate(1)
    assert _num_found(pool, "abc") == 2
    taken += pool.allocate(3)
    assert (_num_found(pool, "abc"), _num_found(pool, "xyz")) == (1, 1)
    taken += pool.allocate(2)
    assert (_num_found(pool, "abc"), _num_found(pool, "xyz")) == (0, 0)
    pool.check_integrity([taken])


def _num_found(pool: PagePool, tokens: str) -> int:
    keys = {pool.key_of(page) for page in range(pool.num_pages)}
    return sum(key in keys for key in chain(tokens))


def test_plain_free_pages_are_used_before_cached_ones() -> None:
    pool = PagePool(5, page_size=1)
    pool.release(hold(pool, "ab"))
    pool.allocate(3)
    assert _num_found(pool, "ab") == 2
    pool.allocate(1)
    assert _num_found(pool, "ab") == 1


def test_held_pages_are_never_evicted() -> None:
    pool = PagePool(4, page_size=1)
    pages = hold(pool, "abc")
    assert pool.num_free == 1
    with pytest.raises(AssertionError):
        pool.allocate(2)
    pool.allocate(1)
    assert pool.match(chain("abc")) == pages


def test_the_same_content_is_kept_once() -> None:
    pool = PagePool(8, page_size=1)
    (key,) = chain("a")
    first, second = pool.allocate(1), pool.allocate(1)
    assert pool.register(first[0], key) == first[0]
    assert pool.register(first[0], key) == first[0]
    second[0] = pool.register(second[0], key)
    assert second == first
    pool.check_integrity([first, second])
    assert pool.num_free == 7
    pool.release(first)
    pool.check_integrity([second])
    third = pool.allocate(1)
    pool.release(second)  # the known page may also be one that nobody holds
    third[0] = pool.register(third[0], key)
    pool.check_integrity([third])
    assert pool.num_free == 7


def test_num_released_counts_pages_that_nobody_else_holds() -> None:
    pool = PagePool(8, page_size=1)
    one, two = hold(pool, "abc"), hold(pool, "abd")
    assert pool.num_released([]) == 0
    assert pool.num_released([one]) == 1
    assert pool.num_released([one, two]) == 4


def test_pool_detects_a_leaked_page() -> None:
    pool = PagePool(8, page_size=4)
    pages = pool.allocate(3)
    with pytest.raises(AssertionError, match="leaked or shared"):
        pool.check_integrity([pages[:-1]])


def test_pool_detects_a_page_held_without_a_reference() -> None:
    pool = PagePool(8, page_size=4)
    pages = pool.allocate(3)
    with pytest.raises(AssertionError, match="leaked or shared"):
        pool.check_integrity([pages, pages[:1]])


def test_pool_detects_a_reference_that_nobody_holds() -> None:
    pool = PagePool(8, page_size=1)
    pages = hold(pool, "abc")
    pool.match(chain("a"))
    with pytest.raises(AssertionError, match="leaked or shared"):
        pool.check_integrity([pages])


def test_pool_detects_a_page_released_while_held() -> None:
    pool = PagePool(8, page_size=4)
    pages = pool.allocate(3)
    pool.release(list(pages))
    with pytest.raises(AssertionError, match="leaked or shared"):
        pool.check_integrity([pages])
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)
