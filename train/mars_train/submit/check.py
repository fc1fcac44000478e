"""Whether a cluster has the marsray that a job was submitted with.

A copy is uploaded with every job and run there before it, as an older marsray on the cluster could
not check itself. So this file imports nothing of marsray.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def difference(submitted: str) -> str:
    """What is wrong with the version that is installed here; empty if nothing is."""
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
