"""Submits, follows and stops jobs on a remote Ray cluster, through its head's dashboard."""

from __future__ import annotations

import os
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
from mars_platform.cluster.ray_private import (
    is_server_error,
    job_variables,
    quieten_job_client,
)
from mars_platform.errors import UserError

ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that give the address if no option does, in Ray's own order."""
_RUN, _OUTPUT = "marsray_run", "marsray_output"
_STOP_WAIT_S = 600  # enough to save a checkpoint
_LOST_S = 120.0
_POLL_S = 1.0
_LOG_TRIES = 10


class Unreachable(UserError):
    """The cluster does not answer."""


class Failing(RuntimeError):
    """The cluster, or a proxy in front of it, answers with an HTTP status of 5xx."""


@dataclass(frozen=True)
class JobRequest:
    """A job to be submitted to a cluster."""

    id: str
    """Id of the job, which the cluster must not know yet."""
    run: str
    """Name of the run that the job belongs to; several jobs can continue one run."""
    output: str
    """Directory of the run's results, on the cluster."""
    entrypoint: str
    """Shell command that is run in the working directory."""
    working_dir: Path
    """The job's working directory, as a .zip file."""
    py_modules: Sequence[Path] = ()
    """Package directories that the job's processes import instead of installed packages."""


@dataclass(frozen=True)
class Job:
    """A job's state as the cluster reports it."""

    id: str
    run: str
    output: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str
    """Ray's explanation of the status; may be empty."""
    started: datetime | None
    """Time when the job's command was started; None while it is pending."""
    ended: datetime | None

    @property
    def has_ended(self) -> bool:
        """Whether the job's status is final."""
        return self.status in {"SUCCEEDED", "FAILED", "STOPPED"}

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with times in UTC as ISO 8601."""
        times = {"started": self.started, "ended": self.ended}
        return vars(self) | {name: time and time.isoformat() for name, time in times.items()}


class Jobs:
    """The jobs that marsray has submitted to one cluster."""

    def __init__(self, address: str | None = None) -> None:
        """Connect to a cluster.

        Args:
            address: URL of the head's dashboard; by default the one in `ADDRESS_VARIABLES`.

        Raises:
            UserError: there is no address, no Ray head answers at it, or the head refuses this
                process's token.
        """
        self.address = find_address(address)
        quieten_job_client()
        with self._explained(), _hidden(ADDRESS_VARIABLES):  # Ray would prefer them to the argument
            try:
                self._client = JobSubmissionClient(self.address)
            except (KeyError, RuntimeError) as error:
                raise UserError(
                    f"{self.address} is not the dashboard of a Ray head; give its URL, such as "
                    "http://HEAD:8265"
                ) from error

    def submit(self, request: JobRequest) -> None:
        """Upload the job's files and start it.

        Raises:
            UserError: the cluster does not answer.
        """
        runtime_env: dict[str, Any] = {
            "working_dir": str(request.working_dir),
            "env_vars": job_variables(_STOP_WAIT_S),
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
        """Return the jobs submitted by marsray that the cluster remembers, newest first."""
        with self._explained():
            found = self._client.list_jobs()
        jobs = [_job(details) for details in found if _RUN in (details.metadata or {})]
        return sorted(jobs, key=lambda job: job.id.rsplit("-", 2)[1:], reverse=True)

    def find(self, job_id: str) -> Job:
        """Return the job of an id.

        Raises:
            UserError: there is no such job, or the cluster does not answer.
        """
        for job in self.all():
            if job.id == job_id:
                return job
        raise UserError(f"{self.address} has no job {job_id}; `marsray submit list` shows them")

    def log(self, job_id: str) -> str:
        """Return the job's output so far.

        Raises:
            UserError: there is no such job, or the cluster does not answer.
        """
        self.find(job_id)
        return self._whole_log(job_id)

    def follow(self, job_id: str, write: Callable[[str], None]) -> Job:
        """Pass the job's output to ``write``, from its beginning until the job has ended.

        A broken connection is opened again without repeating output. An answer with a status of 5xx
        counts as no answer: it comes from a proxy, or from a dashboard that is being restarted.

        Raises:
            UserError: there is no such job, or the cluster has not answered for two minutes.
            RuntimeError: the cluster answers with another error status.
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
        """Ask a job to end and wait until it has; a job that has ended is left alone.

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
        """Pass on the rest of an ended job's log, unless it was lost with its node."""
        with suppress(RuntimeError):
            for _ in range(_LOG_TRIES):  # a log that is lost for good gives a 5xx, too
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
        """Turn errors of Ray's client into messages that say what the user can do."""
        try:
            yield
        except AuthenticationError as error:
            raise UserError(
                f"{self.address} refuses the token, or its absence; set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH for a file (~/.ray/auth_token by default)"
            ) from error
        except OSError as error:  # the base class of all errors of the client's HTTP library
            raise Unreachable(
                f"{self.address} does not answer; check the address, the head, and the "
                "port-forward if there is one"
            ) from error
        except RuntimeError as error:  # the message holds the cluster's whole traceback
            lines = [line for line in str(error).splitlines() if line.strip(" .")]
            kind = Failing if is_server_error(error) else RuntimeError
            raise kind(f"{self.address}: {(lines or ['failed'])[-1]}") from error


def find_address(given: str | None) -> str:
    """Return the cluster's address: the given one, else the one in `ADDRESS_VARIABLES`.

    Raises:
        UserError: there is no address, or the given one is not a URL.
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
    """Remove variables from the environment for the length of the block."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)
