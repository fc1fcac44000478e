from __future__ import annotations

import pytest

from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.replica.engine_main import threads_for
from mars_serve.replica.engine_process import EngineStart


@pytest.mark.parametrize(
    ("num_cores", "num_replicas", "expected"),
    [(1, 1, 1), (2, 1, 2), (2, 3, 1), (16, 1, 16), (16, 4, 4)],
)
def test_replicas_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_replicas: int, expected: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    model = ModelSettings(name="m", path="p", num_replicas=num_replicas)
    assert ServeSettings(models=[model]).share_of_cores == expected


@pytest.mark.parametrize(
    ("num_threads", "share", "num_parameters", "expected"),
    [
        (None, 2, 400_000, 1),
        (None, 2, 100_000_000, 2),
        (None, 1, 400_000, 1),
        (None, 16, 12_000_000, 15),
        (3, 16, 400_000, 3),
        (3, 2, 100_000_000, 3),
    ],
)
def test_a_small_model_leaves_a_core_to_http_unless_a_number_is_set(
    num_threads: int | None, share: int, num_parameters: int, expected: int
) -> None:
    settings = ModelSettings(name="m", path="p", num_threads=num_threads)
    assert threads_for(EngineStart(settings, share, "127.0.0.1"), num_parameters) == expected
