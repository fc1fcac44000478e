"""Runs HAProxy for Ray Serve with an amended configuration.

Ray Serve writes a configuration and starts the program in RAY_SERVE_HAPROXY_BINARY_PATH. That
configuration opens a statistics page and a metrics port on all interfaces, answers in plain text if
no replica is available, and misses some disconnected clients and all lost hosts. It lets a client
keep a connection for an hour without finishing a request, and one client keep them all. During an
update of an application it drops replicas that still serve, and can lose a request. This program,
started instead of HAProxy, amends the file and then becomes HAProxy. If an amendment does not fit
the file, which another version of Ray may write otherwise, it ends with an error that names it.

The variables whose names end `ConnectionLimits` set the limits on clients' connections.

It runs again for every reload, in an interpreter without installed packages, and therefore uses the
standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_RAY_VERSION = "2.60"
"""Version of Ray whose configuration was read when the amendments were written."""
_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
_LINES = r"\n(?:(?!\S).*(?:\n|\Z))*"
"""The rest of a section, behind its name."""
_BACKEND = re.compile(r"backend (\S+)")
_REPLICA = re.compile(r"^ +server (?!.* backup$).*\n", re.MULTILINE)
_INGRESS = r"set-var-fmt\(txn\.serve_deployment\) .* if is_"
_CLIENT_S = 60
"""Seconds after which a client counts as gone that neither sends the body that is waited for nor
takes what is sent. It may wait for an answer as long as it likes."""


def _error_body(kind: str, code: str, message: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


_NOT_READY = _error_body("server_error", "not_ready", "no replica is ready; try again later")
_INCOMPLETE = "the request ended before its body; send it whole"
_TOO_SLOW = "the request's body did not arrive in time; send it whole"
_ERRORS = {
    "400 Bad Request": _error_body("invalid_request_error", "unparsable", _INCOMPLETE),
    "408 Request Timeout": _error_body("invalid_request_error", "request_timeout", _TOO_SLOW),
    "503 Service Unavailable": _NOT_READY,
}
"""Bodies of the errors that HAProxy itself answers with, by status line. A request whose headers
are incomplete or no HTTP gets HAProxy's own page of 400 or 408, which no option changes."""


class ConnectionLimits(NamedTuple):
    """Limits on connections of clients, with the defaults of ``proxy`` in a server's settings."""

    connections: int = 16384
    """Largest number of connections; as many as open files permit if those are fewer."""
    connections_per_address: int = 8192
    """Largest number of an IPv4 address or of an IPv6 network of 64 bits; 0 for no limit. At most
    three quarters of all connections, so that one address never takes them all."""
    request_wait_s: float = 10.0
    """Seconds within which a request's headers must have arrived, and a body of up to 16 KB."""

    @classmethod
    def of_environment(cls) -> ConnectionLimits:
        """Return the limits in this process's variables, which `variables` names."""
        default = cls()
        return cls(
            int(os.environ.get(_VARIABLES["connections"], default.connections)),
            int(os.environ.get(_VARIABLES["connections_per_address"], default[1])),
            float(os.environ.get(_VARIABLES["request_wait_s"], default.request_wait_s)),
        )

    def variables(self) -> dict[str, str]:
        """Return these limits as environment variables."""
        return {_VARIABLES[name]: str(value) for name, value in self._asdict().items()}

    def within(self, num_files: int, *, files_each: int = 2) -> ConnectionLimits:
        """Return limits that a process with at most ``num_files`` open files can keep."""
        reserved = min(_RESERVED_FILES, num_files // 2)
        possible = max(1, (num_files - reserved) // files_each)
        connections = min(self.connections, possible)
        per_address = min(self.connections_per_address, max(1, connections * 3 // 4))
        return self._replace(connections=connections, connections_per_address=per_address)


_VARIABLES = {
    "connections": "MARSRAY_PROXY_CONNECTIONS",
    "connections_per_address": "MARSRAY_PROXY_CONNECTIONS_PER_ADDRESS",
    "request_wait_s": "MARSRAY_PROXY_REQUEST_WAIT_S",
}
_RESERVED_FILES = 1024
"""Open files left for listeners, health checks, pipes and pollers."""


class CannotAmend(Exception):
    """Ray Serve's configuration lacks what an amendment changes; the message says which."""

    def __init__(self, purpose: str, pattern: str) -> None:
        """Name an amendment by its purpose and the pattern that does not match."""
        super().__init__(
            f"cannot {purpose}: Ray Serve's configuration of HAProxy has nothing like {pattern!r}. "
            f"marsray's amendments are for Ray {_RAY_VERSION}: install that version, leave "
            "HAProxy's metrics on as Ray does by default, or set proxy.kind: python"
        )


class Amendment(NamedTuple):
    """One change of Ray Serve's configuration, which has to be possible."""

    purpose: str
    """The purpose of the change, as the end of "cannot ..."."""
    pattern: str
    """Regular expression of the text to change; ``^`` and ``$`` match at each line."""
    replacement: Callable[[re.Match[str]], str]
    """Returns the text to put in its place."""
    each: str = ""
    """Regular expression of lines, if there are any, that have to be changed each; if it is empty,
    the pattern has to match once at least."""

    def applied_to(self, config: str) -> str:
        """Return the changed configuration."""
        changed, count = re.subn(self.pattern, self.replacement, config, flags=re.MULTILINE)
        needed = len(re.findall(self.each, config, re.MULTILINE)) if self.each else 1
        if count < needed:
            raise CannotAmend(self.purpose, self.pattern)
        return changed


def amendments(directory: Path, limits: ConnectionLimits) -> tuple[Amendment, ...]:
    """Return all changes in order; the errors of `write_errors` are in ``directory``."""

    def text(replacement: str) -> Callable[[re.Match[str]], str]:
        return lambda _: replacement

    return (
        Amendment(
            "close the metrics port, which listens on all interfaces",
            rf"^frontend prometheus{_LINES}",
            text(""),
        ),
        Amendment(
            "close the statistics page, which listens on all interfaces",
            rf"^listen stats{_LINES}",
            text(""),
        ),
        Amendment(
            "notice lost hosts and requests that do not arrive",
            rf"^defaults{_LINES}",
            lambda found: found[0] + _defaults(directory, limits),
        ),
        Amendment(
            # HAProxy does not inherit this option from the section of defaults
            "close connections on which data was sent to a lost host",
            r"^ +server \S+ \S+ check\b(?! tcp-ut)",
            lambda found: f"{found[0]} tcp-ut 10s",
            each=r"^ +server (?!.* (?:track|tcp-ut) )",
        ),
        Amendment(
            # Under this option HAProxy 2.8 does not notice a client that sent its body in a
            # separate packet and then disconnects, so that the engine would work for nobody.
            "notice clients that disconnect behind their body",
            r"^ +option splice-request\n",
            text(""),
        ),
        Amendment(
            # Alone, Ray Serve's rule covers neither an idle connection that a stopping replica
            # closes while a request is sent on it, nor a request that a lost host does not
            # answer. HAProxy retries only requests that it has received in full.
            "retry requests that a stopping replica did not answer",
            r"^ +retry-on .*$",
            lambda found: f"{found[0]} empty-response\n    option http-buffer-request",
        ),
        Amendment(
            "report errors of HAProxy as JSON",
            r"^( +errorfile 50[234] ).*$",
            lambda found: f"{found[1]}{directory}/503.http",
        ),
        Amendment(
            # pipes serve answers of many KB only, and each takes two open files
            "limit the number of connections",
            r"^ +maxconn \d+$",
            text(f"    maxconn {limits.connections}\n    maxpipes 64"),
        ),
        Amendment(
            "give up clients that neither send nor take anything",
            r"^ +timeout client .*$",
            text(f"    timeout client {_CLIENT_S}s"),
        ),
        Amendment(
            "limit the connections of a client",
            r"^frontend http_frontend\n +bind .*\n",
            lambda found: found[0] + _per_address(limits),
        ),
        Amendment(
            "keep the names of all applications from clients",
            r"^ +http-request return .* if routes\n",
            text(""),
        ),
        Amendment(
            "report as JSON that no application is ready",
            r"^ +http-request return status 404 .*$",
            text(
                "    http-request return status 503 content-type application/json "
                f"hdr Retry-After %[rand(3),add(1)] string '{_NOT_READY}'"
            ),
        ),
    )


def amended(config: str, directory: Path, limits: ConnectionLimits, before: str = "") -> str:
    """Return the configuration that Ray Serve wrote, with marsray's amendments.

    The result opens no listeners of its own, reports errors as JSON by the files that
    `write_errors` wrote into ``directory``, notices each disconnected client and lost host, bounds
    what clients hold without finishing a request, and includes all replicas that serve: if need be
    those of ``before``, the previous result.

    Raises:
        CannotAmend: the configuration lacks what an amendment changes.
    """
    replicas = _replicas_of(before)
    kept = "".join(_with_replicas(each, config, replicas) for each in _SECTION.split(config))
    for amendment in amendments(directory, limits):
        kept = amendment.applied_to(kept)
    return kept


def _defaults(directory: Path, limits: ConnectionLimits) -> str:
    """Return the lines that the section of defaults ends in.

    The first options close connections on which a host that lost power is waited for.
    """
    return f"""\
    option srvtcpka
    srvtcpka-idle 4s
    srvtcpka-intvl 3s
    srvtcpka-cnt 3
    timeout http-request {round(limits.request_wait_s * 1000)}ms
    # a connection that is opened ahead of its first request is closed without an answer
    option http-ignore-probes
    errorfile 400 {directory}/400.http
    errorfile 408 {directory}/408.http
"""


def _per_address(limits: ConnectionLimits) -> str:
    """Return the lines of the frontend that limit a client's connections.

    Within one connection, HTTP/2 would carry many requests at once.
    """
    lines = "    option disable-h2-upgrade\n"
    if not limits.connections_per_address:
        return lines
    return f"""\
{lines}\
    stick-table type ipv6 size 100k expire 60s store conn_cur
    tcp-request connection track-sc0 src,ipmask(32,64)
    tcp-request connection reject if {{ sc_conn_cur(0) gt {limits.connections_per_address} }}
"""


def write_errors(directory: Path) -> None:
    """Write the responses that HAProxy sends by itself, each to a file named like its status."""
    for line, body in _ERRORS.items():
        status, _, _ = line.partition(" ")
        retry = "Retry-After: 1\r\n" if status == "503" else ""
        response = (
            f"HTTP/1.1 {line}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-cache\r\nConnection: close\r\n"
            f"{retry}\r\n{body}"
        )
        (directory / f"{status}.http").write_text(response, newline="")


def _replicas_of(config: str) -> dict[str, str]:
    named = [(_BACKEND.match(section), section) for section in _SECTION.split(config)]
    return {name[1]: "".join(_REPLICA.findall(section)) for name, section in named if name}


def _with_replicas(section: str, config: str, replicas: Mapping[str, str]) -> str:
    """Return a section; a backend without replicas gets those that it had before.

    While Ray Serve rebuilds an application, or if that fails, it does not know which deployment is
    the ingress and sends everything through one proxy on the head node.
    """
    name = _BACKEND.match(section)
    if name is None:
        return section
    if _REPLICA.search(section):
        if not re.search(_INGRESS, config):
            raise CannotAmend("keep the replicas of an application that is rebuilt", _INGRESS)
        return section
    is_known = re.search(rf"{_INGRESS}{re.escape(name[1])} ", config)
    return section if is_known else section + replicas.get(name[1], "")


def main(binary: str, arguments: list[str]) -> None:
    """Amend the configuration that ``-f`` names, and become HAProxy.

    HAProxy then ends with the process that started it, which Ray may kill without notice.
    """
    file = Path(arguments[arguments.index("-f") + 1])
    write_errors(file.parent)
    known = file.with_name("before.cfg")
    before = known.read_text() if known.exists() else ""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # HAProxy raises its limit to it
    limits = ConnectionLimits.of_environment().within(most_files)
    try:
        config = amended(file.read_text(), file.parent, limits, before)
    except CannotAmend as error:
        sys.exit(f"marsray {error}")
    file.write_text(config)
    known.write_text(config)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])  # noqa: S606 - HAProxy itself, with Serve's arguments


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
