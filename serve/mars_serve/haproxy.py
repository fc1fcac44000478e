"""Starts HAProxy in Ray Serve's place, with a configuration that is closed to the network.

Ray Serve writes the configuration and starts what RAY_SERVE_HAPROXY_BINARY_PATH names. Its own
configuration has a statistics page and a metrics port on all interfaces, and answers in plain text
where no replica does, and it does not notice each client that leaves. This program, run instead,
mends the file and then becomes HAProxy. It is run
for each reload, alone and without any package, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
_OWN_LISTENERS = ("frontend prometheus\n", "listen stats\n")
_NO_ROUTE = re.compile(r"^ +http-request return status 404 .*$", re.MULTILINE)
_SPLICE = re.compile(r"^ +option splice-request\n", re.MULTILINE)
"""With it a client that sent its body in a packet of its own and leaves before the answer is not
noticed (HAProxy 2.8), and the engine goes on for nobody."""
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


def mended(config: str, error_file: Path) -> str:
    """Ray Serve's configuration without listeners of its own, with errors as JSON, and with notice
    of each client that leaves.

    Args:
        config: what Ray Serve wrote.
        error_file: a whole HTTP answer, given where no replica can be reached.
    """
    sections = _SECTION.split(config)
    kept = "".join(each for each in sections if not each.startswith(_OWN_LISTENERS))
    kept = _SPLICE.sub("", kept)
    kept = _ERROR_FILE.sub(lambda found: f"{found[1]}{error_file}", kept)
    answer = (
        f"    http-request return status 503 content-type application/json "
        f"hdr Retry-After 1 string '{_BODY}'"
    )
    return _NO_ROUTE.sub(lambda _: answer, kept)


def main(binary: str, arguments: list[str]) -> None:
    """Mend the configuration that ``-f`` names, and become HAProxy.

    It then ends with the process that started it, which Ray may kill without a word.
    """
    file = Path(arguments[arguments.index("-f") + 1])
    error_file = file.with_name("503.http")
    error_file.write_text(_ANSWER, newline="")
    file.write_text(mended(file.read_text(), error_file))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])  # noqa: S606 - HAProxy itself, with Serve's arguments


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
