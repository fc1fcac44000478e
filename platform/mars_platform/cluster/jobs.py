"""Jobs on a remote Ray cluster, through the dashboard of its head: submit, watch and stop them.

Knows nothing of what a job does.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from mars_platform.cluster.job_log import Tail
from mars_platform.errors import UserError

ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Where an address is looked for that is not given, in Ray's own order."""
_RUN, _OUTPUT = "marsray_run", "marsray_output"
_STOP_WAIT_S = 600  # Ray kills a job 3 s after its SIGTERM by default, in the midst of a checkpoint
_LOST_S = 120.0
_TALKATIVE = (  # loggers that tell of every upload and connection
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
_POLL_S = 1.0
_LOG_TRIES = 10
_SERVER_ERROR = re.compile(r"Request failed with status code 5\d\d\b")
"""How an error of Ray's client begins that tells of such a status."""


class Unreachable(UserError):
    """The cluster does not answer."""


class Failing(RuntimeError):
    """The cluster, or a proxy on the way to it, answers with a status of 5xx."""


@dataclass(frozen=True)
class JobRequest:
    """What a cluster is to run."""

    id: str
    """Must be new to the cluster."""
    run: str
    """Name of the run that the job is a part of; jobs of one name may follow each other."""
    output: str
    """Where the run leaves its results, on the cluster."""
    entrypoint: str
    """Shell command, run in the working directory."""
    working_dir: Path
    """A .zip file of it."""
    py_modules: Sequence[Path] = ()
    """Package directories that the job's processes find before installed ones."""


@dataclass(frozen=True)
class Job:
    """What the cluster says of a job."""

    id: str
    run: str
    output: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str
    started: datetime | None
    ended: datetime | None

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in {"SUCCEEDED", "FAILED", "STOPPED"}

    def to_json(self) -> dict[str, Any]:
        """The fields; times as ISO 8601, in UTC."""
        times = {
            name: None if value is None else value.isoformat()
            for name, value in (("started", self.started), ("ended", self.ended))
        }
        return {**vars(self), **times}


class Jobs:
    """The jobs of one cluster that marsray has submitted."""

    def __init__(self, address: str | None = None) -> None:
        """Connect to a cluster.

        Args:
            address: URL of the head's dashboard; else what `ADDRESS_VARIABLES` say.

        Raises:
            UserError: there is no address, nothing that is Ray answers at it, or it asks for a
                token that this process does not have.
        """
        self.address = find_address(address)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        with self._explained(), _hidden(ADDRESS_VARIABLES):  # Ray prefers them to what is given
            try:
                self._client = JobSubmissionClient(self.address)
            except (KeyError, RuntimeError) as error:
                raise UserError(
                    f"{self.address} is not the dashboard of a Ray head; give its URL, such as "
                    "http://HEAD:8265"
                ) from error

    def submit(self, request: JobRequest) -> None:
        """Upload what the job needs, and start it.

        Raises:
            UserError: the cluster does not answer.
        """
        runtime_env: dict[str, Any] = {
            "working_dir": str(request.working_dir),
            "env_vars": {
                "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S),
                "RAY_LOG_TO_DRIVER": "0",  # what workers log would bury what the job itself says
            },
        }
        if request.py_modules:
            runtime_env["py_modules"] = [str(path) for path in request.py_modules]
            runtime_env["excludes"] = ["__pycache__"]
        with self._explained():
            self._client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=request.id,
                runtime_env=runtime_env,
                metadata={_RUN: request.run, _OUTPUT: request.output},
            )

    def all(self) -> list[Job]:
        """Every job that marsray submitted and the cluster remembers, the newest first."""
        with self._explained():
            found = self._client.list_jobs()
        jobs = [_job(details) for details in found if _RUN in (details.metadata or {})]
        return sorted(jobs, key=lambda job: job.id.rsplit("-", 2)[1:], reverse=True)

    def find(self, job_id: str) -> Job:
        """One job.

        Raises:
            UserError: there is none of this id, or the cluster does not answer.
        """
        for job in self.all():
            if job.id == job_id:
                return job
        raise UserError(f"{self.address} has no job {job_id}; `marsray submit list` shows them")

    def log(self, job_id: str) -> str:
        """What the job has printed so far.

        Raises:
            UserError: there is no such job, or the cluster does not answer.
        """
        self.find(job_id)
        return self._whole_log(job_id)

    def follow(self, job_id: str, write: Callable[[str], None]) -> Job:
        """Hand on what the job has printed and prints, until it has ended.

        A connection that breaks is made again, and what was handed on is not repeated. An answer
        with a status of 5xx counts as none: it is a proxy's, or of a dashboard that starts again.

        Raises:
            UserError: there is no such job, or the cluster has not answered for two minutes.
            RuntimeError: it answers with another status that is no success.
        """
        tail = Tail(self._client, job_id, write)
        heard = time.monotonic()
        while True:
            try:
                job = self.find(job_id)
                if job.has_ended:
                    self._complete(tail)
                    return job
            except (Unreachable, Failing) as error:
                if time.monotonic() - heard > _LOST_S:
                    raise Unreachable(
                        f"{self.address} has not answered for {_LOST_S:.0f} s; the job goes on: "
                        f"marsray submit logs {job_id} --follow"
                    ) from error
            else:
                tail.read()
                heard = time.monotonic()
            time.sleep(_POLL_S)

    def stop(self, job_id: str) -> Job:
        """Ask a job to end, and wait for it; one that has ended is left as it is.

        Raises:
            UserError: there is no such job, or the cluster does not answer.
        """
        job = self.find(job_id)
        if not job.has_ended:
            with self._explained():
                self._client.stop_job(job_id)
        while not job.has_ended:
            time.sleep(_POLL_S)
            job = self.find(job_id)
        return job

    def _complete(self, tail: Tail) -> None:
        """Hand on the rest of an ended job's log, unless it went with its node."""
        with suppress(RuntimeError):
            for _ in range(_LOG_TRIES):  # a lost log is a 5xx, too, but one that stays
                with suppress(Failing):
                    tail.complete(self._whole_log(tail.job_id))
                    return
                time.sleep(_POLL_S)

    def _whole_log(self, job_id: str) -> str:
        with self._explained():
            log: str = self._client.get_job_logs(job_id)
        return log

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of Ray's client into what the user can do about them."""
        try:
            yield
        except AuthenticationError as error:
            raise UserError(
                f"{self.address} refuses the token, or its absence; set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH for a file (~/.ray/auth_token by default)"
            ) from error
        except OSError as error:  # what the client's library for HTTP raises are OSErrors, all
            raise Unreachable(
                f"{self.address} does not answer; check the address, the head, and the "
                "port-forward if there is one"
            ) from error
        except RuntimeError as error:  # carries the cluster's whole traceback
            lines = [line for line in str(error).splitlines() if line.strip(" .")]
            kind = Failing if _SERVER_ERROR.match(str(error)) else RuntimeError
            raise kind(f"{self.address}: {(lines or ['failed'])[-1]}") from error


def find_address(given: str | None) -> str:
    """Address of the cluster: the given one, else that of `ADDRESS_VARIABLES`.

    Raises:
        UserError: there is none, or the given one is no URL.
    """
    if given is not None:
        if "://" not in given and given != "auto":
            raise UserError(f"--address: {given} is no URL; write http://{given}")
        return given.rstrip("/")
    for name in ADDRESS_VARIABLES:
        if address := os.environ.get(name):
            return address.rstrip("/")
    raise UserError(
        "--address: give the URL of the head's dashboard, such as http://HEAD:8265, or set "
        f"{' or '.join(ADDRESS_VARIABLES)}"
    )


def _job(details: Any) -> Job:
    return Job(
        id=details.submission_id,
        run=details.metadata[_RUN],
        output=details.metadata[_OUTPUT],
        status=str(details.status),
        message=details.message or "",
        started=_time(details.start_time),
        ended=_time(details.end_time),
    )


def _time(milliseconds: int | None) -> datetime | None:
    return None if not milliseconds else datetime.fromtimestamp(milliseconds / 1000, UTC)


@contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Take variables out of the environment for the length of the block."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)
