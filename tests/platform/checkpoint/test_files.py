from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mars_platform.checkpoint.files import check_writable, replacing, settle, write_whole
from mars_platform.errors import UserError


def test_a_file_is_replaced_whole(tmp_path):
    assert write_whole(tmp_path, "a.json", "old") == tmp_path / "a.json"
    write_whole(tmp_path, "a.json", "new")
    check_writable(tmp_path, "b.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


def test_writers_of_one_process_do_not_disturb_each_other(tmp_path):
    texts = [str(number) * 5000 for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda text: write_whole(tmp_path, "a.json", text), texts * 20))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() in texts


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    modes = {each.stat().st_mode for each in (tmp_path / "other", write_whole(tmp_path, "a", ""))}
    assert len(modes) == 1
    assert stat.S_IMODE(modes.pop()) & 0o400


@pytest.fixture
def flushed(monkeypatch):
    """Paths that are flushed to disk, each with what its directory held by then."""
    found, fsync = [], os.fsync

    def record(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        found.append((path, {each.name for each in path.parent.iterdir()}))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_content_is_on_disk_before_it_gets_its_name_and_the_name_afterwards(tmp_path, flushed):
    write_whole(tmp_path, "a.json", "new")
    (content, beside), (name, _) = flushed
    assert (content.name, name, beside) == ("a.json", tmp_path, {"a.json"})
    assert content.parent.parent == tmp_path


def test_a_link_is_replaced_at_once_and_stays_after_a_power_cut(tmp_path, flushed):
    (tmp_path / "current").symlink_to("old")
    with replacing(tmp_path / "current") as new:
        new.symlink_to("nothing")
    assert [path for path, _ in flushed] == [tmp_path]
    assert os.listdir(tmp_path) == ["current"]  # noqa: PTH208 - a link to nothing is there
    assert (tmp_path / "current").readlink() == Path("nothing")


def test_a_directory_is_on_disk_before_it_gets_its_name(tmp_path, flushed):
    partial = tmp_path / "partial"
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "a").touch()
    settle(partial, tmp_path / "b")
    paths = [path.relative_to(tmp_path) for path, _ in flushed]
    assert {str(each) for each in paths[:-1]} == {"partial", "partial/inner", "partial/inner/a"}
    assert paths[-1] == Path()
    assert (tmp_path / "b" / "inner" / "a").exists()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UserError, match=r"^model: a\.json cannot be written into .*/test_a_write"):
        write_whole(tmp_path, "a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "refused", [check_writable, lambda path, name: write_whole(path, name, "new")]
)
def test_a_directory_that_takes_no_files_is_refused(tmp_path, refused):
    with pytest.raises(UserError, match=r"^model: a\.json .* make room, make the directory"):
        refused(tmp_path / "nothing", "a.json")
