"""The options that a command gets from a settings model."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from mars_platform.cli.options import with_options
from mars_platform.config import Settings
from mars_platform.errors import UserError


class Sizes(Settings):
    model: Annotated[str, typer.Argument()]
    """Directory to measure."""
    thresholds: Annotated[tuple[float, ...], typer.Option("--threshold")] = ()
    """Threshold. May be repeated."""
    rounds: int = Field(default=5, ge=1, le=9)
    """Number of times."""
    speed: float = Field(default=1.0, gt=0)
    """Factor of speed."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run on."""
    plot: Path | None = None
    """Picture
    to draw."""
    quick: Annotated[bool, typer.Option("--quick")] = False
    """Measure ``less``."""


@pytest.fixture
def called():
    """Runs a command line; returns its result and what the command's function was given."""
    taken = []

    @with_options
    def measure(sizes: Sizes, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        """Measure sizes."""
        taken.append((sizes, as_json))

    cli = typer.Typer(rich_markup_mode=None)
    cli.command()(measure)

    def run(*arguments):
        return CliRunner().invoke(cli, arguments), taken

    return run


def test_options_that_are_not_given_leave_the_defaults_of_the_model(called):
    result, taken = called("m")
    assert result.exit_code == 0, result.output
    assert taken == [(Sizes(model="m"), False)]


def test_given_options_reach_the_model_and_the_function(called):
    result, taken = called(
        *("m", "--threshold", ".5", "--threshold", ".9", "--rounds", "9", "--speed", "2"),
        *("--device", "cuda", "--plot", "a.png", "--quick", "--json"),
    )
    assert result.exit_code == 0, result.output
    given = Sizes(
        model="m",
        thresholds=(0.5, 0.9),
        rounds=9,
        speed=2.0,
        device="cuda",
        plot=Path("a.png"),
        quick=True,
    )
    assert taken == [(given, True)]


def test_help_tells_docstrings_bounds_choices_and_defaults(called):
    words = " ".join(called("--help")[0].output.split())
    for told in (
        "Measure sizes.",
        "Directory to measure. [required]",
        "Threshold. May be repeated. --rounds",  # an empty list is no default to tell
        "Number of times. [default: 5; 1<=x<=9]",
        "--device <cpu|cuda>",
        "--plot <path> Picture to draw.",
        "--quick Measure less.",
    ):
        assert told in words


@pytest.mark.parametrize(
    "wrong", [["--rounds", "0"], ["--rounds", "10"], ["--device", "tpu"], ["--speed", "fast"], []]
)
def test_wrong_options_are_typers_errors(called, wrong):
    result, taken = called(*(["m", *wrong] if wrong else []))
    assert (result.exit_code, taken) == (2, [])


def test_what_typer_cannot_check_is_the_users_error(called):
    error = called("m", "--speed", "0")[0].exception
    assert isinstance(error, UserError)
    assert str(error).startswith("options: speed: Input should be greater than 0")
