"""Checkpoints whose own files lead to files elsewhere, or lie beside files that nothing lists."""

from __future__ import annotations

import json

import pytest

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.manifest import MANIFEST, describe_all
from mars_platform.checkpoint.metadata import refuse_foreign_files
from mars_platform.errors import UserError

INDEX = "model.safetensors.index.json"


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


def test_files_of_the_hubs_cache_are_links_out_of_the_directory(directory, tmp_path):
    (tmp_path / "blob").write_text("{}")
    (directory / MANIFEST).write_text(describe_all(directory).text)
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to(tmp_path / "blob")
    refuse_foreign_files(directory)
