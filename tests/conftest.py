"""Shared by all tests: one trained tiny model, the option ``--full``, and the order of a run.

Two processes run the suite (``pytest -n 2``): the first takes the modules that start Ray, which are
the longer half, and the second takes the other modules. A third one, which gives them out, waits
for no import of torch or Ray: what needs one imports it when it runs.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

RECIPE = Path(__file__).parent / "recipe.yaml"
_WITH_RAY = (
    "tests/end_to_end/training/test_training.py",  # trains the model that others wait for
    "tests/end_to_end/training/",
    "tests/end_to_end/serving/",
)
"""Tests that start Ray, in the order in which they run."""
_WITH_RAY_IN_FULL = (
    "tests/end_to_end/test_demo.py",
    "tests/packaging/test_wheel.py",
    "tests/docs/test_user_path.py",
    "tests/end_to_end/cluster/",
)
"""Tests that start Ray for long only if they are marked ``full``."""
_ORDER = (*_WITH_RAY, "tests/train/", "tests/serve/", *_WITH_RAY_IN_FULL)
"""Order of a run; all other tests follow. They are the short ones: two processes end together."""
collect_ignore = ["clients", "kubernetes"]  # `make test-clients`, and `make test-kubernetes`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked full, too")


def pytest_configure(config: pytest.Config) -> None:
    usual = 100 if config.getoption("--full") else 25
    settings.register_profile(
        "marsray",
        deadline=None,  # no test depends on how busy the machine is
        # cases drawn, anew in each run, for each property that sets no number of its own
        max_examples=int(os.environ.get("MARSRAY_EXAMPLES", usual)),
    )
    settings.load_profile("marsray")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_turn)  # the longest part of a run begins first
    if config.getoption("--full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in full]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported: it is a sixth of the time, and finds none."""
    gc.disable()
    result = yield
    gc.freeze()  # all modules and tests, which each collection of garbage would look through again
    gc.set_threshold(20_000)  # 700 by default, for programs that hold little
    gc.enable()
    return result


def _turn(item: pytest.Item) -> int:
    turns = [turn for turn, start in enumerate(_ORDER) if item.nodeid.startswith(start)]
    return turns[0] if turns else len(_ORDER)


class _OneRayAtATime(LoadFileScheduling):
    """Gives the tests that start Ray to one process.

    Two clusters at once would be slower than one after the other, since each starts many processes.
    """

    def _split_scope(self, nodeid: str) -> str:
        with_ray = _WITH_RAY
        if self.config.getoption("--full"):
            with_ray += _WITH_RAY_IN_FULL
        return "Ray" if nodeid.startswith(with_ray) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return _OneRayAtATime(config, log)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # several threads are far slower on a busy machine


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Let SIGINT end this process and its children, which ignore it if a shell runs them behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer of a few sentences."""
    from mars_train.run.scratch import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    texts = ["Count a box of 12 apples", "There are 12 apples in the box."] * 10
    train_tokenizer(texts, 300).save_pretrained(path)
    return path


@dataclass(frozen=True)
class Trained:
    """A MARS model that was trained with Ray Train, and its data."""

    output: Path
    """The run's output directory."""
    data: Path
    """Directory of ``train.jsonl`` and ``eval.jsonl``."""
    printed: str
    """Text that the run printed."""

    @property
    def model(self) -> Path:
        return self.output / "model"

    @property
    def ar_model(self) -> Path:
        return self.output / "stages" / "ar"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train both stages of a short recipe on two gloo workers, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    work = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    with FileLock(f"{work}.lock"):
        if not work.exists():
            _train(work)
    return Trained(work / "out", work / "data", (work / "printed.txt").read_text())


def _train(work: Path) -> None:
    from rich.console import Console

    from mars_platform.config import load_settings
    from mars_train.data.demo import write_demo_data
    from mars_train.data.demo_tasks import draw_short
    from mars_train.recipe import Recipe
    from mars_train.run.recipe_run import run_recipe

    write_demo_data(work / "data", draw_short, num_train=4000, num_eval=100, seed=1)
    recipe = load_settings(
        RECIPE,
        Recipe,
        [
            f"data.train=[{work / 'data' / 'train.jsonl'}]",
            f"evaluation.data=[{work / 'data' / 'eval.jsonl'}]",
            f"output={work / 'out'}",
            "tracking.to=[tensorboard]",
        ],
    )
    with (work / "printed.txt").open("w") as handle, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # not two seconds
        run_recipe(recipe, Console(file=handle, width=200))
