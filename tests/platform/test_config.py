from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from mars_platform.config import Settings, load_settings
from mars_platform.errors import UserError


class Limits(Settings):
    lowest: int = 1
    highest: int = Field(default=9, ge=1)


class Red(Settings):
    colour: Literal["red"]
    depth: int = 1


class Blue(Settings):
    colour: Literal["blue"]
    height: int = 1


Paint = Annotated[Red | Blue, Field(discriminator="colour")]


class Job(Settings):
    name: str
    limits: Limits = Limits()
    sizes: list[int] = Field(default_factory=list)
    paints: list[Paint] = Field(default_factory=list)
    output: Path | None = None
    spare: Limits | None = None


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: first\nlimits: {lowest: 2}\nsizes: [4, 5]\n")
    return path


def refusal(path, overrides=(), content=None):
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load_settings(path, Job, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_values_and_defaults(file):
    job = load_settings(file, Job)
    assert job == Job(name="first", limits=Limits(lowest=2), sizes=[4, 5])
    assert job.limits.highest == 9


def test_settings_do_not_change(file):
    job = load_settings(file, Job)
    with pytest.raises(ValidationError, match="frozen"):
        job.name = "second"


# --- files ----------------------------------------------------------------------------------------


def test_missing_file(tmp_path):
    path = tmp_path / "nothing.yaml"
    assert refusal(path).startswith(f"{path}: cannot be read (No such file or directory)")


def test_directory_in_place_of_a_file(tmp_path):
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read")


@pytest.mark.parametrize("content", ["name: [1\n", "a: b: c\n", "\tname: x\n", "name: &a *b\n"])
def test_malformed_yaml(file, content):
    assert refusal(file, content=content).startswith(f"{file}: not valid YAML (")


def test_file_that_is_not_text(file):
    assert refusal(file, content=b"name: \xff\xfe\n").startswith(f"{file}: ")


@pytest.mark.parametrize("content", ["- name: x\n", "text\n", "3\n", ""])
def test_top_level_must_be_a_mapping(file, content):
    assert refusal(file, content=content) == f"{file}: the top level must be a mapping of settings"


def test_yaml_tags_build_no_objects(file):
    content = "name: !!python/object/apply:os.getcwd []\n"
    assert refusal(file, content=content).startswith(f"{file}: not valid YAML (")


# --- values ---------------------------------------------------------------------------------------


def test_unknown_key(file):
    message = refusal(file, content="name: x\nlimit: 3\n")
    known = "name, limits, sizes, paints, output, spare"
    assert message == f"{file}: limit: unknown key; known keys: {known}"


@pytest.mark.parametrize("key", ["limits", "spare"])
def test_unknown_nested_key(file, key):
    message = refusal(file, content=f"name: x\n{key}: {{most: 3}}\n")
    assert message == f"{file}: {key}.most: unknown key; known keys: lowest, highest"


def test_unknown_key_of_one_of_several_models(file):
    message = refusal(file, content="name: x\npaints: [{colour: blue, depth: 3}]\n")
    assert message == f"{file}: paints.0.depth: unknown key; known keys: colour, height"


def test_key_that_is_no_text(file):
    assert "5" in refusal(file, content="name: x\n5: 6\n")


def test_missing_key(file):
    assert refusal(file, content="sizes: []\n") == f"{file}: name: required, but not given"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("name: [x]\n", "name: "),
        ("name: x\nsizes: [1, many]\n", "sizes.1: "),
        ("name: x\nsizes: 3\n", "sizes: "),
        ("name: x\nlimits: {highest: 0}\n", "limits.highest: "),
        ("name: x\nlimits: 4\n", "limits: "),
        ("name: x\npaints: [{colour: green}]\n", "paints.0: "),
    ],
)
def test_wrong_value(file, content, named):
    message = refusal(file, content=content)
    assert message.startswith(f"{file}: {named}")
    assert "(got " in message


def test_every_problem_is_named(file):
    message = refusal(file, content="limits: {lowest: a, highest: b}\n")
    for field in ("name: ", "limits.lowest: ", "limits.highest: "):
        assert field in message


def test_value_of_many_lines_stays_on_one(file):
    assert "sizes: " in refusal(file, content="name: x\nsizes: |\n  one\n  two\n")


# --- overrides ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name=other", Job(name="other", limits=Limits(lowest=2), sizes=[4, 5])),
        ("limits.highest=7", Job(name="first", limits=Limits(lowest=2, highest=7), sizes=[4, 5])),
        ("sizes.1=8", Job(name="first", limits=Limits(lowest=2), sizes=[4, 8])),
        ("sizes=[]", Job(name="first", limits=Limits(lowest=2), sizes=[])),
        ("limits={}", Job(name="first", sizes=[4, 5])),
        ("name=a=b", Job(name="a=b", limits=Limits(lowest=2), sizes=[4, 5])),
        (
            "spare.lowest=3",
            Job(name="first", limits=Limits(lowest=2), sizes=[4, 5], spare=Limits(lowest=3)),
        ),
    ],
)
def test_override(file, override, expected):
    assert load_settings(file, Job, [override]) == expected


def test_override_inside_a_list_of_mappings(file):
    file.write_text("name: x\npaints: [{colour: red}, {colour: blue}]\n")
    job = load_settings(file, Job, ["paints.1.height=5"])
    assert job.paints == [Red(colour="red"), Blue(colour="blue", height=5)]


def test_last_override_wins(file):
    assert load_settings(file, Job, ["name=b", "name=c"]).name == "c"


def test_override_leaves_the_file_alone(file):
    before = file.read_text()
    load_settings(file, Job, ["name=other"])
    assert file.read_text() == before


@pytest.mark.parametrize("override", ["name", "=3", "", "limits.highest"])
def test_malformed_override(file, override):
    assert refusal(file, [override]) == f"--set {override!r}: write it as key.sub=value"


def test_override_value_that_is_not_yaml(file):
    assert refusal(file, ["sizes=[1"]).startswith("--set sizes: not a valid YAML value (")


@pytest.mark.parametrize(
    "key", ["sizes.2", "sizes.first", "name.first", "sizes.0.low", "sizes.9.a"]
)
def test_override_to_nowhere(file, key):
    assert refusal(file, [f"{key}=1"]) == f"--set {key}: there is no such place in the config"


def test_override_of_an_unknown_key(file):
    assert "limits.most: unknown key" in refusal(file, ["limits.most=1"])
