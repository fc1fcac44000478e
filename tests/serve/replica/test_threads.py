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


@pytest.mark.parametrize(
    ("step_s", "threads", "expected"),
    [
        (0.024, Threads(1, 2), 1),
        (0.026, Threads(1, 2), 2),
        (0.026, Threads(15, 16), 15),
        (0.210, Threads(15, 16), 16),
    ],
)
def test_more_threads_are_used_if_they_can_save_much_of_a_step(
    step_s: float, threads: Threads, expected: int
) -> None:
    assert better_threads(lambda: 16 / step_s, threads) == expected


def test_a_disturbed_measurement_does_not_decide() -> None:
    speeds = iter([500, 1000, 300])  # tokens per second; the second is a step of 16 ms
    assert better_threads(lambda: next(speeds), Threads(1, 2)) == 1


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
