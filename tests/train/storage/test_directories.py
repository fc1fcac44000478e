import errno
import os
import subprocess
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
from mars_platform.checkpoint.manifest import MANIFEST, MEASURED, Damaged, Manifest
from mars_platform.errors import UserError
from mars_serve.measure.frontier.working_file import WORKING_FILE
from mars_train.storage.directories import (
    Alone,
    SaveFailed,
    Storage,
    copy_into,
    fetch_shared,
    share,
)

CONTENT = {"a.bin": b"first", "inner/b.bin": bytes(range(256)) * 40, "empty": b""}


@dataclass
class Threads:
    """Processes of a group, as threads."""

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
    """What the task returns or raises on each member of a group."""
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


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    if request.param == "local":
        yield Storage(str(tmp_path / "root"))
        return
    root = f"memory://{uuid.uuid4().hex}"
    yield Storage(root)
    Storage(root).remove_all("")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


def everything(storage):
    """All files under the root, by path."""
    system, root = storage.file_system, storage.file_path("").rstrip("/")
    found = system.find(root) if system.exists(root) else []
    return {path.removeprefix(f"{root}/"): system.cat_file(path) for path in found}


def change(storage, name, file, content):
    storage.file_system.pipe_file(storage.file_path(f"{name}/{file}"), content)


def content_of(directory):
    """Without the manifest."""
    manifest = directory / MANIFEST
    files = [path for path in directory.rglob("*") if path.is_file() and path != manifest]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# --- saving ---------------------------------------------------------------------------------------


def test_saved_directory_is_described_by_its_manifest(storage):
    assert storage.names() == []
    storage.save("x", writer(), Alone())
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


def test_names_are_sorted_and_leave_out_what_is_hidden_or_has_no_manifest(storage):
    for name in ("step-2", "model", "step-1", ".partial-step-3", ".refused-step-0"):
        storage.save(name, writer(), Alone())
    storage.save("step-4", writer(), Alone())
    storage.file_system.rm(storage.file_path(f"step-4/{MANIFEST}"))
    assert storage.names() == ["model", "step-1", "step-2"]


def test_processes_of_a_group_write_together(storage):
    def task(group):
        storage.save("x", writer({f"shard-{group.rank}": bytes([group.rank])}), group)

    assert together(3, task) == [None, None, None]
    storage.verify("x")
    files = everything(storage)
    manifest = Manifest.model_validate_json(files.pop(f"x/{MANIFEST}"))
    assert files == {f"x/shard-{rank}": bytes([rank]) for rank in range(3)}
    assert sorted(manifest.files) == ["shard-0", "shard-1", "shard-2"]


def test_process_of_a_group_may_have_nothing_to_write(storage):
    def task(group):
        storage.save("x", writer({"a.bin": b"first"} if group.rank == 0 else {}), group)

    together(2, task)
    storage.verify("x")
    assert sorted(everything(storage)) == ["x/a.bin", f"x/{MANIFEST}"]


def test_failed_save_raises_on_every_process_and_leaves_nothing(storage):
    storage.save("old", writer(), Alone())
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


def test_manifest_that_cannot_be_written_fails_the_save_everywhere(tmp_path):
    storage = Storage(str(tmp_path))
    (tmp_path / "x" / "in the way").mkdir(parents=True)

    def task(group):
        storage.save("x", writer({str(group.rank): b""}), group)

    errors = together(2, task)
    assert all(isinstance(error, SaveFailed) for error in errors)
    assert "Directory not empty" in str(errors[1])
    assert [path.name for path in tmp_path.iterdir() if path.name != "temporary"] == ["x"]


def test_mistake_in_writing_is_no_failure_of_the_disk(storage):
    def write(directory):
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        storage.save("x", write, Alone())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", path])  # noqa: S607
    if made.returncode:
        pytest.skip("mounting is not permitted here")
    yield path
    subprocess.run(["umount", path], check=True)  # noqa: S607


@pytest.mark.parametrize("kind", ["plain", "safetensors", "manifest"])
def test_full_disk_keeps_what_is_there(small_disk, kind):
    storage = Storage(str(small_disk))
    storage.save("old", writer({"a.bin": bytes(30_000)}), Alone())

    def write(directory):
        if kind == "safetensors":
            save_file({"weight": torch.zeros(10_000)}, directory / "shard.safetensors")
        elif kind == "plain":
            (directory / "b.bin").write_bytes(bytes(40_000))
        else:
            free = os.statvfs(directory)
            (directory / "b.bin").write_bytes(bytes(free.f_bavail * free.f_bsize))

    with pytest.raises(SaveFailed, match="No space left on device"):
        storage.save("new", write, Alone())
    assert storage.names() == ["old"]
    storage.verify("old")
    assert [path.name for path in small_disk.iterdir()] == ["old"]
    storage.save("new", writer({"b.bin": bytes(1000)}), Alone())
    assert storage.names() == ["new", "old"]


# --- damage ---------------------------------------------------------------------------------------


def flipped(data):
    return data[:100] + bytes([data[100] ^ 8]) + data[101:]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1], "inner/b.bin has 10239 bytes instead of 10240"),
        (lambda data: data + b"x", "inner/b.bin has 10241 bytes instead of 10240"),
        (flipped, "inner/b.bin does not match its checksum"),
    ],
)
def test_damaged_file_is_named(storage, damage, problem):
    storage.save("x", writer(), Alone())
    change(storage, "x", "inner/b.bin", damage(CONTENT["inner/b.bin"]))
    with pytest.raises(Damaged) as caught:
        storage.verify("x")
    assert str(caught.value) == problem


def test_missing_file_is_named(storage):
    storage.save("x", writer(), Alone())
    storage.file_system.rm(storage.file_path("x/a.bin"))
    with pytest.raises(Damaged, match=r"^a\.bin is missing$"):
        storage.verify("x")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"files": {"a": 1}}', b"\xff"])
def test_broken_manifest_is_named(storage, content):
    storage.save("x", writer(), Alone())
    change(storage, "x", MANIFEST, content)
    with pytest.raises(Damaged, match=r"^manifest\.json cannot be read \(ValidationError\)$"):
        storage.verify("x")


def test_directory_without_a_manifest_is_damaged(storage):
    with pytest.raises(Damaged, match=r"^manifest\.json cannot be read \(FileNotFoundError\)$"):
        storage.verify("nothing")


def test_what_calibration_writes_is_known_by_name():
    assert {CALIBRATION_FILE, FRONTIER_FILE, WORKING_FILE} == MEASURED


@pytest.mark.parametrize("file", sorted(MEASURED))
def test_a_directory_that_is_calibrated_after_it_was_stored_is_not_damaged(storage, file):
    storage.save("x", writer({**CONTENT, file: b"{}", f"inner/{file}": b"{}"}), Alone())
    change(storage, "x", file, b'{"of": "later"}')
    storage.verify("x")
    storage.file_system.rm(storage.file_path(f"x/{file}"))
    storage.verify("x")
    change(storage, "x", f"inner/{file}", b"[]")  # another file, which has but the name
    with pytest.raises(Damaged, match=rf"^inner/{file} does not match its checksum$"):
        storage.verify("x")


def test_damaged_directory_is_set_aside_with_its_content(storage):
    storage.save("x", writer(), Alone())
    storage.save("y", writer(), Alone())
    storage.set_aside("x")
    assert storage.names() == ["y"]
    kept = [name for name in everything(storage) if name.startswith(".refused-x-")]
    assert sorted(name.split("/", 1)[1] for name in kept) == sorted([*CONTENT, MANIFEST])
    storage.save("x", writer(), Alone())
    assert storage.names() == ["x", "y"]


# --- what killed writers leave --------------------------------------------------------------------


def test_save_that_was_killed_does_not_count_and_is_removed(tmp_path):
    storage = Storage(str(tmp_path / "root"))
    storage.save("x", writer(), Alone())

    def killed(directory):
        writer()(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.save("y", killed, Alone())
    assert storage.names() == ["x"]
    assert len(list((tmp_path / "root").iterdir())) == 2
    storage.remove_partial()
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


def test_upload_that_was_killed_does_not_count_and_does_not_mix_in():
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    change(storage, "x", "shard-7", b"of the killed writer")
    assert storage.names() == []
    storage.save("x", writer(), Alone())
    assert content_of(storage.fetch("x")) == CONTENT


def test_nothing_to_clean_where_nothing_was_saved(storage):
    storage.remove_partial()
    storage.remove_all("x")
    assert storage.names() == []


def test_removed_directory_is_gone(storage):
    storage.save("x", writer(), Alone())
    storage.save("y", writer(), Alone())
    storage.remove("x")
    assert {name.split("/")[0] for name in everything(storage)} == {"y"}
    storage.remove_all("y")
    assert everything(storage) == {}


# --- fetching -------------------------------------------------------------------------------------


def test_fetched_directory_has_the_files_and_their_manifest(storage):
    storage.save("x", writer(), Alone())
    found = storage.fetch("x")
    assert content_of(found) == CONTENT
    Storage(str(found.parent)).verify(found.name)
    (found / "a.bin").write_bytes(b"x")
    with pytest.raises(Damaged, match=r"^a\.bin "):
        Storage(str(found.parent)).verify(found.name)


def test_a_copy_of_a_stored_directory_gets_a_manifest_of_its_own(storage, tmp_path):
    other = Storage(str(tmp_path / "other"))
    other.save("x", writer({"old": b"1"}), Alone())

    def copied(directory):
        copy_into(directory, other.fetch("x"))
        writer({"new": b"2"})(directory)

    storage.save("y", copied, Alone())
    storage.verify("y")
    assert content_of(storage.fetch("y")) == {"old": b"1", "new": b"2"}


def test_directory_is_downloaded_once():
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.save("x", writer(), Alone())
    first = storage.fetch("x")
    change(storage, "x", "a.bin", b"other")
    assert storage.fetch("x") == first
    assert content_of(first) == CONTENT


def test_directory_that_was_replaced_is_downloaded_again():
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.save("x", writer(), Alone())
    storage.fetch("x")
    storage.remove("x")
    storage.save("x", writer({"c": b"new"}), Alone())
    assert content_of(storage.fetch("x")) == {"c": b"new"}


def test_damaged_download_is_refused_and_not_kept(tmp_path):
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.save("x", writer(), Alone())
    change(storage, "x", "inner/b.bin", flipped(CONTENT["inner/b.bin"]))
    with pytest.raises(Damaged, match=r"^inner/b\.bin does not match its checksum$"):
        storage.fetch("x")
    change(storage, "x", "inner/b.bin", CONTENT["inner/b.bin"])
    assert content_of(storage.fetch("x")) == CONTENT


@pytest.mark.parametrize("file", sorted(MEASURED))
def test_a_measurement_is_downloaded_and_checked_on_its_way(file):
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.save("x", writer({**CONTENT, file: b"{}"}), Alone())
    change(storage, "x", file, b"[]")
    with pytest.raises(Damaged, match=rf"^{file} does not match its checksum$"):
        storage.fetch("x")
    change(storage, "x", file, b"{}")
    assert content_of(storage.fetch("x")) == {**CONTENT, file: b"{}"}


def test_threads_that_fetch_at_once_get_one_copy():
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.save("x", writer(), Alone())
    found = together(4, lambda _: storage.fetch("x"))
    assert len(set(found)) == 1
    assert content_of(found[0]) == CONTENT


def test_local_directory_is_shared_as_it_is(tmp_path):
    source = tmp_path / "source"
    writer()(source)
    reference = share(Storage(str(tmp_path / "root")), "x", source)
    assert fetch_shared(reference) == reference == str(source)
    assert not (tmp_path / "root").exists()


def test_directory_is_shared_through_a_remote_storage(tmp_path):
    source, linked = tmp_path / "source", tmp_path / "linked"
    writer()(linked)
    source.mkdir()
    (source / "a.bin").symlink_to(linked / "a.bin")  # as in the hub's cache
    storage = Storage(f"memory://{uuid.uuid4().hex}/deep")
    reference = share(storage, "start", source)
    assert reference == storage.path("start")
    (linked / "a.bin").write_bytes(b"later")
    assert share(storage, "start", source) == reference
    assert content_of(Path(fetch_shared(reference))) == {"a.bin": b"first"}


def test_copy_keeps_what_is_there(tmp_path):
    writer({"a": b"1", "inner/b": b"2"})(tmp_path / "from")
    writer({"a": b"0", "c": b"3"})(tmp_path / "to")
    copy_into(tmp_path / "to", tmp_path / "from")
    assert content_of(tmp_path / "to") == {"a": b"1", "inner/b": b"2", "c": b"3"}


# --- roots ----------------------------------------------------------------------------------------


def test_root_may_be_a_path_or_a_url(tmp_path, monkeypatch):
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
def test_root_that_nothing_can_reach_is_refused(root):
    with pytest.raises(UserError, match=rf"^checkpoints\.storage: {root} cannot be used \(") as e:
        Storage(root)
    assert "\n" not in str(e.value)


class RemembersListings(MemoryFileSystem):
    """As file systems of object stores do, unless they are told not to."""

    protocol = "remembers"
    cachable = False

    def ls(self, path, detail=True, **kwargs):
        found = self.dircache[path] if path in self.dircache else super().ls(path, detail=True)
        self.dircache[path] = found
        return found if detail else [item["name"] for item in found]


def test_what_others_have_saved_is_seen_at_once():
    fsspec.register_implementation("remembers", RemembersListings, clobber=True)
    root = f"remembers://{uuid.uuid4().hex}"
    ours, theirs = Storage(root), Storage(root)
    for before, after in pairwise([[], ["a"], ["a", "b"]]):
        assert ours.names() == before
        theirs.save(after[-1], writer(), Alone())
        assert ours.names() == after
