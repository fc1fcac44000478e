"""The template process, whose forks are the engines of a node's equal replicas.

The process runs ``python -m mars_serve.replica.engine_template LISTENER KEEPER``, with the file
descriptors of a listening Unix socket and of a process (a pidfd). On the first order it loads an
engine and warms it up; ``marsray serve`` gives one while Ray starts. From then on an engine is
there within a fraction of a second, with what was measured, and all share the memory of the
weights. The template runs no requests; it ends with its keeper, or some time after the last of its
engines, which do not need it.

A fork has none of its parent's threads, and a matrix library would wait for its own for ever. So
the engine is loaded in a thread with which they end, and the main thread, which forks, has none.

Templates are found by sockets in a directory that belongs to this user alone.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from mars_platform.checkpoint.metadata import locate_model
from mars_platform.imports import uncollected
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.channel import Channel, ChannelClosed

if TYPE_CHECKING:  # importing it takes seconds
    from mars_serve.replica.engine_main import LoadedEngine
    from mars_serve.replica.engine_process import EngineStart

PLACE_VARIABLE = "MARSRAY_PLACE"
"""Variable with a name for all processes of a server and its cluster, which share a machine."""
_IDLE_S = 60.0
"""Seconds without orders and engines after which a template ends."""
_ORDER_S = 5.0
"""Longest wait in seconds for the order of a process that has connected."""
_SILENT_S = 30.0
"""Seconds without use of a processor after which a template that has an order is given up. Loading
may take many minutes, but uses a processor even where a slow disk holds it up."""

_log = logging.getLogger("mars_serve.engine")


class EngineProcess:
    """The process of an engine, as a `mars_serve.engine.ipc.client.Worker`."""

    def __init__(self, process: int, child: subprocess.Popen[bytes] | None = None) -> None:
        """Take over the file descriptor of a process (a pidfd), which may be this one's child."""
        self._process, self._child = process, child

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return not select.select([self._process], [], [], 0)[0]

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        """Wait until the process has ended, and kill it after ``timeout`` seconds."""
        if not select.select([self._process], [], [], timeout)[0]:
            self.kill()
            select.select([self._process], [], [])
        if self._child is not None:
            self._child.wait()  # else it stays a zombie


def place_on(node: str) -> str:
    """Return a name for the processes of a node that are in the same environment as this one."""
    # Ray's own variables differ between its processes
    variables = sorted(item for item in os.environ.items() if not item[0].startswith("RAY_"))
    place = os.environ.get(PLACE_VARIABLE)
    return place or repr((node, sys.executable, sys.path, variables))


def template_name(settings: ModelSettings, num_threads: int, place: str) -> str:
    """Return a name that all replicas have in common whose engines are equal, and no others.

    Raises:
        UserError: the model cannot be found.
    """
    files = [
        (each.path, status.st_ino, status.st_size, status.st_mtime_ns)
        for place in filter(None, (str(locate_model(settings.path)), settings.adapter))
        for each in sorted(os.scandir(place), key=lambda entry: entry.name)
        if (status := each.stat())
    ]
    parts = (place, settings.model_dump_json(), num_threads, files)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def fork_engine(name: str, handed: list[int]) -> EngineProcess:
    """Have the template of a name fork an engine, and wait until it has; see `template_name`.

    The engine is handed the descriptors of its channel, in which its order waits, and its pulse.
    A template that is stopped or hangs is ended; the engines that it has forked go on.

    Raises:
        OSError: no template can be started, or it has ended or forks nothing.
    """
    # the engine writes its log where this process writes
    with _ordered(name, [*handed, 1, 2], keeper=os.getppid()) as connection:
        processes = _answer(connection)
    if not processes:
        raise ConnectionError("the template process has ended, or has no memory for an engine")
    return EngineProcess(processes[0])


def load_ahead(name: str, channel: int) -> None:
    """Have a template load its engine by the order that waits in a channel, and do not wait.

    The template ends with this process at the latest.

    Raises:
        OSError: no template can be started.
    """
    with _ordered(name, [channel], keeper=os.getpid()):
        pass


@contextmanager
def _ordered(name: str, handed: list[int], keeper: int) -> Iterator[socket.socket]:
    """Hand descriptors to the template of a name, and yield the connection for its answer."""
    directory = Path(tempfile.gettempdir()) / f"marsray-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is no directory that this user alone can use")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SILENT_S)
        _connect(connection, directory, str(directory / name), keeper)
        socket.send_fds(connection, [b"\0"], handed)
        yield connection


def _answer(connection: socket.socket) -> list[int]:
    """Return the descriptors that a template answers with; end it if it does nothing any more."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    template = int.from_bytes(peer[:4], sys.byteorder)
    while True:
        used = _processor_time(template)
        try:
            _, processes, *_ = socket.recv_fds(connection, 1, 1)
            return processes
        except TimeoutError:
            if _processor_time(template) == used:
                os.kill(template, signal.SIGKILL)
                raise TimeoutError("the template process did nothing, and is ended") from None


def _processor_time(process: int) -> list[str]:
    """Return the time that a process has used, in the user's and in the kernel's mode."""
    return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[11:13]


def _connect(connection: socket.socket, directory: Path, path: str, keeper: int) -> None:
    with ExitStack() as stack:
        lock = os.open(directory, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several replicas that start, one starts the template
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return connection.connect(path)
        _remove_sockets_of_the_dead(directory)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        handed = [listener.fileno(), os.pidfd_open(keeper)]
        stack.callback(os.close, handed[1])
        command = [sys.executable, "-m", "mars_serve.replica.engine_template", *map(str, handed)]
        # a library with threads of its own would wait for them in a fork; torch is told its number
        environment = {**python_environment(), "OMP_NUM_THREADS": "1"}
        subprocess.run(  # noqa: S603 - runs this interpreter with fixed arguments
            command, env=environment, pass_fds=handed, stdin=subprocess.DEVNULL, check=False
        )
        return connection.connect(path)


def _remove_sockets_of_the_dead(directory: Path) -> None:
    """Remove the sockets of templates that were killed; the others do not notice."""
    for each in directory.iterdir():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other_type:
            if each.is_socket() and other_type.connect_ex(str(each)) == errno.ECONNREFUSED:
                each.unlink(missing_ok=True)


def python_environment() -> dict[str, str]:
    """Return the environment in which a child finds the modules that this process finds.

    OpenMP's idle threads sleep there unless the environment says otherwise: spinning, they would
    hold cores that the engine's own threads and HTTP need.
    """
    path = os.pathsep.join(filter(None, sys.path))
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}


def main() -> None:
    """Fork an engine for each process that connects, until none is needed any more."""
    listener, keeper = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.read(reader, 1)  # until the other has closed its end
        os._exit(0)  # a process of Ray that ends would end its own children, too
    os.setsid()
    listener.listen()  # so the system names this process to those that connect
    os.close(reader)
    os.close(writer)
    with uncollected():
        from mars_serve.replica.engine_main import prepare_process  # not before it is detached

    prepare_process()
    loaded: Future[LoadedEngine] | None = None
    try:
        while loaded is None or loaded.exception() is None:
            ready, _, _ = select.select([listener.fileno(), keeper], [], [], _IDLE_S)
            if keeper in ready or not (_has_engines() or ready):
                break
            if ready:
                loaded = _accept(listener, loaded)
    finally:
        Path(listener.getsockname()).unlink(missing_ok=True)


def _has_engines() -> bool:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _accept(
    listener: socket.socket, loaded: Future[LoadedEngine] | None
) -> Future[LoadedEngine] | None:
    """Fork an engine for a process that has connected, and return the one that is loaded.

    A process that hands over only the channel of its order wants no engine yet.
    """
    connection, _ = listener.accept()
    connection.settimeout(_ORDER_S)
    with connection, ExitStack() as stack:
        try:
            _, (stream, *handed), *_ = socket.recv_fds(connection, 1, 4)
            channel = Channel(stack.enter_context(socket.socket(fileno=stream)))
            for descriptor in handed:
                stack.callback(os.close, descriptor)
            (start,) = cast("list[EngineStart]", channel.receive())
            loaded = loaded or _load(start)
            if not handed:
                return loaded
            process = os.fork()
            if not process:
                listener.close()  # nobody is to wait at it once the template has ended
                connection.close()
                _become_engine(start, channel, loaded, handed)
            engine = os.pidfd_open(process)
            stack.callback(os.close, engine)
            socket.send_fds(connection, [b"\0"], [engine])
        except (OSError, ValueError, ChannelClosed) as error:  # the other end has ended, mostly
            _log.warning("no engine was forked: %r", error)
    return loaded


def _load(start: EngineStart) -> Future[LoadedEngine]:
    from mars_serve.replica.engine_main import load

    with ThreadPoolExecutor(1) as loading:
        loaded = loading.submit(load, start)
    gc.collect()
    gc.freeze()  # a collection in an engine would write to the memory that it shares
    return loaded


def _become_engine(
    start: EngineStart, channel: Channel, loaded: Future[LoadedEngine], handed: list[int]
) -> NoReturn:
    """Run an engine in a process that has just been forked, and end the process."""
    from mars_serve.replica.engine_main import run_engine

    try:
        pulse, output, errors = handed
        os.dup2(output, 1)
        os.dup2(errors, 2)
        run_engine(start, channel, pulse, lambda _: loaded.result())
    except BaseException:
        _log.exception("the engine failed")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
