"""Starts HAProxy in Ray Serve's place, with a configuration that is closed to the network.

Ray Serve writes the configuration and starts what RAY_SERVE_HAPROXY_BINARY_PATH names. Its own
configuration has a statistics page and a metrics port on all interfaces, answers in plain text
where no replica does, and notices neither each client that leaves nor a host that is lost. While an
application is updated, it does without replicas that serve on, and can lose a request. This
program, run instead, mends the file and then becomes HAProxy. It is run for each reload, alone and
without any package, so it imports the standard library only.
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
_NO_ROUTE = re.compile(r"^ +http-request return status 404 .*$", re.MULTILINE)
_SPLICE = re.compile(r"^ +option splice-request\n", re.MULTILINE)
"""With it a client that sent its body in a packet of its own and leaves before the answer is not
noticed (HAProxy 2.8), and the engine goes on for nobody."""
_LOST = """\
    option srvtcpka
    srvtcpka-idle 4s
    srvtcpka-intvl 3s
    srvtcpka-cnt 3
"""
"""Ends connections on which a host is waited for that has lost its power, and so closes none."""
_SERVER = re.compile(r"^( +server \S+ \S+ check)\b(?! tcp-ut)", re.MULTILINE)
_ON_ITS_WAY = " tcp-ut 10s"
"""Ends those on which such a host has been sent something. HAProxy does not take it from the
section of defaults."""
_RETRY = re.compile(r"^ +retry-on conn-failure$", re.MULTILINE)
"""Alone it covers neither an idle connection that a replica, as it ends, closes while a request is
sent on it, nor a request that a lost host has and will not answer."""
_RETRY_MORE = r"\g<0> empty-response\n    option http-buffer-request"
"""What has been sent before all of a request was there is not sent again."""
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
"""In OpenAI's shape."""
_ANSWER = f"""HTTP/1.1 503 Service Unavailable\r
Content-Type: application/json\r
Content-Length: {len(_BODY)}\r
Cache-Control: no-cache\r
Connection: close\r
Retry-After: 1\r
\r
{_BODY}"""


def mended(config: str, error_file: Path, before: str = "") -> str:
    """Ray Serve's configuration without listeners of its own, with errors as JSON, with notice of
    each client that leaves and of each host that is lost, and with all replicas that serve.

    Args:
        config: what Ray Serve wrote.
        error_file: a whole HTTP answer, given where no replica can be reached.
        before: what this returned for the configuration before.
    """
    sections = _SECTION.split(config)
    replicas = _replicas_of(before)
    kept = "".join(
        f"{each}{_LOST}"
        if each.startswith("defaults\n")
        else _with_replicas(each, config, replicas)
        for each in sections
        if not each.startswith(_OWN_LISTENERS)
    )
    kept = _SERVER.sub(rf"\1{_ON_ITS_WAY}", kept)
    kept = _SPLICE.sub("", kept)
    kept = _RETRY.sub(_RETRY_MORE, kept)
    kept = _ERROR_FILE.sub(lambda found: f"{found[1]}{error_file}", kept)
    answer = (
        f"    http-request return status 503 content-type application/json "
        f"hdr Retry-After 1 string '{_BODY}'"
    )
    return _NO_ROUTE.sub(lambda _: answer, kept)


def _replicas_of(config: str) -> dict[str, str]:
    """The lines of each backend's replicas."""
    named = [(_BACKEND.match(section), section) for section in _SECTION.split(config)]
    return {name[1]: "".join(_REPLICA.findall(section)) for name, section in named if name}


def _with_replicas(section: str, config: str, replicas: Mapping[str, str]) -> str:
    """A section; if it is the backend of an application that Ray Serve builds anew, or could not
    build anew, with the replicas that it had before.

    Ray Serve then does not know which of the application's deployments is the ingress, and sends
    everything through one proxy of the head's until it does.
    """
    name = _BACKEND.match(section)
    if name is None or _REPLICA.search(section):
        return section
    ingress = rf"set-var-fmt\(txn\.serve_deployment\) .* if is_{re.escape(name[1])} "
    return section if re.search(ingress, config) else section + replicas.get(name[1], "")


def main(binary: str, arguments: list[str]) -> None:
    """Mend the configuration that ``-f`` names, and become HAProxy.

    It then ends with the process that started it, which Ray may kill without a word.
    """
    file = Path(arguments[arguments.index("-f") + 1])
    error_file = file.with_name("503.http")
    error_file.write_text(_ANSWER, newline="")
    known = file.with_name("before.cfg")
    before = known.read_text() if known.exists() else ""
    config = mended(file.read_text(), error_file, before)
    file.write_text(config)
    known.write_text(config)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])  # noqa: S606 - HAProxy itself, with Serve's arguments


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
