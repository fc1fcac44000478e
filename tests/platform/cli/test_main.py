import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml

from mars_platform import __version__
from mars_platform.cli import main as cli
from mars_platform.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ["bench", "data", "demo", "eval", "generate", "serve", "train"]
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
def command(capsys):
    """Runs a command line that must fail; its status and its one line on stderr."""

    def run(*arguments):
        status = cli.run(list(map(str, arguments)))
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.endswith("\n")
        assert len(output.err.splitlines()) == 1, output.err
        return status, output.err

    return run


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


# --- the command itself ---------------------------------------------------------------------------


def test_help_lists_the_commands(capsys):
    assert cli.run(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert set(COMMANDS) <= set(listed)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    assert cli.run([name, "--help"]) == 0
    assert f"marsray {name}" in capsys.readouterr().out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"marsray {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_without_a_command_the_help_is_shown(capsys, arguments):
    status = cli.run(arguments)
    output = capsys.readouterr()
    assert status in (0, 2)
    assert "Commands:" in output.out + output.err
    assert "NoArgsIsHelpError" not in output.err


@pytest.mark.parametrize("arguments", [["nope"], ["data", "nope"]])
def test_unknown_command(command, arguments):
    status, message = command(*arguments)
    assert status == 2
    assert "nope" in message
    assert "traceback" not in message.lower()


def test_unknown_option(command):
    status, message = command("train", "recipe.yaml", "--nope")
    assert status == 2
    assert "--nope" in message


def test_missing_option(command):
    status, message = command("data", "demo")
    assert status == 2
    assert "--out" in message


@pytest.mark.parametrize("examples", ["0", "many"])
def test_unusable_option_value(command, tmp_path, examples):
    status, message = command("data", "demo", "--out", tmp_path / "data", "--examples", examples)
    assert status == 2
    assert "--examples" in message
    assert not (tmp_path / "data").exists()


def test_other_errors_have_status_one(command, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("mars_train.data.demo.write_demo_data", fail)
    status, message = command("data", "demo", "--out", "data")
    assert status == 1
    assert "RuntimeError: first line (--debug shows the traceback)" in message


def test_interrupt(command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mars_train.data.demo.write_demo_data", interrupt)
    assert command("data", "demo", "--out", "data") == (130, "error: interrupted\n")


# --- marsray data ---------------------------------------------------------------------------------


def demo_data(out):
    return ["data", "demo", "--out", str(out), "--examples", "20", "--eval-examples", "5"]


def test_demo_data(tmp_path, capsys):
    assert cli.run(demo_data(tmp_path / "data")) == 0
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 20
    assert len((tmp_path / "data" / "eval.jsonl").read_text().splitlines()) == 5
    output = capsys.readouterr()
    assert "20 training and 5 held-out" in " ".join(output.out.split())
    assert output.err == ""


def test_demo_data_overwrites_nothing(tmp_path, command, capsys):
    arguments = demo_data(tmp_path / "data")
    assert cli.run(arguments) == 0
    capsys.readouterr()
    before = (tmp_path / "data" / "train.jsonl").read_bytes()
    status, message = command(*arguments, "--seed", "1")
    assert status == 2
    assert message.startswith("error: --out: ")
    assert (tmp_path / "data" / "train.jsonl").read_bytes() == before


def test_debug_shows_the_traceback(tmp_path):
    assert cli.run(demo_data(tmp_path)) == 0
    with pytest.raises(UserError, match="--out"):
        cli.run(["--debug", *demo_data(tmp_path)])


# --- marsray train --------------------------------------------------------------------------------


def test_missing_recipe(command):
    status, message = command("train", "nothing.yaml")
    assert status == 2
    assert message.startswith("error: nothing.yaml: cannot be read")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("learning_rte=1", "learning_rte: unknown key; known keys: model, data"),
        ("data.max_len=9", "data.max_len: unknown key; known keys: train, loss_on"),
        ("model.scratch.config={model_type: qwen2}", "give either base"),
        ("model={}", "give either base"),
        ("stages.1.block_size=0", "block_size: Input should be greater than or equal to 1"),
        ("stages.0.block_size=4", "block_size: unknown key"),
        ("scaling.num_workers=500", "batch_size: 384 conversations cannot be shared"),
        ("stages.5.epochs=1", "--set stages.5.epochs: there is no such place"),
        ("stages=[]", "stages: "),
        ("data.train=[]", "data.train: "),
        ("stages.1.name=ar", "names must differ"),
        ("epochs", "--set 'epochs': write it as key.sub=value"),
    ],
)
def test_recipe_mistakes(command, recipe, override, named):
    status, message = command("train", recipe, "--set", override)
    assert status == 2
    assert named in message


def test_unknown_key_in_the_recipe_file(command, recipe):
    recipe.write_text(yaml.safe_dump({**RECIPE, "epochs": 3}))
    status, message = command("train", recipe)
    assert status == 2
    assert f"{recipe}: epochs: unknown key" in message


def test_output_that_is_not_empty(command, recipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    status, message = command("train", recipe)
    assert status == 2
    assert message.startswith("error: output: ")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_missing_base_model(command, recipe, tmp_path):
    status, message = command("train", recipe)
    assert status == 2
    assert "there is no directory ./no-such-model" in message
    assert not (tmp_path / "out").exists()


# --- marsray generate -----------------------------------------------------------------------------


def test_missing_model(command):
    status, message = command("generate", "./nothing", "--prompt", "Hello")
    assert status == 2
    assert "there is no directory ./nothing" in message


def test_model_directory_without_a_model(command, tmp_path):
    status, message = command("generate", tmp_path, "--prompt", "Hello")
    assert status == 2
    assert "holds no config.json" in message


@pytest.mark.parametrize("threshold", ["0", "-1", "1.01", "nan"])
def test_threshold_out_of_range(command, threshold):
    arguments = ["generate", "./nothing", "--prompt", "Hello", "--threshold", threshold]
    status, message = command(*arguments)
    assert status == 2
    assert "--threshold" in message


# --- as processes ---------------------------------------------------------------------------------


def process(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_help_as_a_process_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; from mars_platform.cli import main as cli; assert cli.run(['--help']) == 0; "
        "print('loaded:', sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    result = process("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("loaded: []\n")


def test_mistake_as_a_process(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    result = process("-m", "mars_platform", *demo_data(tmp_path), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --out: ")
    assert len(result.stderr.splitlines()) == 1


def test_directory_platform_is_no_package():
    assert (ROOT / "platform" / "mars_platform").is_dir()
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_standard_library_platform_is_found_in_the_repository():
    code = "import platform; print(platform.python_version())"
    result = process("-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ".".join(map(str, sys.version_info[:3]))
