"""Conversations on the terminal, with a checkpoint in this process and with a server."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mars_platform.cli.addresses import key_in
from mars_platform.cli.main import run
from mars_platform.cli.shading import ShadedStream, printable
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.cli.chat.answer import ChatModel, DecodingChoice, Message, Part
from mars_serve.cli.chat.conversation import ChatConversation
from mars_serve.cli.chat.local import LocalModel
from mars_serve.cli.chat.remote import RemoteModel, server_url
from mars_serve.cli.completion import generate_once
from mars_serve.cli.options import GenerateOptions

SHORT = DecodingChoice(mode="ar", max_tokens=12)


@pytest.fixture(scope="module")
def local(mars_dir: Path) -> LocalModel:
    return LocalModel(str(mars_dir))


def talk(model: ChatModel, *lines: str, **options: Any) -> tuple[str, ChatConversation]:
    console = Console(file=io.StringIO(), width=200)
    conversation = ChatConversation(model, console, **{"choice": SHORT, **options})
    conversation.run(lines)
    return console.file.getvalue(), conversation  # type: ignore[attr-defined]


def test_an_answer_is_that_of_generate(local: LocalModel, mars_dir: Path) -> None:
    question = "What is 3 plus 4?"
    once = generate_once(
        GenerateOptions(model=str(mars_dir), prompt=question, mode=Mode.AR, max_tokens=12)
    )
    _, conversation = talk(local, question)
    assert conversation.messages == [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "".join(once.passes)},
    ]


def test_answers_lose_nothing_unless_a_threshold_is_given(local: LocalModel) -> None:
    asked: list[Message] = [{"role": "user", "content": "What is 1 plus 1?"}]
    short = replace(SHORT, mode=None)
    for choice, mode in [(short, "exact"), (replace(short, threshold=0.25), "threshold")]:
        *_, last = local.answer(asked, choice)
        assert last.decoded["mode"] == mode


def test_commands_change_how_answers_are_decoded(local: LocalModel) -> None:
    text, conversation = talk(
        local, "/mode threshold", "/tau 0.25", "/system Be brief.", "What is 1 plus 1?", "/help"
    )
    assert conversation.choice == DecodingChoice("threshold", 0.25, max_tokens=12)
    assert [each["role"] for each in conversation.messages] == ["system", "user", "assistant"]
    assert "mode threshold, τ 0.25" in text
    assert "Ctrl-D" in text
    _, conversation = talk(local, "What is 1 plus 1?", "/reset")
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/mode fast", "/mode: fast is none; give"),
        ("/tau 0", "/tau: 0 is not in (0, 1]"),
        ("/tau nan", "/tau: nan is not in (0, 1]"),
        ("/go", "/go: there is no such command; there are /mode"),
    ],
)
def test_a_wrong_command_changes_nothing(local: LocalModel, line: str, said: str) -> None:
    text, conversation = talk(local, line)
    assert said in text
    assert conversation.choice == SHORT


def test_a_conversation_longer_than_the_context_is_refused(local: LocalModel) -> None:
    text, conversation = talk(local, "What is 1 plus 1? " * 60)
    assert "begin another with /reset" in text
    assert conversation.messages == []


def test_an_interrupt_ends_the_answer_and_keeps_its_beginning(local: LocalModel) -> None:
    class Interrupting:
        """A model whose user presses Ctrl-C after the third pass."""

        name = "interrupting"

        def answer(self, messages: Sequence[Message], choice: DecodingChoice) -> Iterator[Part]:
            for number, part in enumerate(local.answer(messages, choice)):
                if number == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield part

    _, whole = talk(local, "What is 5 plus 6?")
    text, conversation = talk(Interrupting(), "What is 5 plus 6?")
    said = conversation.messages[-1]["content"]
    assert text.rstrip().endswith("; interrupted")
    assert whole.messages[-1]["content"].startswith(said)
    assert 0 < len(said) < len(whole.messages[-1]["content"])
    assert talk(local, "What is 5 plus 6?")[1].messages == whole.messages


def test_a_server_answers_like_the_checkpoint(url: str, local: LocalModel) -> None:
    remote = RemoteModel(url, key_in("USER_KEY"), None)
    lines = ["What is 3 plus 4?", "And 5 plus 6?"]
    _, there = talk(remote, *lines)
    _, here = talk(local, *lines)
    assert there.messages == here.messages
    text, _ = talk(remote, lines[0], as_json=True)
    found = json.loads(text)
    assert found["answer"] == here.messages[1]["content"]
    assert (found["mode"], found["tokens"], found["forward_passes"]) == ("ar", 12, 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--key-env", "OTHER_KEY"], "error: --key-env: http"),
        (["--key-env", "NO_KEY"], "error: --key-env: NO_KEY is not set"),
        (["--key-env", "USER_KEY", "--model", "x"], "has no x; it has mars"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_clear_error(
    url: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", url, *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("key", ["USER_KEY", "OTHER_KEY"])
def test_a_remote_model_leaves_no_connection_behind(url: str, key: str) -> None:
    with suppress(UserError):
        talk(RemoteModel(url, key_in(key), None), "What is 3 plus 4?")
    port = int(url.rpartition(":")[2])
    sockets = [each for each in gc.get_objects() if type(each) is socket.socket]
    assert [each for each in sockets if f"raddr=('127.0.0.1', {port})" in repr(each)] == []


def test_addresses_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    assert server_url("http://here:8000/v1/") == server_url("http://here:8000")
    for wrong in ("ftp://here", "http://", "http://name:secret@here"):
        with pytest.raises(UserError, match="URL") as error:
            server_url(wrong)
        assert "secret" not in str(error.value)


def test_a_checkpoint_without_a_chat_template_is_refused(
    plain_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in plain_dir.iterdir():
        if file.name != "chat_template.jinja":
            shutil.copy(file, tmp_path)
    assert run(["chat", str(tmp_path)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_text_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    stream = ShadedStream(console)
    for part in ("a\x1b[2J", "b\nc"):
        stream.add(part)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in shown
    assert "a␛[2J" in shown
    assert printable("\x9b1m\x7f\tok\n") == "\ufffd1m␡\tok\n"


def test_passes_can_be_told_apart_without_colours() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True)
    stream = ShadedStream(console)
    stream.add("one")
    stream.add("two")
    assert "\x1b[4mtwo" in console.file.getvalue()  # type: ignore[attr-defined]
