"""Objects of keys on a disk and in an object store."""

from __future__ import annotations

import asyncio
import uuid
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event

import pytest

from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError
from mars_serve.config.settings import StorageSettings
from mars_serve.storage.objects import ObjectStorage, made_at, new_id

DAY_S = 86_400


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return str(tmp_path / "kept [1] *")  # characters of patterns


def test_ids_sort_by_time_and_tell_it() -> None:
    ids = [new_id(now_s) for now_s in (1.0, 1.5, 1_800_000_000.5)]
    assert ids == sorted(ids)
    assert [made_at(each) for each in ids] == [1.0, 1.5, 1_800_000_000.5]
    assert len({new_id(1.0) for _ in range(100)}) == 100


async def test_objects_belong_to_tenant_and_kind_and_last_in_order(root: str) -> None:
    storage, ids = ObjectStorage(StorageSettings(path=root)), sorted(new_id() for _ in range(3))
    assert await storage.names("key:a", "files") == []
    for number, name in enumerate(reversed(ids)):
        await storage.put("key:a", "files", name, b"%d" % number)
    assert await storage.names("key:a", "files") == sorted(ids)
    other = ObjectStorage(StorageSettings(path=root))  # another ingress replica
    assert await other.get("key:a", "files", ids[0]) == b"2"
    assert await other.get_all("key:a", "files", [*ids, new_id()]) == {
        ids[0]: b"2", ids[1]: b"1", ids[2]: b"0"
    }  # fmt: skip
    for tenant, kind in [("key:b", "files"), ("key:a", "batches"), ("", "files")]:
        assert await other.get(tenant, kind, ids[0]) is None
        assert not await other.delete(tenant, kind, ids[0])
    with storage.open("key:a", "files", ids[1]) as opened:
        assert opened.read() == b"1"
    assert await other.delete("key:a", "files", ids[1])
    assert await storage.get("key:a", "files", ids[1]) is None
    with pytest.raises(FileNotFoundError):
        storage.open("key:a", "files", ids[1])


@pytest.mark.parametrize("text", ["", "..", "../../x", "A" * 32, "f" * 32 + "\n", "é" * 32])
async def test_text_that_is_no_id_names_nothing(root: str, text: str) -> None:
    storage = ObjectStorage(StorageSettings(path=root))
    assert await storage.get("", "files", text) is None
    assert not await storage.delete("", "files", text)
    with pytest.raises(FileNotFoundError):
        storage.open("", "files", text)


async def test_large_objects_are_copied_from_files(root: str) -> None:
    storage, name = ObjectStorage(StorageSettings(path=root)), new_id()
    with TemporaryFile() as file:
        file.write(bytes(range(256)) * 4096)
        assert await storage.put_file("", "files", name, file) == 2**20
    assert await storage.get("", "files", name) == bytes(range(256)) * 4096


async def test_a_write_that_fails_leaves_the_old_object(root: str) -> None:
    class Failing(BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError("the disk is gone")

        getvalue = read

    storage, name = ObjectStorage(StorageSettings(path=root)), new_id()
    await storage.put("", "files", name, b"old")
    with pytest.raises(OSError, match="gone"):
        await storage.put_file("", "files", name, Failing(b"new"))
    assert await storage.get("", "files", name) == b"old"
    assert await storage.names("", "files") == [name]


async def test_a_key_is_refused_what_it_has_no_room_for(root: str) -> None:
    settings = StorageSettings(path=root, bytes_per_key=2**20, objects_per_key=2)
    storage, ids = ObjectStorage(settings), sorted(new_id() for _ in range(4))
    await storage.put("a", "files", ids[0], bytes(2**20))
    await storage.put("a", "files", ids[0], bytes(2**20))  # in place of itself
    with pytest.raises(ApiError, match="1048576 bytes") as refused:
        await storage.put("a", "files", ids[1], b"1")
    assert (refused.value.status, refused.value.code) == (429, "storage_full")
    await storage.put("a", "files", ids[1], b"1", on_full="exceed")
    await storage.put("b", "files", ids[1], b"1")  # another key
    counted_anew = ObjectStorage(settings)
    with pytest.raises(ApiError, match="1048577 bytes and 0 objects"):
        await counted_anew.put("a", "responses", ids[2], b"")
    assert await counted_anew.delete("a", "files", ids[0])
    await counted_anew.put("a", "files", ids[2], b"2")
    with pytest.raises(ApiError, match="2 objects"):
        await counted_anew.put("a", "files", ids[3], b"3")
    await counted_anew.put("a", "responses", ids[3], b"3")
    await counted_anew.put("a", "files", ids[3], b"3", on_full="drop_oldest")
    assert await counted_anew.names("a", "files") == ids[2:]
    with pytest.raises(ApiError):  # nothing that is dropped makes room for it
        await counted_anew.put("b", "files", ids[2], bytes(2**20 + 1), on_full="drop_oldest")


async def test_what_is_full_of_another_kind_loses_nothing(root: str) -> None:
    settings = StorageSettings(path=root, bytes_per_key=2**20)
    storage, ids = ObjectStorage(settings), sorted(new_id() for _ in range(3))
    await storage.put("a", "responses", ids[0], bytes(2**10))
    assert await storage.has_room("a", 2**20, but_for="responses")
    await storage.put("a", "files", ids[1], bytes(2**20), on_full="exceed")
    assert not await storage.has_room("a", 1, but_for="responses")
    with pytest.raises(ApiError, match="1049600 bytes and 1 objects"):
        await storage.put("a", "responses", ids[2], b"1", on_full="drop_oldest")
    assert await storage.names("a", "responses") == ids[:1]


async def test_a_tenant_that_waits_for_a_slow_storage_holds_up_no_other(root: str) -> None:
    storage, is_over = ObjectStorage(StorageSettings(path=root)), Event()
    waits = [
        asyncio.create_task(threads.run("a", is_over.wait))
        for threads in (storage.short, storage.long)
        for _ in range(40)
    ]
    await asyncio.sleep(0)  # all wait now
    with TemporaryFile() as file:
        await storage.put_file("b", "files", new_id(), file)
    assert len(await storage.names("b", "files")) == 1
    assert not any(each.done() for each in waits)
    is_over.set()
    assert all(await asyncio.gather(*waits))


async def test_objects_end_with_their_lifetime(root: str) -> None:
    now_s = 1_800_000_000.0
    storage = ObjectStorage(StorageSettings(path=root, lifetime_days=2), lambda: now_s)
    ids = [new_id(now_s - 1.5 * DAY_S), new_id(now_s)]
    for name in ids:
        await storage.put("", f"parts/{ids[0]}", name, b"text")
    now_s += DAY_S
    assert await storage.names("", f"parts/{ids[0]}") == ids[1:]
    assert await storage.get("", f"parts/{ids[0]}", ids[0]) is None
    await storage.delete_expired()
    now_s -= DAY_S
    assert await storage.names("", f"parts/{ids[0]}") == ids[1:]
    await storage.delete_all("", f"parts/{ids[0]}", ids)
    assert await storage.names("", f"parts/{ids[0]}") == []


async def test_what_a_killed_writer_left_does_not_show_and_is_deleted(tmp_path: Path) -> None:
    now_s = 1_800_000_000.0
    storage = ObjectStorage(StorageSettings(path=str(tmp_path), lifetime_days=1), lambda: now_s)
    name = new_id(now_s)
    await storage.put("", "files", new_id(now_s), b"")
    (kind,) = tmp_path.glob("*/files")
    (kind / f".{name}.x7").mkdir()
    (kind / f".{name}.x7" / name).write_bytes(b"half")
    others = [tmp_path / name, tmp_path / "others" / name, tmp_path / name / "Kind" / name]
    for file in others:  # of other programs, with names like ours
        file.parent.mkdir(exist_ok=True, parents=True)
        if file.parent != tmp_path:
            file.write_bytes(b"")
    assert len(await storage.names("", "files")) == 1
    now_s += 2 * DAY_S
    await storage.delete_expired()
    assert list(kind.iterdir()) == []
    assert all(file.exists() for file in others)


def test_a_storage_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (str(tmp_path / "file"), "nowhere://bucket"):
        with pytest.raises(UserError, match=r"^storage\.path: .* name a directory or a URL"):
            ObjectStorage(StorageSettings(path=path))
    assert StorageSettings(path="kept").path == str(Path("kept").absolute())
    assert StorageSettings(path="s3://bucket/kept").path == "s3://bucket/kept"


async def test_of_several_that_delete_an_object_at_once_one_has_deleted_it(tmp_path: Path) -> None:
    storage = ObjectStorage(StorageSettings(path=str(tmp_path)))
    for _ in range(30):
        await storage.put("", "files", name := new_id(), b"content")
        deleted = await asyncio.gather(*(storage.delete("", "files", name) for _ in range(8)))
        assert deleted.count(True) == 1
    assert await storage.has_room("", storage.settings.bytes_per_key, but_for="")
