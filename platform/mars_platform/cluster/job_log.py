"""Reads the log of a job on a remote Ray cluster while the job writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from ray.job_submission import JobSubmissionClient


@dataclass
class Tail:
    """Reader that passes on one job's log without repetition, over any number of connections."""

    client: JobSubmissionClient
    job_id: str
    write: Callable[[str], None]
    _num_written: int = 0

    def read(self) -> None:
        """Open one connection and pass on new text until it breaks or the job has ended."""
        with suppress(aiohttp.ClientError, OSError, RuntimeError):  # a broken connection
            asyncio.run(self._read())

    def complete(self, log: str) -> None:
        """Pass on the rest of the whole log: connections can close before the last lines."""
        if rest := log[self._num_written :]:
            self.write(rest)
            self._num_written = len(log)

    async def _read(self) -> None:
        skipped = self._num_written  # every connection starts at the beginning of the log
        async for text in self.client.tail_job_logs(self.job_id):
            new, skipped = text[skipped:], max(0, skipped - len(text))
            if new:
                self.write(new)
                self._num_written += len(new)
