"""The files and the command that a submitted job gets; end_to_end tests submit to a cluster."""

import os
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from mars_platform import __version__
from mars_platform.cli import main as cli
from mars_platform.cluster.processes import free_port
from mars_platform.config import load_settings
from mars_platform.errors import UserError
from mars_train.cli.submit import MAX_UPLOAD_MIB, entrypoint, files_of, pack
from mars_train.recipe import Recipe


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Enter a user's directory, without a cluster address in the environment."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # the command sets one, which is undone afterwards
        monkeypatch.delenv(name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    (tmp_path / "data" / "notes.txt").write_text("no data")
    (tmp_path / ".gitignore").write_text("data/\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(directory):
    """Write a valid recipe with changes; returns its path."""

    def write(**changes):
        content = {
            "model": {"base": "some/model"},
            "data": {"train": ["data/train.jsonl"]},
            "stages": [{"objective": "ar"}],
            "output": "/shared/mine",
            **changes,
        }
        path = directory / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def files(recipe):
    """The files that are uploaded with a changed recipe, by name."""

    def found(working_dir=".", **changes):
        return files_of(load_settings(recipe(**changes), Recipe), Path(working_dir))

    return found


@pytest.fixture
def refusal(files):
    def refused(**changes):
        with pytest.raises(UserError) as caught:
            files(**changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused


# --- uploads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["data/train.jsonl", "data", "data/", "data/*.jsonl"])
def test_files_of_the_recipe_are_uploaded_even_if_git_ignores_them(files, tmp_path, source):
    pack(files(data={"train": [source]}), tmp_path / "packed.zip")
    with zipfile.ZipFile(tmp_path / "packed.zip") as archive:
        assert archive.namelist() == ["data/train.jsonl"]
        assert archive.read("data/train.jsonl") == b"{}\n"


def test_a_directory_of_a_model_is_uploaded_whole(files, directory):
    (directory / "model" / "deep").mkdir(parents=True)
    (directory / "model" / "config.json").write_text("{}")
    (directory / "model" / "deep" / "weights").write_text("0")
    found = files(model={"base": "model"})
    assert set(found) == {"model/config.json", "model/deep/weights", "data/train.jsonl"}


@pytest.mark.parametrize("name", ["README.md", "deep/weights", "more"])
def test_a_model_with_a_link_to_files_elsewhere_is_not_uploaded(refusal, directory, name):
    (directory / "model" / "deep").mkdir(parents=True)
    (directory / "model" / name).symlink_to("/etc" if name == "more" else "/proc/self/environ")
    message = refusal(model={"base": "model"})
    assert message.startswith(f"model.base: model: {name} is a link that leads out of the")


def test_held_out_data_is_uploaded_too(files, directory):
    (directory / "held-out.jsonl").write_text("{}\n")
    assert "held-out.jsonl" in files(evaluation={"data": ["held-out.jsonl"]})


def test_relative_paths_start_from_the_working_directory(files, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert set(files(working_dir="..")) == {"data/train.jsonl"}


def test_absolute_paths_urls_and_hub_ids_are_the_clusters(files):
    found = files(
        model={"base": "some/model"},
        data={"train": ["s3://bucket/chats/*.parquet", "/data/chats", "hub:a/b:test"]},
        checkpoints={"storage": "s3://bucket/checkpoints"},
    )
    assert found == {}


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


def test_files_that_are_too_large_together_are_refused(files, refusal, directory):
    for name, more in (("small", 1), ("large", 2)):
        with (directory / f"{name}.jsonl").open("wb") as file:
            file.truncate((MAX_UPLOAD_MIB // 2 + more) * 2**20)
    assert files(data={"train": ["large.jsonl"]})
    message = refusal(data={"train": ["small.jsonl", "large.jsonl"]})
    assert message.startswith(
        f"large.jsonl and the recipe's other files have {MAX_UPLOAD_MIB + 3} MiB"
    )
    assert "(s3://...)" in message


# --- the job --------------------------------------------------------------------------------------


@pytest.fixture
def installed(directory, monkeypatch):
    """Install a program marsray of a version, which prints its arguments; None installs none."""

    def install(version):
        place = directory / "bin"
        place.mkdir()
        if version is not None:
            text = f'#!/bin/sh\n[ "$1" = --version ] && echo marsray {version} || echo "$@"\n'
            (place / "marsray").write_text(text)
            (place / "marsray").chmod(0o755)
        return {"PATH": f"{place}{os.pathsep}/usr/bin{os.pathsep}/bin"}

    return install


def in_shell(command, environment):
    words = ["/bin/sh", "-c", command]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def test_the_jobs_command_is_train_with_the_same_settings(installed):
    command = entrypoint("recipe.yaml", ["data.train=[data/*.jsonl]", "output=it's here"])
    words = shlex.split(command.rpartition("; exec ")[2])
    settings = ["data.train=[data/*.jsonl]", "output=it's here", "cluster.address=auto"]
    assert words == [
        *("marsray", "train", "recipe.yaml"),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    environment = installed(__version__)
    ended = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, ended.stdout) == (0, " ".join(words[1:]) + "\n")


@pytest.mark.parametrize("version", ["99.0", None])
def test_a_cluster_without_the_same_version_is_refused(installed, version):
    ended = in_shell(entrypoint("recipe.yaml", []), installed(version))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.endswith(
        f"error: the cluster needs marsray {__version__}, as here; install it there\n"
    )


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.yaml"], "none.yaml: cannot be read"),
        ([], "Missing argument"),
        (["--nope"], "No such option: --nope"),
    ],
)
def test_usage_errors_are_one_line(capsys, arguments, error):
    assert cli.run(["submit", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert error in output.err
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize("given", ["option", "variable"])
def test_a_cluster_that_does_not_answer_is_named(recipe, capsys, monkeypatch, given):
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", url if given == "variable" else "http://127.0.0.1:1")
    arguments = ["--address", url] if given == "option" else []
    assert cli.run(["submit", str(recipe()), *arguments]) == 2
    error = capsys.readouterr().err
    assert f"no Ray head's dashboard answers (Failed to connect to Ray at address: {url}.)" in error
