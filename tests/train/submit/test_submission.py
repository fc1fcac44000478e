import shlex
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from mars_platform import __version__
from mars_platform.cli import main as cli
from mars_platform.cluster.jobs import ADDRESS_VARIABLES
from mars_platform.errors import UserError
from mars_train.submit import check as submit_check
from mars_train.submit.submission import MAX_UPLOAD_MIB, plan, shipped_packages


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Enter a user's directory, without a cluster address in the environment."""
    for name in ADDRESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    (tmp_path / "data" / "notes.txt").write_text("no data")
    (tmp_path / ".gitignore").write_text("data/\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def planned(directory):
    """Plan the submission of a valid recipe with changes."""

    def write_and_plan(*overrides, working_dir=".", name=None, **changes):
        recipe = {
            "model": {"base": "some/model"},
            "data": {"train": ["data/train.jsonl"]},
            "stages": [{"objective": "ar"}],
            "output": "/shared/mine",
            **changes,
        }
        config = directory / "recipe.yaml"
        config.write_text(yaml.safe_dump(recipe))
        return plan(config, overrides, name=name, working_dir=Path(working_dir))

    return write_and_plan


@pytest.fixture
def refusal(planned):
    def refused(*overrides, **changes):
        with pytest.raises(UserError) as caught:
            planned(*overrides, **changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused


# --- uploads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["data/train.jsonl", "data", "data/", "data/*.jsonl"])
def test_files_of_the_recipe_are_uploaded_even_if_git_ignores_them(planned, tmp_path, source):
    submission = planned(data={"train": [source]})
    submission.write_archive(tmp_path / "packed.zip")
    with zipfile.ZipFile(tmp_path / "packed.zip") as archive:
        assert archive.namelist() == ["check_marsray.py", "data/train.jsonl", "recipe.yaml"]
        assert archive.read("data/train.jsonl") == b"{}\n"
    assert submission.num_bytes == 3 + Path("recipe.yaml").stat().st_size


def test_a_directory_of_a_model_is_uploaded_whole(planned, directory):
    (directory / "model" / "deep").mkdir(parents=True)
    (directory / "model" / "config.json").write_text("{}")
    (directory / "model" / "deep" / "weights").write_text("0")
    uploads = planned(model={"base": "model"}).uploads
    assert {"model/config.json", "model/deep/weights"} < set(uploads)


def test_held_out_data_is_uploaded_too(planned, directory):
    (directory / "held-out.jsonl").write_text("{}\n")
    assert "held-out.jsonl" in planned(evaluation={"data": ["held-out.jsonl"]}).uploads


def test_overrides_change_the_uploads(planned, directory):
    (directory / "other.jsonl").write_text("{}\n")
    assert set(planned("data.train=[other.jsonl]").uploads) == {"other.jsonl", "recipe.yaml"}


def test_relative_paths_start_from_the_working_directory(planned, directory, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert set(planned(working_dir="..").uploads) == {"data/train.jsonl", "recipe.yaml"}


def test_absolute_paths_and_urls_are_the_clusters(planned):
    submission = planned(
        model={"base": "/models/base"},
        data={"train": ["s3://bucket/chats/*.parquet", "/data/chats"]},
        checkpoints={"storage": "s3://bucket/checkpoints"},
    )
    assert set(submission.uploads) == {"recipe.yaml"}
    assert submission.on_cluster == (
        "output: /shared/mine",
        "checkpoints.storage: s3://bucket/checkpoints",
        "model.base: /models/base",
        "data.train: s3://bucket/chats/*.parquet",
        "data.train: /data/chats",
    )


def test_a_hub_id_is_expected_from_the_hub(planned):
    assert "model.base: some/model, from the Hugging Face hub" in planned().on_cluster


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("output", {"output": "mine"}),
        ("checkpoints.storage", {"checkpoints": {"storage": "here/mine"}}),
    ],
)
def test_a_relative_output_or_storage_is_refused(refusal, setting, changes):
    message = refusal(**changes)
    assert message.startswith(f"{setting}: {changes.get('output', 'here/mine')} is relative to")
    assert f"--set {setting}=/shared/mine" in message


def test_a_missing_file_is_named(refusal):
    message = refusal(data={"train": ["data/none.jsonl"]})
    assert message == "data.train: there is no file or directory data/none.jsonl"


@pytest.mark.parametrize("base", ["./model", "model", "a/b/c"])
def test_a_missing_model_directory_is_named(refusal, base):
    message = refusal(model={"base": base})
    assert message.startswith(f"model.base: there is no directory {Path(base)}; give an existing")


def test_a_path_outside_of_the_working_directory_is_refused(refusal, directory, monkeypatch):
    monkeypatch.chdir(directory / "data")
    message = refusal(data={"train": ["../data/../other.jsonl", "../data/train.jsonl"]})
    assert message.startswith("data.train: there is no file")
    (directory / "other.jsonl").write_text("{}\n")
    message = refusal(data={"train": ["../other.jsonl"]})
    assert message.startswith("data.train: ../other.jsonl is outside of the directory")
    assert "--working-dir" in message


def test_too_large_a_file_is_refused_with_its_size(refusal, directory):
    with (directory / "data" / "large.jsonl").open("wb") as file:
        file.truncate((MAX_UPLOAD_MIB + 1) * 2**20)
    message = refusal(data={"train": ["data/train.jsonl", "data/large.jsonl"]})
    assert message.startswith(f"data.train: data/large.jsonl has {MAX_UPLOAD_MIB + 1} MiB, and")
    assert "(s3://...)" in message


def test_files_that_are_too_large_together_are_refused(planned, refusal, directory):
    for name in ("a", "b"):
        with (directory / f"{name}.jsonl").open("wb") as file:
            file.truncate((MAX_UPLOAD_MIB // 2 + 1) * 2**20)
    assert planned(data={"train": ["a.jsonl"]}).num_bytes > MAX_UPLOAD_MIB * 2**19
    assert f"{MAX_UPLOAD_MIB} MiB in all" in refusal(data={"train": ["a.jsonl", "b.jsonl"]})


@pytest.mark.parametrize("name", ["", "a/b", "/a", ".."])
def test_a_name_must_be_one_of_a_directory(refusal, name):
    assert refusal(name=name).startswith(f"--name: {name!r} cannot be")


# --- the job --------------------------------------------------------------------------------------


def test_the_run_is_named_after_its_directory(planned):
    submission = planned()
    assert (submission.run, submission.output) == ("mine", "/shared/mine")


def test_a_given_name_replaces_that_of_the_directory(planned):
    submission = planned(name="other one")
    assert (submission.run, submission.output) == ("other one", "/shared/other one")
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    assert submission.job_id(noon) == "other-one-20260102-120000"


def test_the_jobs_command_is_train_with_the_same_settings(planned):
    submission = planned("data.train=[data/*.jsonl]", "seed=1", name="it's")
    check = shlex.join(["python", "check_marsray.py", __version__]) + " && exec "
    command = submission.entrypoint(ship_code=False)
    assert command.startswith(check)
    words = shlex.split(command.removeprefix(check))
    assert words[:3] == ["marsray", "train", "recipe.yaml"]
    assert words[3::2] == ["--set"] * 4
    *given, output, cluster = words[4::2]
    assert given == ["data.train=[data/*.jsonl]", "seed=1"]
    assert yaml.safe_load(output.removeprefix("output=")) == "/shared/it's"
    assert cluster == "cluster.address=auto"


def test_shipped_code_has_its_commands(planned, tmp_path):
    *packages, metadata = shipped_packages(tmp_path)
    assert [path.name for path in packages] == [
        "mars_platform",
        "mars_train",
        "mars_serve",
        "mars_autoscale",
    ]
    assert all((path / "__init__.py").is_file() for path in packages)
    [found] = distributions(path=[str(metadata.parent)])
    assert (found.name, found.version) == ("marsray", __version__)
    assert "train" in found.entry_points.select(group="marsray.commands").names
    assert "exec python -m mars_platform train " in planned().entrypoint(ship_code=True)


@pytest.mark.parametrize(
    ("version", "options", "error"),
    [
        (__version__, [], ""),
        (
            "99.0",
            [],
            f"error: the cluster has marsray {__version__}, but the job was submitted with 99.0; "
            "install the same on both, or submit with --ship-code\n",
        ),
        (
            __version__,
            ["-I", "-S"],  # without installed packages
            "error: marsray is not installed on the cluster; use an image that has it, or submit "
            "with --ship-code\n",
        ),
    ],
    ids=["same version", "another version", "without marsray"],
)
def test_only_a_cluster_with_the_same_version_passes_the_check(version, options, error):
    command = [sys.executable, *options, submit_check.__file__, version]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (bool(error), error)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["submit"], ["submit", "--help"]])
def test_help_shows_the_options_and_the_other_commands(capsys, arguments):
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    for word in ("CONFIG | COMMAND", "--follow", "--name", "status", "logs", "stop", "list"):
        assert word in shown


@pytest.mark.parametrize("name", ["x.yaml", "status", "logs", "stop", "list"])
def test_every_command_has_help(capsys, name):
    assert cli.run(["submit", name, "--help"]) == 0
    path = "marsray submit" if name == "x.yaml" else f"marsray submit {name}"
    assert capsys.readouterr().out.startswith(f"Usage: {path} [OPTIONS]")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.yaml"], "none.yaml: cannot be read"),
        (["--name", "x", "CONFIG"], "CONFIG: cannot be read"),
        (["status"], "Missing argument"),
        (["--nope"], "No such option: --nope"),
        (["list"], "--address: give the URL of the head's dashboard"),
    ],
)
def test_usage_errors_are_one_line(capsys, arguments, error):
    assert cli.run(["submit", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert error in output.err
    assert len(output.err.splitlines()) == 1
