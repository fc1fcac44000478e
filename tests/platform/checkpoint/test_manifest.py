"""Manifests of strangers: names that lead elsewhere, files that nothing lists, and sizes."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
import uuid

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from mars_platform.checkpoint.files import write_whole
from mars_platform.checkpoint.manifest import (
    MANIFEST,
    MEASURED,
    Damaged,
    describe_all,
    own_files,
    read_manifest,
    verify,
)
from mars_platform.errors import UserError

ENTRY = {"num_bytes": 1, "sha256": "0" * 64}
LOCAL = LocalFileSystem()


@pytest.fixture
def stored(tmp_path):
    """A directory that matches its manifest."""
    path = tmp_path / "stored"
    (path / "inner").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "inner" / "a.safetensors").write_bytes(b"\0" * 9)
    (path / MANIFEST).write_text(describe_all(path).text)
    verify(LOCAL, str(path))
    return path


def in_memory(path):
    """Copy a directory to an object store; return its file system and its place there."""
    remote, place = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}/stored"
    remote.put(str(path), place, recursive=True)
    return remote, place


def read(directory, text):
    """What reading a manifest complains of."""
    (directory / MANIFEST).write_text(text)
    with pytest.raises(Damaged) as caught:
        read_manifest(LOCAL, str(directory))
    return str(caught.value)


def listing(*names, **more):
    return json.dumps({"files": {name: {**ENTRY, **more} for name in names}})


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is an absolute path"),
        ("../outside", "has an empty part, '.' or '..'"),
        ("inner/../../outside", "has an empty part, '.' or '..'"),
        ("./config.json", "has an empty part, '.' or '..'"),
        ("inner//a", "has an empty part, '.' or '..'"),
        ("inner/", "has an empty part, '.' or '..'"),
        ("..\\outside", "has a backslash"),
        ("C:outside", "begins with a drive"),
        ("a\0.json", "has a character that cannot be printed"),
        ("a\n.json", "has a character that cannot be printed"),
        ("nosj\u202e.exe", "has a character that cannot be printed"),
        ("a" * 256, "is too long"),
        ("/".join(["a" * 200] * 6), "is too long"),
        ("/".join("a" * 17), "is too deep"),
    ],
)
def test_a_name_that_is_no_plain_one_is_refused(tmp_path, name, problem):
    shown = f"{MANIFEST} cannot be read (the file name {name[:80]!r} {problem})"
    assert read(tmp_path, listing("a", name)) == shown


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ((MANIFEST,), "it lists itself"),
        (("MANIFEST.json",), "the file name 'MANIFEST.json' differs from 'manifest.json' only in"),
        (("Config.json", "config.json"), "the file name 'config.json' differs from 'Config.json'"),
        (("a/b", "a"), "the file name 'a' is also that of a directory"),
    ],
)
def test_names_that_stand_for_one_place_are_refused(tmp_path, names, problem):
    assert problem in read(tmp_path, listing(*names))


def test_plain_names_are_read_as_they_are(tmp_path):
    names = ["a.json", "inner/manifest.json", "..a", "a..", "~a", "é", "a b", ".calibrate.json"]
    (tmp_path / MANIFEST).write_text(listing(*names))
    assert list(read_manifest(LOCAL, str(tmp_path)).files) == names


@pytest.mark.parametrize(
    "more", [{"sha256": "0" * 63}, {"sha256": "G" * 64}, {"num_bytes": -1}, {"num_bytes": 2**60}]
)
def test_an_impossible_entry_is_refused(tmp_path, more):
    assert read(tmp_path, listing("a", **more)) == f"{MANIFEST} cannot be read (ValidationError)"


@pytest.mark.parametrize("name", ["a\nb", "a\\b", b"a\xff"])
def test_a_directory_with_a_strange_name_gets_no_manifest(tmp_path, name):
    with open(os.path.join(os.fsencode(tmp_path), os.fsencode(name)), "w"):  # noqa: PTH118, PTH123
        pass
    with pytest.raises(UserError, match=r"the file name .* rename or remove it$"):
        describe_all(tmp_path)


# --- sizes ----------------------------------------------------------------------------------------


def test_a_huge_manifest_is_refused_without_being_read(tmp_path):
    with (tmp_path / MANIFEST).open("wb") as handle:
        handle.truncate(2**30)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match=r"^manifest\.json has more than 4,194,304 bytes$"):
            read_manifest(LOCAL, str(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def test_too_many_files_are_refused(tmp_path):
    assert "more than 10,000 files" in read(tmp_path, listing(*map(str, range(10_001))))


# --- files beside the listed ones -----------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "adapter_config.json", "own.py", "x/y.bin", "inner/notes"]
)
def test_a_file_that_is_not_listed_is_refused(stored, where, name):
    (stored / name).parent.mkdir(exist_ok=True)
    (stored / name).write_text("x")
    place = (LOCAL, str(stored)) if where == "local" else in_memory(stored)
    with pytest.raises(Damaged, match=rf"^{name} is not listed in manifest\.json$"):
        verify(*place)


@pytest.mark.parametrize("where", ["local", "memory"])
def test_files_that_nothing_reads_may_be_added(stored, where):
    for name in (*MEASURED, "README.md", "curves.png", ".nfs01", ".git/config", ".frontier.json.7"):
        (stored / name).parent.mkdir(exist_ok=True)
        (stored / name).write_text("x")
    verify(*((LOCAL, str(stored)) if where == "local" else in_memory(stored)))


def test_a_marker_of_a_directory_in_an_object_store_is_no_file(stored):
    remote, place = in_memory(stored)

    class WithMarkers(type(remote)):
        """Lists directories as some stores do."""

        cachable = False

        def find(self, path, **options):
            return [f"{path}/", f"{path}/inner/", *super().find(path, **options)]

    verify(WithMarkers(), place)


def test_a_key_that_climbs_in_an_object_store_is_refused(stored):
    remote, place = in_memory(stored)
    remote.pipe_file(f"{place}/inner/../../outside", b"x")
    with pytest.raises(Damaged, match=r"^inner/\.\./\.\./outside is not listed"):
        verify(remote, place)


# --- links, pipes and directories -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "frontier.json", ".hidden.json", "inner"])
def test_a_link_that_leads_out_of_the_directory_is_refused(stored, tmp_path, name):
    content = stored / name
    (tmp_path / "outside").mkdir()
    if content.exists():
        content.rename(tmp_path / "outside" / name)
    content.symlink_to(tmp_path / "outside" / name)
    problem = rf"{name} is a link that leads out of the directory"
    with pytest.raises(Damaged, match=f"^{problem}$"):
        verify(LOCAL, str(stored))
    with pytest.raises(UserError, match=f"{problem}; remove it, or put a copy of its"):
        describe_all(stored)


def test_a_loop_of_links_is_refused(stored):
    (stored / "loop.json").symlink_to("loop.json")
    with pytest.raises(Damaged, match=r"^loop\.json is not listed"):
        verify(LOCAL, str(stored))


def test_links_within_the_directory_and_to_it_are_followed(stored, tmp_path):
    (stored / "config.json").rename(stored / "inner" / "real.json")
    (stored / "config.json").symlink_to("inner/real.json")
    (stored / MANIFEST).write_text(describe_all(stored).text)
    (tmp_path / "current").symlink_to(stored)
    verify(LOCAL, str(tmp_path / "current"))


def test_a_pipe_or_a_directory_in_a_files_place_is_refused_without_being_opened(stored):
    (stored / "config.json").unlink()
    os.mkfifo(stored / "config.json")
    with pytest.raises(Damaged, match=r"^config\.json is no file$"):
        verify(LOCAL, str(stored))
    with pytest.raises(UserError, match=r"config\.json is no file; remove it"):
        describe_all(stored)
    (stored / "config.json").unlink()
    (stored / "config.json").mkdir()
    with pytest.raises(Damaged, match=r"^config\.json is no file$"):
        verify(LOCAL, str(stored))


def test_a_directory_in_the_manifests_place_is_refused(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(Damaged, match=r"cannot be read \(IsADirectoryError\)"):
        verify(LOCAL, str(tmp_path))


def test_a_directory_is_read_while_its_files_are_replaced(tmp_path):
    write_whole(tmp_path, "a.json", "{}")
    has_ended = threading.Event()

    def write() -> None:
        while not has_ended.is_set():
            write_whole(tmp_path, "a.json", "{}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert "a.json" in set(own_files(tmp_path))
    finally:
        has_ended.set()
        writer.join()
