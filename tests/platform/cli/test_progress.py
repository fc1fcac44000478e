"""Progress off a terminal, its rate and time left, and the completion of words in the shell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mars_platform.cli import main as cli
from mars_platform.cli.progress import ProgressRate, duration, progress_display, rate_words, working


def test_a_pace_tells_rate_and_time_left() -> None:
    now_s = 100.0
    pace = ProgressRate(lambda: now_s)
    assert pace.words(10, 100) == ""
    now_s = 110.0
    assert pace.words(30, 100) == "2/s, 0:35 left"
    assert pace.words(30, 100, to_come=50) == "2/s, 0:35 left, 1:00 in all"
    now_s = 180.0  # a pace of before counts no more
    assert pace.words(65, 100) == "0.5/s, 1:10 left"
    now_s = 190.0
    assert pace.words(100, 100) == "3.5/s"
    assert pace.words(100, 100, to_come=35) == "3.5/s, 0:10 in all"


def test_a_pace_that_stands_still_is_not_told() -> None:
    pace = ProgressRate(lambda: 5.0)
    assert (pace.words(1, 2), pace.words(1, 2)) == ("", "")


@pytest.mark.parametrize(
    ("rate", "words"), [(12345.6, "12,346/s"), (12.34, "12.3/s"), (0.1, "6/min")]
)
def test_rates_are_rounded(rate: float, words: str) -> None:
    assert rate_words(rate) == words


def test_times_are_short() -> None:
    assert [duration(each) for each in (4.6, 759, 12_000)] == ["0:05", "12:39", "3 h 20"]


def test_short_work_prints_one_line_for_each_task_off_a_terminal() -> None:
    console = Console(file=StringIO())
    with progress_display(console) as display, working("loading", console):
        display.update("eval", 1, 2)
        display.update("eval", 2, 2, "50.0% right")
    assert console.file.getvalue().startswith("eval: 2/2 50.0% right")  # type: ignore[attr-defined]


def test_longer_work_prints_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_platform.cli.progress._PATIENCE_S", 0.2)
    console = Console(file=StringIO())
    with progress_display(console) as display, working("loading [x]", console):
        display.update("eval", 0, 4)
        time.sleep(0.7)
        display.update("eval", 2, 4, "50.0% right")
        display.update("eval", 3, 4, "not due yet")
        display.update("eval", 4, 4, "75.0% right")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "loading [x] ..."
    assert lines[1].startswith("eval: 2/4 50.0% right, ")
    assert lines[1].endswith(" left")
    assert lines[2].startswith("eval: 4/4 75.0% right, ")
    assert len(lines) == 3


@pytest.fixture
def broken_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command of a package that cannot be imported."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[marsray.commands]\nfail = broken_module:run\n")
    (tmp_path / "broken_module.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "fail"


def test_a_command_that_cannot_be_imported_leaves_the_others_usable(
    broken_command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert cli.run([broken_command, "file", "--option", "1"]) == 2
    error = capsys.readouterr().err
    assert "a_package_that_is_not_there" in error
    assert "marsray doctor" in error


def completed(*words: str) -> list[str]:
    """Return what bash offers for the last word."""
    variables = {
        "_MARSRAY_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["marsray", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from mars_platform.cli.main import main; main()"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_shell_completes_commands_choices_and_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert completed("do") == ["doctor"]
    assert set(completed("generate", "x", "--mode", "")) == {"ar", "threshold", "exact"}
    assert completed("eval", f"{tmp_path}/mo") == [f"{tmp_path}/model"]
