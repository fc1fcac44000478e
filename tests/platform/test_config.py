from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

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


def test_a_file_and_the_defaults_give_the_settings(file):
    job = load_settings(file, Job)
    assert job == Job(name="first", limits=Limits(lowest=2), sizes=[4, 5])
    assert job.limits.highest == 9


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"), [("nothing.yaml", "No such file or directory"), ("", "Is a directory")]
)
def test_a_path_that_is_no_file_is_refused(tmp_path, name, reason):
    path = tmp_path / name
    assert refusal(path).startswith(f"{path}: cannot be read ({reason})")


@pytest.mark.parametrize(
    "content",
    [
        "name: [1\n",
        "a: b: c\n",
        "\tname: x\n",
        "name: &a *b\n",
        "name: !!python/object/apply:os.getcwd []\n",
        b"name: \xff\xfe\n",
    ],
)
def test_malformed_yaml_is_refused(file, content):
    assert refusal(file, content=content).startswith(f"{file}: not valid YAML (")


@pytest.mark.parametrize("content", ["- name: x\n", "text\n", "3\n", ""])
def test_the_top_level_must_be_a_mapping(file, content):
    assert refusal(file, content=content) == f"{file}: the top level must be a mapping of settings"


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "key", "known"),
    [
        ("limit: 3", "limit", "name, limits, sizes, paints, output, spare"),
        ("limits: {most: 3}", "limits.most", "lowest, highest"),
        ("spare: {most: 3}", "spare.most", "lowest, highest"),
        ("paints: [{colour: blue, depth: 3}]", "paints.0.depth", "colour, height"),
    ],
)
def test_an_unknown_key_is_named_beside_the_known_ones(file, content, key, known):
    message = refusal(file, content=f"name: x\n{content}\n")
    assert message == f"{file}: {key}: unknown key; known keys: {known}"


def test_a_key_that_is_no_text_is_refused(file):
    assert "5" in refusal(file, content="name: x\n5: 6\n")


def test_a_missing_key_is_named(file):
    assert refusal(file, content="sizes: []\n") == f"{file}: name: required, but not given"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("name: [x]\n", "name: "),
        ("name: x\nsizes: [1, many]\n", "sizes.1: "),
        ("name: x\nsizes: 3\n", "sizes: "),
        ("name: x\nsizes: |\n  one\n  two\n", "sizes: "),
        ("name: x\nlimits: {highest: 0}\n", "limits.highest: "),
        ("name: x\nlimits: 4\n", "limits: "),
        ("name: x\npaints: [{colour: green}]\n", "paints.0: "),
    ],
)
def test_a_wrong_value_is_named_and_shown(file, content, named):
    message = refusal(file, content=content)
    assert message.startswith(f"{file}: {named}")
    assert "(got " in message


def test_every_problem_is_named_on_one_line(file):
    message = refusal(file, content="limits: {lowest: a, highest: b}\n")
    for field in ("name: ", "limits.lowest: ", "limits.highest: "):
        assert field in message


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
def test_an_override_replaces_a_value(file, override, expected):
    assert load_settings(file, Job, [override]) == expected


def test_an_override_reaches_into_a_list_of_mappings(file):
    file.write_text("name: x\npaints: [{colour: red}, {colour: blue}]\n")
    job = load_settings(file, Job, ["paints.1.height=5"])
    assert job.paints == [Red(colour="red"), Blue(colour="blue", height=5)]


@pytest.mark.parametrize("override", ["name", "=3", "", "limits.highest"])
def test_a_malformed_override_is_refused(file, override):
    assert refusal(file, [override]) == f"--set {override!r}: write it as key.sub=value"


def test_an_override_whose_value_is_not_yaml_is_refused(file):
    assert refusal(file, ["sizes=[1"]).startswith("--set sizes: not a valid YAML value (")


@pytest.mark.parametrize(
    "key", ["sizes.2", "sizes.first", "name.first", "sizes.0.low", "sizes.9.a"]
)
def test_an_override_that_leads_nowhere_is_refused(file, key):
    assert refusal(file, [f"{key}=1"]) == f"--set {key}: there is no such place in the config"
