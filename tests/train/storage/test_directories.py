import errno
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file

from mars_autoscale.model.frontier import FRONTIER_FILE
from mars_platform.checkpoint.calibration import CALIBRATION_FILE
from mars_platform.checkpoint.examples import EXAMPLES_FILE
from mars_platform.checkpoint.manifest import MANIFEST, MEASURED, Damaged, Manifest
from mars_platform.errors import UserError
from mars_serve.measure.frontier.working_file import WORKING_FILE
from mars_train.storage.directories import (
    SaveFailed,
    SingleWriter,
    Storage,
    copy_into,
    fetch_shared,
    share,
)
from mounting import can_mount, mounted

needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting is not permitted here")

CONTENT = {"a.bin": b"first", "inner/b.bin": bytes(range(256)) * 40, "empty": b""}


@dataclass
class Threads:
    """A member of a group of writers that run as threads."""

    rank: int
    barrier: threading.Barrier
    values: dict

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait(timeout=30)
        gathered = [self.values[rank] for rank in range(self.barrier.parties)]
        self.barrier.wait(timeout=30)
        return gathered


def together(num, task):
    """Run a task on each member of a group; return the results or `SaveFailed` errors by rank."""
    barrier, values = threading.Barrier(num), {}

    def outcome(rank):
        try:
            return task(Threads(rank, barrier, values))
        except SaveFailed as error:
            return error

    with ThreadPoolExecutor(num) as executor:
        return list(executor.map(outcome, range(num)))


def writer(content=CONTENT):
    def write(directory):
        for name, data in content.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return write


def no_room(directory):
    (directory / "a.bin").write_bytes(b"first")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remote_storage():
    return Storage(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    if request.param == "local":
        yield Storage(str(tmp_path / "root"))
        return
    remote = remote_storage()
    yield remote
    remote.remove("")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


def everything(storage):
    """Return the content of all files under the root, by path."""
    system, root = storage.file_system, storage.file_path("").rstrip("/")
    found = system.find(root) if system.exists(root) else []
    return {path.removeprefix(f"{root}/"): system.cat_file(path) for path in found}


def change(storage, name, file, content):
    storage.file_system.pipe_file(storage.file_path(f"{name}/{file}"), content)


def content_of(directory):
    """Return the content of a directory's files, without the manifest."""
    manifest = directory / MANIFEST
    files = [path for path in directory.rglob("*") if path.is_file() and path != manifest]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# --- saving ---------------------------------------------------------------------------------------


def test_a_manifest_describes_the_saved_files(storage):
    assert storage.names() == []
    storage.save("x", writer(), SingleWriter())
    assert storage.names() == ["x"]
    storage.verify("x")
    files = everything(storage)
    manifest = Manifest.model_validate_json(files.pop(f"x/{MANIFEST}"))
    assert files == {f"x/{name}": data for name, data in CONTENT.items()}
    assert {name: entry.num_bytes for name, entry in manifest.files.items()} == {
        name: len(data) for name, data in CONTENT.items()
    }
    assert {name: entry.sha256 for name, entry in manifest.files.items()} == {
        name: sha256(data).hexdigest() for name, data in CONTENT.items()
    }


def test_names_are_sorted_and_exclude_hidden_and_incomplete_directories(storage):
    for name in ("step-2", "model", "step-1", ".partial-step-3", ".refused-step-0"):
        storage.save(name, writer(), SingleWriter())
    storage.save("step-4", writer(), SingleWriter())
    storage.file_system.rm(storage.file_path(f"step-4/{MANIFEST}"))
    assert storage.names() == ["model", "step-1", "step-2"]


def test_processes_of_a_group_write_together(storage):
    def task(group):
        own = {f"shard-{group.rank}": bytes([group.rank])}
        storage.save("x", writer(own if group.rank < 3 else {}), group)

    assert together(4, task) == [None] * 4
    storage.verify("x")
    files = everything(storage)
    manifest = Manifest.model_validate_json(files.pop(f"x/{MANIFEST}"))
    assert files == {f"x/shard-{rank}": bytes([rank]) for rank in range(3)}
    assert sorted(manifest.files) == ["shard-0", "shard-1", "shard-2"]


def test_a_failed_save_raises_on_every_process_and_leaves_nothing(storage):
    storage.save("old", writer(), SingleWriter())
    before = everything(storage)

    def task(group):
        storage.save("new", no_room if group.rank == 1 else writer(), group)

    errors = together(3, task)
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert str(error) == (
            f"{storage.path('new')} could not be written: No space left on device on rank 1"
        )
    assert everything(storage) == before
    assert storage.names() == ["old"]
    storage.verify("old")
    together(3, lambda group: storage.save("new", writer({str(group.rank): b""}), group))
    assert storage.names() == ["new", "old"]


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    with mounted(path, "64k"):
        yield path


@needs_mounts
@pytest.mark.parametrize("kind", ["plain", "safetensors", "manifest"])
def test_a_full_disk_keeps_existing_directories(small_disk, kind):
    storage = Storage(str(small_disk))
    storage.save("old", writer({"a.bin": bytes(30_000)}), SingleWriter())

    def write(directory):
        if kind == "safetensors":
            save_file({"weight": torch.zeros(10_000)}, directory / "shard.safetensors")
        elif kind == "plain":
            (directory / "b.bin").write_bytes(bytes(40_000))
        else:
            free = os.statvfs(directory)
            (directory / "b.bin").write_bytes(bytes(free.f_bavail * free.f_bsize))

    with pytest.raises(SaveFailed, match="No space left on device"):
        storage.save("new", write, SingleWriter())
    assert storage.names() == ["old"]
    storage.verify("old")
    assert [path.name for path in small_disk.iterdir()] == ["old"]
    storage.save("new", writer({"b.bin": bytes(1000)}), SingleWriter())
    assert storage.names() == ["new", "old"]


# --- damage ---------------------------------------------------------------------------------------


NOT_A_MANIFEST = "manifest.json cannot be read (ValidationError)"


def flipped(data):
    return data[:100] + bytes([data[100] ^ 8]) + data[101:]


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("inner/b.bin", lambda data: data[:-1], "inner/b.bin has 10239 bytes instead of 10240"),
        ("inner/b.bin", lambda data: data + b"x", "inner/b.bin has 10241 bytes instead of 10240"),
        ("inner/b.bin", flipped, "inner/b.bin does not match its checksum"),
        *(
            (MANIFEST, lambda _, content=content: content, NOT_A_MANIFEST)
            for content in (b"", b"{", b"{}", b'{"files": {"a": 1}}', b"\xff")
        ),
    ],
)
def test_a_damaged_file_is_named(storage, file, damage, problem):
    storage.save("x", writer(), SingleWriter())
    path = storage.file_path(f"x/{file}")
    change(storage, "x", file, damage(storage.file_system.cat_file(path)))
    with pytest.raises(Damaged) as caught:
        storage.verify("x")
    assert str(caught.value) == problem


def test_a_missing_file_or_manifest_is_named(storage):
    storage.save("x", writer(), SingleWriter())
    storage.file_system.rm(storage.file_path("x/a.bin"))
    with pytest.raises(Damaged, match=r"^a\.bin is missing$"):
        storage.verify("x")
    with pytest.raises(Damaged, match=r"^manifest\.json cannot be read \(FileNotFoundError\)$"):
        storage.verify("nothing")


def test_measured_files_are_those_that_calibration_writes():
    assert {CALIBRATION_FILE, EXAMPLES_FILE, FRONTIER_FILE, WORKING_FILE} == MEASURED


@pytest.mark.parametrize("file", sorted(MEASURED))
def test_calibrating_a_stored_directory_does_not_count_as_damage(storage, file):
    storage.save("x", writer({**CONTENT, file: b"{}", f"inner/{file}": b"{}"}), SingleWriter())
    change(storage, "x", file, b'{"of": "later"}')
    storage.verify("x")
    storage.file_system.rm(storage.file_path(f"x/{file}"))
    storage.verify("x")
    change(storage, "x", f"inner/{file}", b"[]")  # another file of the same name
    with pytest.raises(Damaged, match=rf"^inner/{file} does not match its checksum$"):
        storage.verify("x")


def test_a_damaged_directory_is_set_aside_with_its_content(storage):
    storage.save("x", writer(), SingleWriter())
    storage.save("y", writer(), SingleWriter())
    storage.set_aside("x")
    assert storage.names() == ["y"]
    kept = [name for name in everything(storage) if name.startswith(".refused-x-")]
    assert sorted(name.split("/", 1)[1] for name in kept) == sorted([*CONTENT, MANIFEST])
    storage.save("x", writer(), SingleWriter())
    assert storage.names() == ["x", "y"]


# --- killed writers and removal -------------------------------------------------------------------


def test_a_killed_save_does_not_count_and_is_removed(tmp_path):
    storage = Storage(str(tmp_path / "root"))
    storage.save("x", writer(), SingleWriter())

    def killed(directory):
        writer()(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.save("y", killed, SingleWriter())
    assert storage.names() == ["x"]
    assert len(list((tmp_path / "root").iterdir())) == 2
    storage.remove_partial()
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


def test_files_of_a_killed_upload_are_not_part_of_the_next():
    storage = remote_storage()
    change(storage, "x", "shard-7", b"left by a killed writer")
    assert storage.names() == []
    storage.save("x", writer(), SingleWriter())
    storage.verify("x")
    assert content_of(storage.fetch("x")) == CONTENT


# --- fetching -------------------------------------------------------------------------------------


def test_a_fetched_directory_has_the_files_and_their_manifest(storage):
    storage.save("x", writer(), SingleWriter())
    found = storage.fetch("x")
    assert content_of(found) == CONTENT
    Storage(str(found.parent)).verify(found.name)
    (found / "a.bin").write_bytes(b"x")
    with pytest.raises(Damaged, match=r"^a\.bin "):
        Storage(str(found.parent)).verify(found.name)


def test_a_replaced_directory_is_downloaded_again():
    storage = remote_storage()
    storage.save("x", writer(), SingleWriter())
    storage.fetch("x")
    storage.remove("x")
    storage.save("x", writer({"c": b"new"}), SingleWriter())
    assert content_of(storage.fetch("x")) == {"c": b"new"}


@pytest.mark.parametrize("file", ["inner/b.bin", *sorted(MEASURED)])
def test_a_damaged_download_is_refused_and_not_kept(file):
    content = dict.fromkeys(MEASURED, b"{}") | CONTENT
    storage = remote_storage()
    storage.save("x", writer(content), SingleWriter())
    change(storage, "x", file, b"[]")
    with pytest.raises(Damaged, match=rf"^{file} (does not match its checksum|has 2 bytes inst)"):
        storage.fetch("x")
    change(storage, "x", file, content[file])
    assert content_of(storage.fetch("x")) == content


def test_concurrent_fetches_share_one_copy():
    storage = remote_storage()
    storage.save("x", writer(), SingleWriter())
    found = together(4, lambda _: storage.fetch("x"))
    assert len(set(found)) == 1
    assert content_of(found[0]) == CONTENT


def test_a_local_directory_is_shared_without_a_copy(tmp_path):
    source = tmp_path / "source"
    writer()(source)
    reference = share(Storage(str(tmp_path / "root")), "x", source)
    assert fetch_shared(reference) == reference == str(source)
    assert not (tmp_path / "root").exists()


def test_a_directory_is_shared_through_a_remote_storage(tmp_path):
    repository = tmp_path / "models--some--model"
    source, linked = repository / "snapshots" / "commit", repository / "blobs"
    writer()(linked)
    source.mkdir(parents=True)
    (source / "a.bin").symlink_to(linked / "a.bin")  # as in the hub's cache
    storage = Storage(f"memory://{uuid.uuid4().hex}/deep")
    reference = share(storage, "start", source)
    assert reference == storage.path("start")
    (linked / "a.bin").write_bytes(b"later")
    assert share(storage, "start", source) == reference
    assert content_of(Path(fetch_shared(reference))) == {"a.bin": b"first"}


# --- roots ----------------------------------------------------------------------------------------


def test_a_root_may_be_a_path_or_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in (str(tmp_path / "root"), f"file://{tmp_path}/root", "root", "root/"):
        storage = Storage(root)
        assert storage.is_local
        assert storage.path("x") == f"{tmp_path}/root/x"
    remote = Storage("memory://bucket/runs/")
    assert not remote.is_local
    assert remote.path("x") == "memory://bucket/runs/x"
    assert Storage(remote.path("x")).path("y") == "memory://bucket/runs/x/y"


@pytest.mark.parametrize("root", ["nosuch://bucket/run", "gdrive://bucket/run"])
def test_a_root_of_an_unknown_protocol_is_refused(root):
    with pytest.raises(UserError, match=rf"^checkpoints\.storage: {root} cannot be used \(") as e:
        Storage(root)
    assert "\n" not in str(e.value)


class RemembersListings(MemoryFileSystem):
    """A file system that caches listings, as those of object stores do by default."""

    protocol = "remembers"
    cachable = False

    def ls(self, path, detail=True, **kwargs):
        found = self.dircache[path] if path in self.dircache else super().ls(path, detail=True)
        self.dircache[path] = found
        return found if detail else [item["name"] for item in found]


def test_directories_saved_by_others_are_listed_at_once():
    fsspec.register_implementation("remembers", RemembersListings, clobber=True)
    root = f"remembers://{uuid.uuid4().hex}"
    ours, theirs = Storage(root), Storage(root)
    for before, after in pairwise([[], ["a"], ["a", "b"]]):
        assert ours.names() == before
        theirs.save(after[-1], writer(), SingleWriter())
        assert ours.names() == after


def test_nothing_is_copied_that_a_link_leads_to(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").symlink_to("/proc/self/environ")
    with pytest.raises(UserError, match=r"^model: .*: README\.md is a link that leads out"):
        copy_into(tmp_path / "copy", tmp_path / "model")
    assert not (tmp_path / "copy").exists()
