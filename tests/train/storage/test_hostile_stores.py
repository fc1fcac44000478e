"""Downloads from object stores that others may write to."""

import json
import os
import uuid

import pytest

from mars_platform.checkpoint.manifest import MANIFEST, Damaged
from mars_platform.errors import UserError
from mars_train.storage.directories import SingleWriter, Storage


@pytest.fixture
def storage():
    """An object store with one directory of one file."""
    found = Storage(f"memory://{uuid.uuid4().hex}")
    found.save("x", lambda directory: (directory / "a").write_bytes(b"1"), SingleWriter())
    return found


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


def change(storage, key, content):
    storage.file_system.pipe_file(storage.file_path(key), content)


def manifest_of(storage):
    return json.loads(storage.file_system.cat_file(storage.file_path("x", MANIFEST)))


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "inner/../../../escaped"])
def test_a_manifest_of_a_store_names_no_place_outside_of_the_download(storage, tmp_path, name):
    name = str(tmp_path / "escaped") if name.startswith("/") else name
    listed = manifest_of(storage)
    listed["files"][name] = listed["files"]["a"]
    change(storage, f"x/{MANIFEST}", json.dumps(listed).encode())
    for key in (name, f"x/{name}"):
        change(storage, key, b"1")
    with pytest.raises(Damaged, match=r"^manifest\.json cannot be read \(the file name "):
        storage.fetch("x")
    assert not list(tmp_path.rglob("*escaped*"))


def test_more_is_never_downloaded_than_the_manifest_says(storage, monkeypatch):
    change(storage, "x/a", b"1" * 1000)
    monkeypatch.setattr(storage.file_system, "get_file", None)
    with pytest.raises(Damaged, match=r"^a has 1000 bytes instead of 1$"):
        storage.fetch("x")
    storage.file_system.rm(storage.file_path("x/a"))
    with pytest.raises(Damaged, match=r"^a is missing$"):
        storage.fetch("x")


def test_a_download_without_room_is_refused_before_it_begins(storage):
    listed = manifest_of(storage)
    listed["files"]["a"]["num_bytes"] = 2**53
    change(storage, f"x/{MANIFEST}", json.dumps(listed).encode())
    with pytest.raises(UserError, match=r"has 9,007,199,254,740,992 bytes, .* set TMPDIR"):
        storage.fetch("x")


@pytest.mark.parametrize("prepared", ["link", "open"])
def test_a_directory_that_others_prepared_gets_no_downloads(storage, tmp_path, prepared):
    cache = tmp_path / "temporary" / f"marsray-{os.getuid()}"
    if prepared == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        cache.mkdir()
        cache.chmod(0o777)
    with pytest.raises(UserError, match=r"others may write to it, .* set TMPDIR"):
        storage.fetch("x")
