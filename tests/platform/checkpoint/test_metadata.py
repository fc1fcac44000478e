"""Checkpoints whose own files lead to files elsewhere, or lie beside files that nothing lists."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.inspection import inspect_model
from mars_platform.checkpoint.manifest import MANIFEST, describe_all
from mars_platform.checkpoint.metadata import locate_model, pin_model, refuse_foreign_files
from mars_platform.errors import UserError

INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    return path


def refusal(directory):
    """The message with which every reader of a checkpoint refuses it."""
    with pytest.raises(UserError) as caught:
        read_checkpoint(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../other/model.safetensors", "'.' or '..'; copy"),
        ("/other/model.safetensors", "is an absolute path; copy"),
        ("..\\model.safetensors", "has a backslash; copy"),
        (".hidden.safetensors", "is that of a hidden file; copy"),
        ("", "is empty; copy"),
    ],
)
@pytest.mark.parametrize("index", [INDEX, "model.variant.safetensors.index.json"])
def test_an_index_names_only_files_of_its_directory(directory, index, name, problem):
    weights = {"a": "model-1.safetensors", "b": name}
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    message = refusal(directory)
    assert message.startswith(f"{directory / index}: the file name ")
    assert problem in message


def test_a_tokenizer_names_only_files_of_its_directory(directory):
    content = {"fast_tokenizer_files": ["tokenizer.json", "../tokenizer.4.0.json"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    assert refusal(directory).startswith(f"{directory / 'tokenizer_config.json'}: the file name")


@pytest.mark.parametrize("named", [None, "model.safetensors", {"a": 1}, [["a"]]])
def test_an_index_that_names_no_files_is_refused(directory, named):
    (directory / INDEX).write_text(json.dumps({"weight_map": named}))
    assert refusal(directory) == (
        f"{directory / INDEX}: weight_map has to name files; copy the checkpoint's file again"
    )


def test_an_adapter_is_refused_before_its_model_is_looked_for(directory):
    content = {"base_model_name_or_path": "stranger/model", "peft_type": "LORA"}
    (directory / "adapter_config.json").write_text(json.dumps(content))
    assert "merge the adapter into its model's weights" in refusal(directory)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/rag.jinja", "generation_config.json"]
)
def test_a_file_that_the_manifest_does_not_list_is_refused(directory, name):
    (directory / MANIFEST).write_text(describe_all(directory).text)
    refuse_foreign_files(directory)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("{}")
    assert refusal(directory) == (
        f"model: {directory}: {name} is not listed in manifest.json; remove the file, or, if it "
        "belongs there, delete manifest.json: marsray promote writes a new one"
    )


def test_files_that_marsray_or_a_user_adds_are_accepted(directory):
    (directory / MANIFEST).write_text(describe_all(directory).text)
    for name in ("frontier.json", "calibration.json", ".calibrate.json", "README.md"):
        (directory / name).write_text("{}")
    refuse_foreign_files(directory)


@pytest.mark.parametrize("manifest", [None, '{"files": ["another", "program"]}', "not JSON"])
def test_a_directory_without_a_manifest_may_hold_any_files(directory, manifest):
    if manifest is not None:
        (directory / MANIFEST).write_text(manifest)
    (directory / "chat_template.jinja").write_text("x")
    weights = {"a": "model-1.safetensors", "b": "part/model-2.safetensors"}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    refuse_foreign_files(directory)


def linked(file, target):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(target)


@pytest.mark.parametrize(
    "name", ["README.md", "config.json", "chat_template.jinja", "deep/own.jinja", ".hidden", "more"]
)
@pytest.mark.parametrize("read", [read_checkpoint, inspect_model, locate_model])
def test_a_link_out_of_the_directory_is_refused_by_every_reader(directory, tmp_path, name, read):
    outside = tmp_path / "secret"
    outside.mkdir() if name == "more" else outside.write_text("{}")
    linked(directory / name, outside)
    (tmp_path / "current").symlink_to(directory)
    with pytest.raises(UserError) as caught:
        read(str(tmp_path / "current"))
    assert str(caught.value) == (
        f"model: {tmp_path / 'current'}: {name} is a link that leads out of the directory; remove "
        "it, or put a copy of its target in its place if that belongs there"
    )


def test_links_within_the_directory_and_to_it_are_read(directory, tmp_path):
    linked(directory / "README.md", "config.json")
    (tmp_path / "current").symlink_to(directory)
    assert locate_model(str(tmp_path / "current")) == tmp_path / "current"


HUB = "models--some--model"


@pytest.fixture
def snapshot(directory, tmp_path):
    """A repository in the hub's cache, whose files are links to blobs."""
    path = tmp_path / "hub" / HUB / "snapshots" / COMMIT
    path.mkdir(parents=True)
    (tmp_path / "hub" / HUB / "refs").mkdir()
    (tmp_path / "hub" / HUB / "refs" / "main").write_text(COMMIT)
    (tmp_path / "hub" / HUB / "blobs").mkdir()
    for number, file in enumerate(directory.iterdir()):
        file.rename(tmp_path / "hub" / HUB / "blobs" / str(number))
        linked(path / file.name, f"../../blobs/{number}")
    return path


def test_the_hubs_cache_is_read_and_leads_nowhere_else(snapshot, tmp_path):
    linked(snapshot / "deep" / "file", "../../../blobs/0")
    locate_model(str(snapshot))
    linked(tmp_path / "hub" / "models--other" / "blobs" / "0", tmp_path / "secret")
    for target in ("../../../models--other/blobs/0", "../../refs/main"):
        linked(snapshot / "README.md", target)
        with pytest.raises(UserError, match=r"README\.md is a link that leads out"):
            locate_model(str(snapshot))


def test_a_blob_that_is_a_link_is_refused(snapshot, tmp_path):
    linked(tmp_path / "hub" / HUB / "blobs" / "0", tmp_path / "secret")
    with pytest.raises(UserError, match="is a link that leads out"):
        locate_model(str(snapshot))


def test_a_pinned_model_stays_the_same_when_links_turn_and_the_hub_changes(
    snapshot, directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "current").symlink_to(directory)
    assert pin_model(str(tmp_path / "current")) == str(directory)
    assert pin_model("/nowhere/current") == "/nowhere/current"
    pinned = pin_model("some/model")
    assert pinned == f"some/model@{COMMIT}"
    (tmp_path / "hub" / HUB / "refs" / "main").write_text("f" * 40)
    assert pin_model(pinned) == pinned
    assert locate_model(pinned) == snapshot
    with pytest.raises(UserError, match=r"^model: some/model is no local directory"):
        pin_model("some/model")


def test_neither_pickled_weights_nor_programs_are_downloaded(monkeypatch):
    files = ["config.json", "model.safetensors", "pytorch_model.bin", "modeling_x.py", "x.pkl"]
    wanted = list[str]()

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        wanted.extend(filter_repo_objects(files, allow_patterns=allow_patterns))
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UserError):
        locate_model("some/model")
    assert wanted == files[:2]
