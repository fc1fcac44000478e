from __future__ import annotations

import pytest

from mars_platform.checkpoint.files import check_writable, write_whole
from mars_platform.errors import UserError


def test_a_file_is_replaced_whole(tmp_path):
    assert write_whole(tmp_path, "a.json", "old") == tmp_path / "a.json"
    write_whole(tmp_path, "a.json", "new")
    check_writable(tmp_path, "b.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UserError, match=r"^model: a\.json cannot be written into .*/test_a_write"):
        write_whole(tmp_path, "a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "refused", [check_writable, lambda path, name: write_whole(path, name, "new")]
)
def test_a_directory_that_takes_no_files_is_refused(tmp_path, refused):
    with pytest.raises(UserError, match=r"^model: a\.json .* make the directory writable"):
        refused(tmp_path / "nothing", "a.json")
