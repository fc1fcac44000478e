"""Runs HAProxy for Ray Serve with an amended configuration.

Ray Serve writes a configuration and starts the program in RAY_SERVE_HAPROXY_BINARY_PATH. That
configuration opens a statistics page and a metrics port on all interfaces, answers in plain text if
no replica is available, and misses some disconnected clients and all lost hosts. During an update
of an application it drops replicas that still serve, and can lose a request. This program, started
instead of HAProxy, amends the file and then becomes HAProxy.

It runs again for every reload, in an interpreter without installed packages, and therefore uses the
standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
_OWN_LISTENERS = ("frontend prometheus\n", "listen stats\n")
_NOT_FOUND = re.compile(r"^ +http-request return status 404 .*$", re.MULTILINE)
_SPLICE = re.compile(r"^ +option splice-request\n", re.MULTILINE)
"""Option under which HAProxy 2.8 does not notice a client that sent its body in a separate packet
and then disconnects, so that the engine would work for nobody."""
_KEEPALIVE = """\
    option srvtcpka
    srvtcpka-idle 4s
    srvtcpka-intvl 3s
    srvtcpka-cnt 3
"""
"""Options that close connections on which a host that lost power is waited for."""
_SERVER = re.compile(r"^( +server \S+ \S+ check)\b(?! tcp-ut)", re.MULTILINE)
_SEND_TIMEOUT = " tcp-ut 10s"
"""Server option that closes connections on which data was sent to such a host. HAProxy does not
inherit it from the section of defaults."""
_RETRY = re.compile(r"^ +retry-on conn-failure$", re.MULTILINE)
"""Ray Serve's retry rule. Alone it covers neither an idle connection that a stopping replica closes
while a request is sent on it, nor a request that a lost host does not answer."""
_MORE_RETRIES = r"\g<0> empty-response\n    option http-buffer-request"
"""Retry rule with these cases. HAProxy retries only requests that it has received in full."""
_BACKEND = re.compile(r"backend (\S+)")
_REPLICA = re.compile(r"^ +server (?!.* backup$).*\n", re.MULTILINE)
_ERROR_FILE = re.compile(r"^( +errorfile 50[234] ).*$", re.MULTILINE)

_ERROR = {
    "message": "no replica is ready; try again later",
    "type": "server_error",
    "param": None,
    "code": "not_ready",
}
_BODY = json.dumps({"error": _ERROR})
"""Error body in OpenAI's shape."""
_RESPONSE = f"""HTTP/1.1 503 Service Unavailable\r
Content-Type: application/json\r
Content-Length: {len(_BODY)}\r
Cache-Control: no-cache\r
Connection: close\r
Retry-After: 1\r
\r
{_BODY}"""


def amended(config: str, error_file: Path, before: str = "") -> str:
    """Return Ray Serve's configuration with marsray's amendments.

    It opens no listeners of its own, reports errors as JSON, notices each disconnected client and
    lost host, and includes all replicas that serve.

    Args:
        config: The configuration that Ray Serve wrote.
        error_file: File with a whole HTTP response, sent if no replica can be reached.
        before: The previous return value of this function.
    """
    sections = _SECTION.split(config)
    replicas = _replicas_of(before)
    kept = "".join(
        f"{each}{_KEEPALIVE}"
        if each.startswith("defaults\n")
        else _with_replicas(each, config, replicas)
        for each in sections
        if not each.startswith(_OWN_LISTENERS)
    )
    kept = _SERVER.sub(rf"\1{_SEND_TIMEOUT}", kept)
    kept = _SPLICE.sub("", kept)
    kept = _RETRY.sub(_MORE_RETRIES, kept)
    kept = _ERROR_FILE.sub(lambda found: f"{found[1]}{error_file}", kept)
    answer = (
        f"    http-request return status 503 content-type application/json "
        f"hdr Retry-After 1 string '{_BODY}'"
    )
    return _NOT_FOUND.sub(lambda _: answer, kept)


def _replicas_of(config: str) -> dict[str, str]:
    """Return the lines that name each backend's replicas."""
    named = [(_BACKEND.match(section), section) for section in _SECTION.split(config)]
    return {name[1]: "".join(_REPLICA.findall(section)) for name, section in named if name}


def _with_replicas(section: str, config: str, replicas: Mapping[str, str]) -> str:
    """Return a section; a backend without replicas gets those that it had before.

    While Ray Serve rebuilds an application, or if that fails, it does not know which deployment is
    the ingress and sends everything through one proxy on the head node.
    """
    name = _BACKEND.match(section)
    if name is None or _REPLICA.search(section):
        return section
    ingress = rf"set-var-fmt\(txn\.serve_deployment\) .* if is_{re.escape(name[1])} "
    return section if re.search(ingress, config) else section + replicas.get(name[1], "")


def main(binary: str, arguments: list[str]) -> None:
    """Amend the configuration that ``-f`` names, and become HAProxy.

    HAProxy then ends with the process that started it, which Ray may kill without notice.
    """
    file = Path(arguments[arguments.index("-f") + 1])
    error_file = file.with_name("503.http")
    error_file.write_text(_RESPONSE, newline="")
    known = file.with_name("before.cfg")
    before = known.read_text() if known.exists() else ""
    config = amended(file.read_text(), error_file, before)
    file.write_text(config)
    known.write_text(config)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])  # noqa: S606 - HAProxy itself, with Serve's arguments


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
