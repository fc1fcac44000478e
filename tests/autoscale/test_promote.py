from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from frontiers import frontier_of, point
from mars_autoscale.frontier import write_frontier
from mars_autoscale.promote import Gate, promote
from mars_platform.calibration import weights_fingerprint
from mars_platform.cli import run
from mars_platform.errors import UserError

Content = dict[str, Any]


def checkpoint(path: Path, quality: float = 80.0, tokens: float = 1.5, **more: Any) -> Path:
    """A directory with weights of its own and a frontier that was measured on them."""
    path.mkdir()
    weights = {"weight": torch.tensor([quality, tokens, float(len(path.name))])}
    save_file(weights, path / "model.safetensors")
    frontier = frontier_of(
        point("ar", 1.0, quality, 1.0, 1.0),
        point("threshold", 0.9, quality - 1, tokens, 2.0),
        weights=weights_fingerprint(path),
        seconds=0.01,
        **{"items": "the same", **more},
    )
    write_frontier(path, frontier)
    return path


def test_the_first_one_is_put_in_service(tmp_path: Path) -> None:
    link = tmp_path / "current"
    assert promote(checkpoint(tmp_path / "a"), link, Gate()) == []
    assert link.is_symlink()
    assert link.resolve() == tmp_path / "a"


def test_one_that_is_not_worse_takes_its_place(tmp_path: Path) -> None:
    link = tmp_path / "current"
    promote(checkpoint(tmp_path / "a"), link, Gate())
    compared = promote(checkpoint(tmp_path / "b", 79.2, 1.44), link, Gate())
    assert link.resolve() == tmp_path / "b"
    assert [each.current.threshold for each in compared] == [1.0, 0.9]
    promote(tmp_path / "a", link, Gate())  # and back
    assert link.resolve() == tmp_path / "a"


@pytest.mark.parametrize(
    ("quality", "tokens", "message"),
    [
        (78.5, 1.5, r"mode ar: quality 78.5 is 1.5 points below 80.0; τ 0.9: quality 77.5"),
        (80.0, 1.4, r"τ 0.9: 1.40 tokens a pass are 7% fewer than 1.50; train"),
    ],
)
def test_a_worse_one_is_refused(
    tmp_path: Path, quality: float, tokens: float, message: str
) -> None:
    link = tmp_path / "current"
    promote(checkpoint(tmp_path / "a"), link, Gate())
    worse = checkpoint(tmp_path / "b", quality, tokens)
    with pytest.raises(UserError, match=message):
        promote(worse, link, Gate())
    assert link.resolve() == tmp_path / "a"
    promote(worse, link, Gate(max_loss=2, max_slower=0.1))
    assert link.resolve() == tmp_path / "b"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"items": "others"}, "same conversations"),
        ({"items": None}, "same conversations"),
        ({"measure": "agreement"}, "agreement"),
    ],
)
def test_what_was_not_measured_alike_is_not_compared(
    tmp_path: Path, more: Content, message: str
) -> None:
    link = tmp_path / "current"
    promote(checkpoint(tmp_path / "a"), link, Gate())
    with pytest.raises(UserError, match=message):
        promote(checkpoint(tmp_path / "b", **more), link, Gate())
    assert link.resolve() == tmp_path / "a"


def test_a_frontier_of_other_weights_is_refused(tmp_path: Path) -> None:
    bad = checkpoint(tmp_path / "a")
    save_file({"weight": torch.zeros(3)}, bad / "model.safetensors")
    with pytest.raises(UserError, match="another model"):
        promote(bad, tmp_path / "current", Gate())
    assert not (tmp_path / "current").exists()


def test_a_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    with pytest.raises(UserError, match="no symbolic link"):
        promote(checkpoint(tmp_path / "a"), tmp_path / "current", Gate())


def test_the_command_says_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "current"
    for name in ("a", "b"):
        arguments = ["promote", str(checkpoint(tmp_path / name)), "--service", str(link)]
        assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert f"before, it was {tmp_path / 'a'}" in printed
    worse = checkpoint(tmp_path / "c", 10.0)
    assert run(["promote", str(worse), "--service", str(link)]) == 2
    assert "is not promoted" in capsys.readouterr().err
