"""Runs `marsray submit` against a cluster that asks for a token, as a user does."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusters.ray_heads import BIN, SHELL, new_token, ray_head
from mars_platform.checkpoint.directory import read_checkpoint
from waiting import wait_until

WITH_TOKEN = {**SHELL, **new_token()}
TOKEN = WITH_TOKEN["RAY_AUTH_TOKEN"]
_WAIT_S = 240


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The dashboard's address of a Ray cluster of this module."""
    with ray_head(WITH_TOKEN, num_cpus=4) as found:
        yield found


@pytest.fixture(scope="module")
def work(write_recipe, tmp_path_factory) -> Path:
    """A user's directory with a recipe, and with data that git ignores."""
    directory = tmp_path_factory.mktemp("work")
    write_recipe(
        directory,
        stage=0,
        every_steps=10,
        scaling={"num_workers": 1},
        num_train=1000,
        train="data/train.jsonl",
        max_steps=100,
    )
    (directory / ".gitignore").write_text("data/\n")
    return directory


def start(work, *arguments, environment=WITH_TOKEN, **streams):
    command = [BIN / "marsray", "submit", *map(str, arguments)]
    return subprocess.Popen(command, cwd=work, env=environment, text=True, **streams)


def submit(work, *arguments, environment=WITH_TOKEN):
    """Run one command; returns its status, stdout and stderr."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(work, *arguments, environment=environment, **streams)
    out, error = process.communicate(timeout=_WAIT_S)
    assert TOKEN not in out + error
    return process.returncode, out, error


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({**SHELL, "RAY_AUTH_MODE": "disabled"}, id="without"),
        pytest.param({**WITH_TOKEN, "RAY_AUTH_TOKEN": "wrong" * 8}, id="wrong"),
    ],
)
def test_without_the_token_nothing_is_answered(address, work, environment):
    status, out, error = submit(work, "list", "--address", address, environment=environment)
    assert (status, out) == (2, "")
    assert error.startswith(f"error: {address} refuses the token, or its absence; set")
    assert len(error.splitlines()) == 1


def test_a_job_that_fails_is_status_1(address, work):
    """The job has the shipped packages, but the recipe's data is not on the cluster."""
    nowhere = ["--set", "data.train=[/no/such/file.jsonl]", "--name", "failing", "--ship-code"]
    status, out, error = submit(work, "recipe.yaml", "--follow", "--address", address, *nowhere)
    assert "taken from the cluster: data.train: /no/such/file.jsonl" in out
    assert "error: data.train: there is no file or directory /no/such/file.jsonl" in out
    assert "INFO" not in error
    assert re.search(r"job failing-\d{8}-\d{6} failed: .* exit code 2", error)
    assert status == 1


@pytest.fixture(scope="module")
def stopped(address, work):
    """The job of a run that was stopped, and the results of commands before and after."""
    run = ["recipe.yaml", "--name", "mine", "--json"]
    status, out, error = submit(work, *run, environment={**WITH_TOKEN, "RAY_ADDRESS": address})
    assert status == 0, error
    job = json.loads(out)
    at = ["--address", address]

    def log():
        return submit(work, "logs", job["id"], *at)[1]

    printed = work / "printed-at-first"
    with printed.open("w") as stdout:
        streams = {"stdout": stdout, "stderr": subprocess.PIPE}
        follower = start(work, "logs", job["id"], "--follow", *at, **streams)
        wait_until(lambda: "Running entrypoint" in printed.read_text(), _WAIT_S, log)
        follower.send_signal(signal.SIGINT)
        left = follower.communicate(timeout=_WAIT_S)[1]
    again = submit(work, *run, *at)
    storage = work / "mine" / "checkpoints" / "ar"
    wait_until(lambda: list(storage.glob("step-*")), _WAIT_S, log)
    stopped = submit(work, "stop", job["id"], "--json", *at)
    return SimpleNamespace(
        job=job,
        left=(follower.returncode, left),
        again=again,
        stopped=stopped,
        log=log(),
        steps=[int(path.name.rsplit("-", 1)[1]) for path in storage.glob("step-*")],
    )


@pytest.mark.full
def test_ctrl_c_leaves_the_job_running(stopped, address):
    status, error = stopped.left
    command = f"marsray submit stop {stopped.job['id']} --address {address}"
    assert f"the job goes on; to stop it: {command}\n" in error
    assert status == 130
    assert "works in" in stopped.again[2]


@pytest.mark.full
def test_a_running_run_is_not_started_again(stopped):
    status, out, error = stopped.again
    assert (status, out) == (2, "")
    assert f"output: job {stopped.job['id']} works in {stopped.job['output']} now" in error


@pytest.mark.full
def test_a_stopped_job_saves_a_checkpoint_first(stopped):
    status, out, _ = stopped.stopped
    assert (status, json.loads(out)["status"]) == (0, "STOPPED")
    step = int(re.search(r"stage ar is stopped after step (\d+)", stopped.log)[1])
    assert step in stopped.steps


@pytest.fixture(scope="module")
def followed(address, work, stopped):
    """The same run, resumed and followed over a connection that breaks."""
    printed = work / "printed"
    with port_forward(int(address.rsplit(":", 1)[1])) as forward, printed.open("w") as stdout:
        arguments = ["recipe.yaml", "--name", "mine", "--follow"]
        at = ["--address", f"http://127.0.0.1:{forward.port}"]
        process = start(work, *arguments, *at, stdout=stdout, stderr=subprocess.PIPE)
        wait_until(lambda: "Running entrypoint" in printed.read_text(), _WAIT_S, printed.read_text)
        forward.cut()
        _, error = process.communicate(timeout=_WAIT_S)
    return process.returncode, printed.read_text(), error


@pytest.mark.full
def test_a_run_of_the_same_name_is_resumed(followed, work):
    status, printed, error = followed
    assert status == 0, printed + error
    assert f"resuming the run in {work / 'mine'}" in printed
    assert "stage ar: 100/100 loss" in printed
    assert read_checkpoint(work / "mine" / "model").metadata is None
    assert not (work / "out").exists()


@pytest.mark.full
def test_no_output_is_lost_or_repeated_when_the_connection_breaks(followed, address, work):
    _, printed, error = followed
    job = re.search(r"job (mine-\d{8}-\d{6}) succeeded", error)[1]
    status, log, _ = submit(work, "logs", job, "--address", address)
    assert status == 0
    assert printed.endswith(log)
    assert printed.count("Running entrypoint for job") == 1


@pytest.mark.full
def test_jobs_are_listed_the_newest_first(followed, stopped, address, work):
    jobs = json.loads(submit(work, "list", "--json", "--address", address)[1])
    mine = [job for job in jobs if job["run"] == "mine"]
    assert [job["status"] for job in mine] == ["SUCCEEDED", "STOPPED"]
    assert mine[1]["id"] == stopped.job["id"]
    _, shown, _ = submit(work, "status", mine[0]["id"], "--address", address)
    assert "status: SUCCEEDED\n" in shown
    assert f"output: {work / 'mine'}\n" in shown


def test_a_job_that_does_not_exist_is_an_error(address, work):
    status, out, error = submit(work, "stop", "nothing", "--address", address)
    assert (status, out) == (2, "")
    assert error == f"error: {address} has no job nothing; `marsray submit list` shows them\n"


class PortForward:
    """A local port whose connections can be broken, like `kubectl port-forward`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                ends = (
                    self._listener.accept()[0],
                    socket.create_connection(("127.0.0.1", self._target)),
                )
                self._sockets += ends
                for pair in (ends, ends[::-1]):
                    self._threads.append(threading.Thread(target=self._copy, args=pair))
                    self._threads[-1].start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Break the connections that are open now."""
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for end in [self._listener, *self._sockets]:
            end.close()


@contextmanager
def port_forward(target: int) -> Iterator[PortForward]:
    forward = PortForward(target)
    try:
        yield forward
    finally:
        forward.close()
