"""A conversation on the terminal: questions, commands that begin with a slash, and answers.

Imports no Ray, torch or HTTP library.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from rich.console import Console

from mars_platform.cli.report import say
from mars_platform.cli.shading import ShadedStream
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.cli.chat.answer import ChatModel, DecodingChoice, Figures, Message

HELP = """\
/mode [ar|threshold|exact]  decode in another mode; without one, in the model's own
/tau [X]                    accept tokens from confidence X in (0, 1] on; without one, the model's
/system [TEXT]              begin the conversation again with an instruction, or without one
/reset                      begin the conversation again
/help                       show this list
Ctrl-C ends an answer, Ctrl-D the chat. Between two lines of three quotes, a question may have
several lines."""
_QUOTES = '"""'


class ChatConversation:
    """The messages so far, and how the next answer is decoded."""

    def __init__(
        self,
        model: ChatModel,
        console: Console,
        *,
        choice: DecodingChoice,
        system: str = "",
        as_json: bool = False,
    ) -> None:
        """Begin a conversation, with the instruction ``system`` unless it is empty."""
        self.model = model
        self.choice = choice
        self.messages = list[Message]()
        self._console = console
        self._as_json = as_json
        self._begin(system)

    def run(self, lines: Iterable[str]) -> int:
        """Take lines from the user until there are no more.

        Returns:
            The number of questions that got no answer.
        """
        num_failed = 0
        for text in _joined(lines):
            try:
                if text.startswith("/"):
                    self._obey(text)
                elif text.strip():
                    self._ask(text)
            except UserError as error:
                num_failed += 1
                self._tell(str(error), style="red")
        return num_failed

    def _ask(self, text: str) -> None:
        """Print the answer to a question; a failed question is forgotten, a part of one is not."""
        asked = [*self.messages, {"role": "user", "content": text}]
        figures, said, was_interrupted = Figures(), list[str](), False
        stream = None if self._as_json else ShadedStream(self._console)
        try:
            for part in self.model.answer(asked, self.choice):
                figures.add(part)
                said.append(part.text)
                if stream is not None:
                    stream.add(part.thinking or part.text, aside=bool(part.thinking))
                    if part.thinking and part.text:
                        stream.add(part.text)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            if stream is not None and figures.num_passes:
                stream.end()
        content = "".join(said)
        if content:
            self.messages = [*asked, {"role": "assistant", "content": content}]
        self._report(content, figures, was_interrupted)

    def _report(self, content: str, figures: Figures, was_interrupted: bool) -> None:
        if self._as_json:
            found = {"answer": content, "interrupted": was_interrupted, **figures.as_dict()}
            self._console.file.write(json.dumps(found, ensure_ascii=False) + "\n")
            self._console.file.flush()
            return
        ended = "; interrupted" if was_interrupted else ""
        self._tell(f"{figures.words}{ended}", style="dim")

    def _obey(self, text: str) -> None:
        name, _, argument = text[1:].partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "mode": self._set_mode,
            "tau": self._set_threshold,
            "system": self._begin,
            "reset": lambda _: self._begin(self._system),
            "help": lambda _: HELP,
        }
        if name not in commands:
            known = ", ".join(f"/{each}" for each in commands)
            raise UserError(f"/{name}: there is no such command; there are {known}")
        self._tell(commands[name](argument.strip()), style="dim")

    def _set_mode(self, name: str) -> str:
        if name and name not in list(Mode):
            raise UserError(f"/mode: {name} is none; give {', '.join(Mode)}")
        self.choice = replace(self.choice, mode=name or None)
        return f"mode {name}" if name else "the model's own mode"

    def _set_threshold(self, text: str) -> str:
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not 0.0 < value <= 1.0:
            raise UserError(f"/tau: {text} is not in (0, 1]; 1 is plain AR decoding")
        self.choice = replace(self.choice, threshold=value)
        return f"τ {value:g}" if value is not None else "the model's own τ"

    def _begin(self, system: str) -> str:
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []
        return "a new conversation" + (" with that instruction" if system else "")

    def _tell(self, text: str, style: str) -> None:
        say(Console(stderr=True) if self._as_json else self._console, text, style)


def _joined(lines: Iterable[str]) -> Iterable[str]:
    held: list[str] | None = None
    for line in lines:
        if line.strip() == _QUOTES:
            if held is not None:
                yield "\n".join(held)
            held = [] if held is None else None
        elif held is not None:
            held.append(line)
        else:
            yield line
    if held:
        yield "\n".join(held)
