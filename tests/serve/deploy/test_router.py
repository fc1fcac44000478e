from __future__ import annotations

import pytest

from decoding.engine_requests import make_request
from mars_serve.config.settings import ModelSettings
from mars_serve.deploy.router import Router, prompt_keys
from mars_serve.engine.pages import page_key, root_key

PAGE = 4
SHARED = list(range(100, 140))


def keys_of(tokens: list[int], tenant: str = "") -> list[bytes]:
    return prompt_keys(tenant, tokens, PAGE)


def test_prompt_keys_equal_the_keys_of_the_engines_pages():
    first = page_key(root_key("a"), [1, 2, 3, 4])
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9], "a") == [first, page_key(first, [5, 6, 7, 8])]
    assert keys_of([1, 2, 3], "a") == []
    assert not set(keys_of(SHARED, "a")) & set(keys_of(SHARED, "b"))


def test_a_salt_keeps_prefixes_apart_within_a_tenant():
    router = Router(PAGE, slack=3)
    salts = "", "one", "two", "a", "one\n"
    keys = [prompt_keys("a", SHARED, PAGE, salt) for salt in salts]
    assert len({key for each in keys for key in each}) == sum(map(len, keys))
    assert keys[0] == keys_of(SHARED, "a")
    router.retain(frozenset("ab"))
    request = make_request("r", SHARED)
    request.cache_salt = "one"
    assert router.choose(request, {"a": 0, "b": 1}) == "a"
    busier = {"a": 2, "b": 0}
    assert router.choose(request, busier) == "a"
    request.cache_salt = "two"
    assert router.choose(request, busier) == "b"


def test_only_leading_pages_of_a_long_prompt_are_compared():
    assert len(keys_of(list(range(100_000)))) == 128


def chosen(router: Router, tokens: list[int] = SHARED, failed_on=(), **loads: float) -> str:
    """Return the replica for a request that has failed on some."""
    request = make_request("r", tokens)
    request.failed_on = failed_on
    router.retain(frozenset(loads))
    return router.choose(request, loads)


def test_a_request_goes_elsewhere_than_it_failed_if_it_can():
    router = Router(PAGE, slack=3)
    assert chosen(router, a=0, b=1) == "a"
    assert chosen(router, failed_on=("a",), a=0, b=9) == "b"
    assert chosen(router, failed_on=("a", "b"), a=1, b=0) == "b"
    assert chosen(router, failed_on=("a",), a=0) == "a"


def test_a_router_forgets_what_a_replica_had_cached_that_is_gone():
    router = Router(PAGE, slack=3)
    assert chosen(router, a=0, b=1) == "a"
    assert chosen(router, a=1, b=0) == "a"
    assert chosen(router, b=0, c=1) == "b"
    assert chosen(router, a=0, b=3) == "b"


def test_prompts_are_told_apart_by_their_tenant():
    router = Router(PAGE, slack=3)
    both = {"a": 0, "b": 1}
    assert router.choose(make_request("r", SHARED, tenant="x"), both) == "a"
    turned = {"a": 1, "b": 0}
    assert router.choose(make_request("r", SHARED, tenant="y"), turned) == "b"
    assert router.choose(make_request("r", SHARED, tenant="x"), turned) == "a"


def test_requests_are_shared_out_by_load_alone_without_prefix_caching():
    router = Router(None, slack=3)
    assert chosen(router, a=0, b=1) == "a"
    assert chosen(router, a=1, b=0) == "b"


@pytest.mark.parametrize(
    ("engine", "page_size", "slack"),
    [
        ({"max_num_seqs": 8}, 16, 2),
        ({"max_num_seqs": 2}, 16, 1),
        ({"max_num_seqs": 8, "enable_prefix_caching": False}, None, 2),
    ],
)
def test_the_router_of_a_model_follows_its_engines_settings(engine, page_size, slack):
    router = Router.of(ModelSettings(name="m", path="p", engine=engine))
    shared = list(range(page_size or 64))
    assert chosen(router, shared, a=0, b=1) == "a"
    holder = "a" if page_size else "b"
    assert chosen(router, shared, a=slack, b=0) == holder
    assert chosen(router, shared[:-1], a=1, b=0) == "b", "less than a page"
    router = Router.of(ModelSettings(name="m", path="p", engine=engine))
    assert chosen(router, shared, a=0, b=1) == "a"
    assert chosen(router, shared, a=slack + 1, b=0) == "b"
