"""One Ray cluster for all runs of this folder, which saves a start for each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package", autouse=True)
def address() -> Iterator[str]:
    """Start a Ray cluster that runs in this process use, and that commands can join.

    Yields:
        The cluster's address.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as short,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Ray Train takes the workers' reports at this interval; they save faster than its default.
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        context = ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=short,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()
