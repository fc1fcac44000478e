from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mars_serve.config.settings import ModelSettings
from mars_serve.deploy.app import _default_threads
from mars_serve.replica.engine_process import Threads
from mars_serve.replica.threads import better_threads


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("gain", "expected"), [(0.6, 3), (1.05, 3), (1.15, 4)])
def test_more_threads_are_used_if_steps_are_clearly_faster(gain: float, expected: int) -> None:
    speeds = {3: 100.0, 4: 100.0 * gain}
    chosen = better_threads(lambda: speeds[torch.get_num_threads()], Threads(3, 4))
    assert chosen == expected


def test_a_disturbed_measurement_does_not_decide() -> None:
    speeds = iter([100, 60, 20, 150, 90, 70])  # with 3 and 4 threads in turn
    assert better_threads(lambda: next(speeds), Threads(3, 4)) == 4


@pytest.mark.parametrize(
    ("num_cores", "num_replicas", "expected"),
    [
        (1, 1, Threads(1, 1)),
        (2, 1, Threads(1, 2)),
        (2, 3, Threads(1, 1)),
        (16, 1, Threads(15, 16)),
        (16, 4, Threads(3, 4)),
    ],
)
def test_replicas_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_replicas: int, expected: Threads
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    model = ModelSettings(name="m", path="p", num_replicas=num_replicas)
    assert _default_threads([model]) == expected
