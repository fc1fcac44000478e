import json

import pytest

from mars_platform.checkpoint.examples import (
    EXAMPLES_FILE,
    read_card,
    read_examples,
    write_examples,
)
from mars_platform.errors import UserError


def prompt(text, role="user"):
    return [{"role": role, "content": text, "tool_calls": None}]


def test_examples_are_the_first_short_prompts_that_differ(tmp_path):
    prompts = [prompt("a"), prompt("a"), prompt("x" * 4001), prompt("b", "tool"), prompt(None)]
    prompts += [prompt(f"q{n}") for n in range(20)]
    assert write_examples(tmp_path, prompts) == tmp_path / EXAMPLES_FILE
    found = [example.messages[0].content for example in read_examples(tmp_path)]
    assert found == ["a", *(f"q{n}" for n in range(7))]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "examples.json"),
        ('{"examples": [{"messages": []}]}', r"examples\.0\.messages"),
        ('{"examples": [{"messages": [{"role": "tool", "content": ""}]}]}', "role"),
        ('{"format_version": 9, "examples": []}', "format_version"),
    ],
)
def test_a_malformed_file_is_refused_with_the_remedy(tmp_path, content, named):
    (tmp_path / EXAMPLES_FILE).write_text(content)
    with pytest.raises(UserError, match=f"{named}.*marsray calibrate"):
        read_examples(tmp_path)


def test_a_checkpoint_may_have_neither(tmp_path):
    assert read_examples(tmp_path) == []
    assert read_card(tmp_path) is None


def test_the_card_comes_without_the_data_for_the_hub(tmp_path):
    (tmp_path / "README.md").write_bytes(b"---\r\nlicense: mit\r\n---\r\n# M\xc3\xa4rz\r\n")
    assert read_card(tmp_path) == "# März"
    (tmp_path / "README.md").write_bytes(b"\xff\xfe")
    assert read_card(tmp_path) == "\ufffd\ufffd"
    assert json.dumps(read_card(tmp_path))
