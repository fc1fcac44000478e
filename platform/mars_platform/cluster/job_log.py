"""The log of a job on a remote Ray cluster, as it is written.

Knows nothing of how the job stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from ray.job_submission import JobSubmissionClient


@dataclass
class Tail:
    """A job's log, read over as many connections as it takes."""

    client: JobSubmissionClient
    job_id: str
    write: Callable[[str], None]
    _num_written: int = 0

    def read(self) -> None:
        """Hand on what comes over one connection, until it is closed or breaks.

        The cluster closes it when the job has ended.
        """
        with suppress(aiohttp.ClientError, OSError, RuntimeError):  # a broken connection
            asyncio.run(self._read())

    def complete(self, log: str) -> None:
        """Hand on what is missing of the whole log: connections may close before its last lines."""
        if rest := log[self._num_written :]:
            self.write(rest)
            self._num_written = len(log)

    async def _read(self) -> None:
        skipped = self._num_written  # every connection begins with the first character
        async for text in self.client.tail_job_logs(self.job_id):
            new, skipped = text[skipped:], max(0, skipped - len(text))
            if new:
                self.write(new)
                self._num_written += len(new)
