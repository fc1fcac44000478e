"""Checks that a cluster has the version of marsray that a job was submitted with.

A copy of this file is uploaded with every job and runs first, because an older marsray on the
cluster could not check itself. So it imports nothing of marsray. Imports no Ray, torch or HTTP
library.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def difference(submitted: str) -> str:
    """Return an error message if another version is installed here, else an empty string."""
    try:
        found = version("marsray")
    except PackageNotFoundError:
        return (
            "error: marsray is not installed on the cluster; use an image that has it, or submit "
            "with --ship-code"
        )
    if found == submitted:
        return ""
    return (
        f"error: the cluster has marsray {found}, but the job was submitted with {submitted}; "
        "install the same on both, or submit with --ship-code"
    )


if __name__ == "__main__":
    sys.exit(difference(sys.argv[1]) or 0)
