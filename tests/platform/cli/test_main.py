import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import ray
import yaml

from mars_platform.cli import main as cli
from mars_platform.errors import Interrupted, UserError

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = sorted(entry.name for entry in entry_points(group="marsray.commands"))
RECIPE = {
    "model": {"base": "./no-such-model"},
    "data": {"train": ["no-such-data.jsonl"]},
    "stages": [{"objective": "ar"}, {"objective": "mars"}],
    "output": "out",
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    """Every mistake here is found before a cluster starts."""
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("a cluster was started"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refusal(capsys):
    """Runs a command line that must fail with status 2; returns its one line on stderr."""

    def run(*arguments, status=2):
        assert cli.run(list(map(str, arguments))) == status
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.endswith("\n")
        assert len(output.err.splitlines()) == 1, output.err
        return output.err

    return run


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


# --- the command itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    assert cli.run([name, "--help"]) == 0
    assert f"marsray {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_help_is_shown_without_a_command(capsys, arguments):
    status = cli.run(arguments)
    output = capsys.readouterr()
    assert status in (0, 2)
    assert "Commands:" in output.out + output.err
    assert "NoArgsIsHelpError" not in output.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nope"], "nope"),
        (["data", "nope"], "nope"),
        (["train", "recipe.yaml", "--nope"], "--nope"),
        (["data", "demo"], "--out"),
        (["data", "demo", "--out", "data", "--examples", "0"], "--examples"),
        (["data", "demo", "--out", "data", "--examples", "many"], "--examples"),
        (["data", "demo", "--out", "data", "--task", "long"], "--task"),
        (["data", "demo", "--out", "data", "--difficulty", "5"], "--difficulty"),
        (["data", "demo", "--out", "data", "--task", "short", "--difficulty", "2"], "--difficulty"),
        (["train", "nothing.yaml"], "error: nothing.yaml: cannot be read"),
        (["generate", "./nothing", "--prompt", "x"], "there is no directory ./nothing"),
        (["generate", ".", "--prompt", "x"], "holds no config.json"),
        *(
            (["generate", "./nothing", "--prompt", "x", "--threshold", value], "threshold")
            for value in ("0", "-1", "1.01", "nan")
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_named_in_one_line(refusal, tmp_path, arguments, named):
    assert named in refusal(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            RuntimeError("first line\nsecond line"),
            1,
            "RuntimeError: first line (--debug shows the traceback)",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (Interrupted("stopped after step 3"), 130, "error: stopped after step 3\n"),
        (UserError("a\x1b[31m\udc80: no"), 2, "error: a\\x1b[31m\\udc80: no\n"),
    ],
)
def test_other_errors_and_interrupts_have_a_status_of_their_own(
    refusal, monkeypatch, error, status, message
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("mars_train.data.demo.write_demo_data", fail)
    assert message in refusal("data", "demo", "--out", "data", status=status)


# --- marsray data ---------------------------------------------------------------------------------


def demo_data(out):
    return ["data", "demo", "--out", str(out), "--examples", "20", "--eval-examples", "5"]


def test_existing_data_are_not_overwritten(tmp_path, refusal, capsys):
    assert cli.run(demo_data(tmp_path)) == 0
    capsys.readouterr()
    before = (tmp_path / "train.jsonl").read_bytes()
    assert refusal(*demo_data(tmp_path), "--seed", "1").startswith("error: --out: ")
    assert (tmp_path / "train.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="--out"):  # the traceback that --debug shows
        cli.run(["--debug", *demo_data(tmp_path)])


# --- marsray train --------------------------------------------------------------------------------


def test_a_mistake_in_an_override_of_the_recipe_is_named(refusal, recipe):
    message = refusal("train", recipe, "--set", "data.max_len=9")
    assert "data.max_len: unknown key; known keys: train, columns" in message


def test_a_missing_base_model_leaves_no_output_directory(refusal, recipe, tmp_path):
    assert "there is no directory ./no-such-model" in refusal("train", recipe)
    assert not (tmp_path / "out").exists()


# --- as processes ---------------------------------------------------------------------------------


def process(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; from mars_platform.cli import main as cli; assert cli.run(['--help']) == 0; "
        "print('loaded:', sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    result = process("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("loaded: []\n")


def test_a_mistake_ends_the_process_with_status_2_and_one_line(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    result = process("-m", "mars_platform", *demo_data(tmp_path), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --out: ")
    assert len(result.stderr.splitlines()) == 1


def test_the_folder_platform_does_not_shadow_the_standard_librarys_module():
    assert (ROOT / "platform" / "mars_platform").is_dir()
    assert not (ROOT / "platform" / "__init__.py").exists()
    result = process("-c", "import platform; print(platform.python_version())", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ".".join(map(str, sys.version_info[:3]))
