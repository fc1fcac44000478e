import struct
import threading
from io import StringIO

import pytest
from accelerate.tracking import TensorBoardTracker
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from mars_platform.errors import UserError
from mars_train.recipe import Recipe
from mars_train.run import tracking
from mars_train.run.run_directory import RunDirectory
from mars_train.run.tracking import _flat, tracked
from mars_train.stage.progress import Figures

ROWS = [
    Figures(0, {"ar/eval/loss": 3.0}),
    Figures(1, {"ar/loss": 2.0}),
    Figures(2, {"ar/loss": 1.5}),
]


def directory_of(path, to):
    content = {
        "model": {"base": "somewhere"},
        "data": {"train": ["rows.jsonl"]},
        "stages": [{"objective": "ar"}],
        "output": str(path),
        "tracking": {"to": to},
    }
    path.mkdir(exist_ok=True)
    return RunDirectory(Recipe.model_validate(content), path)


def scalars(path):
    """Tag, step and value of everything in TensorBoard's files."""
    found = []
    for file in sorted(path.rglob("events.*")):
        content = file.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            content = content[16 + size :]
    return found


def track(directory, figures):
    console = Console(file=StringIO(), width=1000)
    with tracked(directory, console) as send:
        for each in figures:
            send([each])
    return console.file.getvalue()


def test_figures_are_sent_once_however_often_a_run_is_resumed(tmp_path):
    directory = directory_of(tmp_path / "run", ["tensorboard"])
    assert track(directory, ROWS[:2]) == ""
    track(directory, [*ROWS, Figures(2, {"ar/eval/loss": 2.5}), *ROWS])
    path = directory.path / "tracking" / "run"
    assert sorted(scalars(path), key=lambda scalar: scalar[1]) == [
        ("ar/eval/loss", 0, 3.0),
        ("ar/loss", 1, 2.0),
        ("ar/loss", 2, 1.5),
        ("ar/eval/loss", 2, 2.5),
    ]


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path):
    directory = directory_of(tmp_path / "run", ["tensorboard"])
    too_large = Figures(2, {"ar/loss": 10**400})
    printed = track(directory, [ROWS[1], too_large, Figures(3, {"ar/loss": 1.0})])
    assert printed.startswith("warning: tensorboard gets no more figures: ")
    assert printed.count("warning") == 1
    assert scalars(directory.path) == [("ar/loss", 1, 2.0)]


def test_figures_whose_sending_cannot_be_noted_are_the_last(tmp_path):
    directory = directory_of(tmp_path / "run", ["tensorboard"])
    console = Console(file=StringIO(), width=1000)
    with tracked(directory, console) as send:
        (directory.path / "tracking.json").unlink()
        (directory.path / "tracking.json").mkdir()
        for each in ROWS:
            send([each])
    assert console.file.getvalue().count("warning: tensorboard gets no more figures: ") == 1
    assert scalars(directory.path) == [("ar/eval/loss", 0, 3.0)]


def test_a_tracker_that_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_END_S", 0.05)
    goes_on = threading.Event()
    monkeypatch.setattr(TensorBoardTracker, "finish", lambda _: goes_on.wait(5))
    printed = track(directory_of(tmp_path / "run", ["tensorboard"]), ROWS[:1])
    goes_on.set()
    assert "warning: trackers did not end within 0.05 s" in printed


def test_a_tracker_that_does_not_start_is_refused(tmp_path):
    directory = directory_of(tmp_path / "run", ["tensorboard"])
    (directory.path / "tracking").write_text("a file")
    with pytest.raises(UserError, match=r"^tracking.to: tensorboard cannot be started "):
        track(directory, [])


def test_trackers_are_told_no_passwords(tmp_path):
    recipe = directory_of(tmp_path / "run", ["tensorboard"]).recipe
    data = recipe.data.model_copy(update={"train": ["s3://me:word@host/rows.jsonl"]})
    told = _flat(recipe.model_copy(update={"data": data}))
    assert told["data.train"] == '["s3://me:***@host/rows.jsonl"]'
