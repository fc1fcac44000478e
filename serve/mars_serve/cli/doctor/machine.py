"""Checks memory, disks, limits, temporary files and a port of this machine.

Only the standard library is imported here, so that these checks run in every installation.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mars_serve.cli.doctor.finding import Finding, failed, ok, warning

DEFAULT_PORT = 8000
"""Port that ``marsray serve`` listens on by default."""
_GIB = 2**30
_LEAST_MEMORY = 4 * _GIB
"""Bytes that Ray and one engine of a small model need together, about."""
_OBJECT_STORE = 256 * 2**20
"""Bytes that the object store of a local cluster takes of shared memory by default."""
_FULL = 0.95
"""Share of a disk from which on Ray writes no more objects to it."""
_LEAST_DISK = 2 * _GIB
_CONNECTIONS = 16_384
"""Connections that a server takes by default, each of which needs an open file."""
_FEWEST_FILES = 1024
_SOCKET_CHARACTERS = 107
"""Longest path of a Unix socket."""
_SOCKET_BELOW = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""Path of Ray's longest socket below the temporary directory."""


def check_memory(weights_bytes: int | None) -> Iterator[Finding]:
    """Compare the free memory with what a server of the checkpoint, or of a small model, needs."""
    free = _free_memory()
    if free is None:
        yield ok("memory", "this system does not say how much is free")
        return
    needed = _LEAST_MEMORY + (weights_bytes or 0)
    found = f"{free / _GIB:.1f} GiB free"
    if free >= needed:
        yield ok("memory", found)
        return
    reason = f", and {weights_bytes / _GIB:.1f} GiB are weights" if weights_bytes else ""
    yield warning(
        "memory",
        f"{found}, but a server needs about {needed / _GIB:.1f} GiB{reason}",
        "end other programs, use a larger machine, or serve a smaller number type (dtype: "
        "bfloat16)",
    )


def _free_memory() -> int | None:
    """Return the bytes that this process may still use; None if unknown."""
    found = [_available(Path("/proc/meminfo")), _left_in_group(Path("/sys/fs/cgroup"))]
    return min((each for each in found if each is not None), default=None)


def _available(file: Path) -> int | None:
    if not file.is_file():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_group(group: Path) -> int | None:
    """Return the bytes that the control group of a container leaves; None without a limit."""
    limit, used = group / "memory.max", group / "memory.current"
    if not limit.is_file() or not used.is_file():
        return None
    text = limit.read_text(encoding="utf-8").strip()
    return None if text == "max" else int(text) - int(used.read_text(encoding="utf-8"))


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108
    """Compare shared memory with the object store of a local Ray cluster."""
    if not path.is_dir():
        yield ok("shared memory", f"this system has no {path}, and Ray uses files instead")
        return
    free = shutil.disk_usage(path).free
    found = f"{free / 2**20:,.0f} MiB free in {path}"
    if free >= _OBJECT_STORE:
        yield ok("shared memory", found)
    else:
        yield warning(
            "shared memory",
            f"{found}, but Ray's object store takes {_OBJECT_STORE / 2**20:.0f} MiB",
            "give the container more (docker run --shm-size=1g), or Ray uses slow files instead",
        )


def check_disk() -> Iterator[Finding]:
    """Look for disks of temporary and cached files that are full, or nearly so."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = {"temporary files": Path(_ray_parent()), "cached files": cache}
    parts = []
    for what, path in places.items():
        present = next(each for each in (path, *path.parents) if each.is_dir())
        usage = shutil.disk_usage(present)
        found = f"{usage.free / _GIB:.1f} GiB free for {what} in {path}"
        if usage.free < _LEAST_DISK or usage.used > _FULL * usage.total:
            yield warning(
                "disk",
                f"{found}, {usage.used / usage.total:.0%} of the disk is used",
                f"delete files: Ray stops writing at {_FULL:.0%}",
            )
        else:
            parts.append(found)
    if parts:
        yield ok("disk", "; ".join(parts))


def check_open_files() -> Iterator[Finding]:
    """Compare the limit of open files with the connections that a server takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = [
        "unlimited" if each == resource.RLIM_INFINITY else f"{each:,}" for each in (soft, hard)
    ]
    found = f"{words[0]}, at most {words[1]}"
    if hard != resource.RLIM_INFINITY and hard < _CONNECTIONS:
        yield warning(
            "open files",
            f"{found}, but a server takes up to {_CONNECTIONS:,} connections",
            f"raise the limit (ulimit -Hn {4 * _CONNECTIONS}), or the server takes fewer",
        )
    elif soft != resource.RLIM_INFINITY and soft < _FEWEST_FILES:
        yield warning(
            "open files", f"{found}, too few for Ray", f"run ulimit -n {4 * _FEWEST_FILES}"
        )
    else:
        yield ok("open files", found)


def check_temporary_directory() -> Iterator[Finding]:
    """Check that Ray can write below the temporary directory, and make Unix sockets there."""
    parent = _ray_parent()
    length = len(os.fsencode(parent + _SOCKET_BELOW))
    if length > _SOCKET_CHARACTERS:
        most = _SOCKET_CHARACTERS - len(_SOCKET_BELOW)
        yield failed(
            "temporary directory",
            f"{parent} is too long for Ray's Unix sockets: their paths would have {length} bytes, "
            f"and {_SOCKET_CHARACTERS} are possible",
            f"set RAY_TMPDIR to a directory of at most {most} characters, such as /tmp",
        )
        return
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix="marsray-doctor-"):
            yield ok("temporary directory", f"{parent} can be written")
    except OSError as error:
        yield failed(
            "temporary directory",
            f"{parent} cannot be written ({error.strerror})",
            "set RAY_TMPDIR and TMPDIR to a directory that can be",
        )


def _ray_parent() -> str:
    """Return the directory in which Ray makes its own, by Ray's rules."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108


def check_port(port: int | None, host: str = "127.0.0.1") -> Iterator[Finding]:
    """Check that a server could listen on a port; a taken one fails only if the user named it."""
    number = DEFAULT_PORT if port is None else port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((host, number))
        except PermissionError:
            yield failed(
                "port",
                f"{number} may be used by the administrator only",
                "give --port of 1024 or more, and let a load balancer listen on this one",
            )
            return
        except OSError as error:
            say = warning if port is None else failed
            found = f"{number} is taken{_taken_by(host, number)} ({error.strerror})"
            yield say("port", found, "end that program, or run marsray serve with another --port")
            return
    yield ok("port", f"{number} is free on {host}")


def _taken_by(host: str, port: int) -> str:
    """Return who listens on a port, in words; empty if nothing can be told."""
    if _is_marsray(host, port):
        return " by a marsray server"
    inode = next((row[9] for row in _sockets() if _listens(row, port)), None)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == f"socket:[{inode}]":
                name = (link.parents[1] / "comm").read_text(encoding="utf-8").strip()
                return f" by process {link.parents[1].name}, {name!r}"
        except OSError:
            continue  # another user's process, or one that has ended
    return ""


def _is_marsray(host: str, port: int) -> bool:
    """Tell whether a marsray server answers, which is ready, or says that it is not."""
    import http.client

    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", "/ready")
        text = connection.getresponse().read(1000)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return b'"ready"' in text or b'"not_ready"' in text


def _sockets() -> Iterator[list[str]]:
    for name in ("tcp", "tcp6"):
        file = Path("/proc/net") / name
        if file.is_file():
            yield from (line.split() for line in file.read_text().splitlines()[1:])


def _listens(row: list[str], port: int) -> bool:
    return row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
