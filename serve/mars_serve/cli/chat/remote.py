"""Asks a server for answers, over its OpenAI-compatible endpoints. Imports no Ray or torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
from openai import OpenAI

from mars_platform.cli.addresses import parsed_address, without_version
from mars_platform.cli.shading import printable
from mars_platform.errors import UserError, one_line
from mars_serve.cli.chat.answer import DecodingChoice, Message, Part

_TIMEOUT_S = 600.0
_CONNECT_S = 10.0


def server_url(text: str) -> str:
    """Return a server's address as a base for paths, without the ``/v1`` of OpenAI clients.

    Raises:
        UserError: it is no HTTP address, or holds a password.
    """
    if parsed_address(text, "URL").userinfo:
        raise UserError(
            "URL: it holds a name or password, which other users of this machine could read; put a "
            "key into an environment variable and name it with --key-env"
        )
    return without_version(text)


class RemoteModel:
    """A model of a server."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        """Ask the server at ``url`` for its models; a ``model`` of None takes its only one.

        Raises:
            UserError: the server cannot be used, or it has no such model or several.
        """
        self._url, self._key = url, key
        with self._client() as client:
            names = [each.id for each in client.models.list().data]
        if model is None and len(names) != 1:
            raise UserError(f"--model: {url} has {', '.join(names) or 'no model'}; name one")
        if model is not None and model not in names:
            raise UserError(f"--model: {url} has no {model}; it has {', '.join(names)}")
        self.name = model or names[0]

    def answer(self, messages: Sequence[Message], choice: DecodingChoice) -> Iterator[Part]:
        """Yield the parts of the next answer; see `mars_serve.cli.chat.answer.ChatModel`."""
        extra = {
            "mode": choice.mode,
            "confidence_threshold": choice.threshold,
            "max_tokens": choice.max_tokens,
        }
        with self._client() as client:
            create: Any = client.chat.completions.create  # its overloads want exact types
            stream = create(
                model=self.name,
                messages=list(messages),
                temperature=choice.temperature,
                stream=True,
                extra_body={key: value for key, value in extra.items() if value is not None},
            )
            try:
                for event in stream:
                    if event.choices:
                        yield _part(event)
            finally:
                stream.close()  # the server then ends the request

    @contextmanager
    def _client(self) -> Iterator[OpenAI]:
        """Open a client for the length of a block, which leaves no connection behind."""
        timeout = openai.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        key = self._key or "none"
        try:
            with OpenAI(
                base_url=f"{self._url}/v1", api_key=key, max_retries=0, timeout=timeout
            ) as client:
                yield client
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(
                f"--key-env: {self._url} refuses the key ({_message(error)}); put a valid one into "
                "an environment variable and name the variable"
            ) from error
        except openai.APIStatusError as error:
            raise UserError(f"{self._url}: {_message(error)}") from error
        except openai.APIConnectionError as error:
            reason = one_line(error.__cause__) if isinstance(error.__cause__, Exception) else ""
            raise UserError(
                f"{self._url} cannot be reached ({reason or one_line(error)}); is the server "
                "running, and is that its address?"
            ) from error
        except openai.OpenAIError as error:
            raise UserError(f"{self._url}: {printable(one_line(error))}") from error


def _part(event: Any) -> Part:
    choice, mars = event.choices[0], (event.model_extra or {}).get("mars") or {}
    decoded = {}
    if choice.finish_reason is not None:
        decoded = {key: mars.get(key) for key in ("mode", "confidence_threshold")}
        decoded["finish_reason"] = choice.finish_reason
    text = choice.delta.content or ""
    extra = choice.delta.model_extra or {}
    thinking = extra.get("reasoning_content") or extra.get("reasoning") or ""
    num_tokens = mars.get("tokens", int(bool(text or thinking)))  # other servers do not say
    return Part(text, num_tokens, thinking, decoded)


def _message(error: openai.APIStatusError) -> str:
    """Return the server's own message, which names the field and the remedy."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return printable(str(message or f"status {error.status_code}"))[:500]
