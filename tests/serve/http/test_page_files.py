"""The files of the web pages: who gets them, with which headers, and that there are no others."""

from __future__ import annotations

import pytest

from mars_serve.http.page_files import page_files
from rest import asgi
from rest.api_keys import key_entry
from rest.rest_server import app_of, client_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def keyed_client(models, **settings):
    return client_of(app_of(*models, keys={"entries": [key_entry("key-a")]}, **settings))


@pytest.mark.parametrize("path", page_files())
async def test_a_page_needs_no_key_and_forbids_what_it_does_not_use(models, path):
    async with keyed_client(models) as client:
        response = await client.get(path)
    assert response.status_code == 200
    assert response.content == page_files()[path].content
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


async def test_pages_are_sent_again_only_if_they_changed(client):
    etag = (await client.get("/")).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        response = await client.get("/", headers={"If-None-Match": known})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag
    assert (await client.get("/", headers={"If-None-Match": '"other"'})).status_code == 200


async def test_head_tells_the_length_and_no_other_method_is_taken(client):
    response = await client.head("/")
    assert response.status_code == 200
    assert int(response.headers["content-length"]) == len(page_files()["/"].content)
    refused = await client.post("/")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/pages/",
        "/pages/common",
        "/pages/../page_files.py",
        "/pages/common/../../page_files.py",
        "/pages/%2e%2e/page_files.py",
        "/pages//common/style.css",
        "/pages/playground/index.html",
        "/pages/common/style.css/",
        "/docs",
        "/redoc",
    ],
)
async def test_no_other_file_is_served(models, path):
    app = app_of(*models, keys={"entries": [key_entry("key-a")]})
    for headers, status in (({}, 401), ({"Authorization": "Bearer key-a"}, 404)):
        start, *_ = await asgi.call(app, "GET", path, headers)
        assert start["status"] == status


async def test_a_mounted_application_has_its_pages_below_its_prefix(app):
    start, *_ = await asgi.call(app, "GET", "/llm/", root_path="/llm")
    assert start["status"] == 200
    assert b'="/' not in page_files()["/"].content, "links of the page are relative"


async def test_pages_can_be_turned_off(models):
    async with keyed_client(models, pages=False) as client:
        response = await client.get("/")
        assert response.status_code == 404
