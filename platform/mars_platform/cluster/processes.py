"""Starts programs that a busy machine may fail to start, and ends child processes that serve HTTP.

Imports no Ray or torch.
"""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mars_platform.errors import Stopped, UserError, one_line

MAX_ATTEMPTS = 3

_START_TIMEOUT_S = 600.0  # a busy machine may start Ray several times
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.2


class CommandFailed(RuntimeError):
    """A child process ended with an error, or was not ready in time."""


def free_port() -> int:
    """Return a loopback port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program with further variables; its output is appended to ``log`` if there is one.

    It runs in a session of its own: an interrupt on the terminal reaches it only by `end_process`.
    """
    with log.open("ab") if log else nullcontext() as output:
        return subprocess.Popen(  # noqa: S603 - a command of ours or the user's, no shell
            command,
            env={**os.environ, **environment},
            start_new_session=True,
            stdout=output,
            stderr=output,
        )


@contextmanager
def running_server(
    command: Sequence[str],
    ready_url: str,
    environment: Mapping[str, str],
    *,
    name: str,
    log: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of the block, which begins when ``ready_url`` gives status 200.

    Raises:
        CommandFailed: the server ended, or was not ready in time; the message starts with ``name``.
    """
    process = start_process(command, environment, log)
    try:
        wait_until_ready(process, ready_url, name=name, timeout_s=_START_TIMEOUT_S)
        yield process
    finally:
        end_process(process)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Leave the block on SIGTERM, so that what it has started ends, too.

    Raises:
        Stopped: the signal arrived.
    """

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not break off the clean end
        raise Stopped("terminated; all that the command had started has ended")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def lasting_ports(number: int) -> list[int]:
    """Return loopback ports that are likely to be free still when a process comes to listen on one.

    The system gives them to nobody who does not ask for them by number.
    """
    found = set[int]()
    while len(found) < number:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def wait_until_ready(
    process: subprocess.Popen[bytes], url: str, *, name: str, timeout_s: float
) -> None:
    """Wait until a server answers at ``url`` with status 200.

    Raises:
        CommandFailed: the process ended or was not ready in time; the message starts with
            ``name``.
    """
    import httpx  # it takes a twentieth of a second, which `marsray serve` need not spend

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CommandFailed(f"{name} ended with status {process.returncode}")
        with suppress(httpx.TransportError):  # not listening yet
            if httpx.get(url, timeout=5.0).status_code == httpx.codes.OK:
                return
        time.sleep(_POLL_S)
    raise CommandFailed(f"{name} was not ready within {timeout_s:.0f} s")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process, with ever stronger signals until it obeys."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)


def attempt(
    start: Callable[[], None],
    *,
    name: str,
    remedy: str,
    tell: Callable[[str], None],
    errors: tuple[type[Exception], ...] = (Exception,),
) -> None:
    """Call a function until it succeeds, at most `MAX_ATTEMPTS` times.

    ``tell`` gets one line for each failure that another attempt follows. Each message begins with
    ``name``, a noun for what is started, and the last one ends in ``remedy``. Only ``errors`` are
    tried again, never a `ValueError`, because arguments that are wrong stay wrong.
    """
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            start()
            return
        except ValueError:
            raise
        except errors as error:
            reason = one_line(error)
            if number == MAX_ATTEMPTS:
                raise UserError(
                    f"{name} did not start in {MAX_ATTEMPTS} attempts ({reason}); {remedy}"
                ) from error
        tell(f"{name} did not start ({reason}); attempt {number + 1} of {MAX_ATTEMPTS} begins")
