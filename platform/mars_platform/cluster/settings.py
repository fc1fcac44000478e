"""Settings that name a Ray cluster.

Imports no Ray.
"""

from pydantic import Field

from mars_platform.config import Settings


class ClusterSettings(Settings):
    """The Ray cluster that a command runs on."""

    address: str | None = None
    """Address of an existing cluster, or ``auto``; by default RAY_ADDRESS, else a local one."""
    object_store_mib: int = Field(default=256, ge=80)
    """Shared memory of a local cluster's object store, in MiB."""
    autoscales: bool = False
    """Whether the cluster adds nodes on demand, which lets a run need more than it has now."""
