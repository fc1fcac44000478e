"""Asks a server for samples. Imports no Ray or torch."""

from __future__ import annotations

import time
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from mars_platform.cli.shading import printable
from mars_platform.errors import UserError, one_line
from mars_serve.cli.top.sample import Autoscalers, Lives, Sample, parsed_metrics

_TIMEOUT_S = 5.0
_MAX_BYTES = 64 * 2**20
"""Largest response that is read: metrics have 10 KB for each replica."""
_ShapeT = TypeVar("_ShapeT", bound=BaseModel)


class Away(Exception):
    """The server does not answer, or not as one that serves; it may come back."""


class _Entry(BaseModel):
    id: str


class _Entries(BaseModel):
    data: list[_Entry]


class ServerClient:
    """A connection to a server that is asked again and again."""

    def __init__(self, url: str, key: str | None) -> None:
        """Connect at the first question.

        Args:
            url: address of the server.
            key: API key; None sends none. Without an administrator's, less is known.
        """
        self.url = url
        self.is_admin = True
        """Whether the key is an administrator's, as far as is known."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def sample(self) -> Sample:
        """Ask for everything that a view shows.

        Raises:
            Away: the server does not answer now.
            UserError: it refuses the key, or is no marsray server.
        """
        models = [each.id for each in self._shaped(_Entries, "/v1/models").data]
        try:
            metrics = parsed_metrics(self._get("/metrics").decode(errors="replace"), models)
        except ValueError as error:
            raise self._strange("/metrics") from error
        now_s = time.monotonic()
        if not self.is_admin:
            return Sample(now_s, metrics)
        try:
            lives = self._shaped(Lives, "/admin/threshold").models
            autoscalers = self._shaped(Autoscalers, "/admin/autoscaler").models
        except UserError:
            self.is_admin = False
            return Sample(now_s, metrics)
        return Sample(now_s, metrics, lives, autoscalers)

    def _shaped(self, shape: type[_ShapeT], path: str) -> _ShapeT:
        try:
            return shape.model_validate_json(self._get(path))
        except ValidationError as error:
            raise self._strange(path) from error

    def _get(self, path: str) -> bytes:
        try:
            with self._client.stream("GET", path) as response:
                content = bytearray()
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MAX_BYTES:
                        raise self._strange(path)
        except httpx.HTTPError as error:
            raise Away(f"no answer ({one_line(error)})") from error
        status = response.status_code
        if status in (401, 403):
            raise UserError(
                f"--key-env: {self.url}{path} gives {status}; put a valid key into an environment "
                "variable and name the variable"
            )
        if status >= 500 or status == 429:
            raise Away(f"{path} gives {status}")
        if status != httpx.codes.OK:
            text = printable(" ".join(content[:200].decode(errors="replace").split()))
            raise UserError(
                f"URL: {self.url}{path} gives {status} ({text}); is it a marsray server?"
            )
        return bytes(content)

    def _strange(self, path: str) -> UserError:
        return UserError(
            f"URL: {self.url}{path} does not answer as marsray does; give a marsray server's "
            "address"
        )
