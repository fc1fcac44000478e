"""Step times are kept for the next start, and for nothing but the same engine's."""

import json
import logging
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from mars_serve.config.settings import ModelSettings
from mars_serve.engine.adaptive import step_timer
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica.loading import load_engine
from mars_serve.replica.step_time_cache import StepTimeCache, describe, warm_up

TIMES = StepTimes((1, 4), (0, 512), ((0.01, 0.02), (0.02, 0.03)), mask_s=0.004)


@pytest.fixture
def cache(tmp_path):
    return StepTimeCache(tmp_path / "step-times", {"weights": "a", "torch": "2"})


@pytest.fixture(autouse=True)
def _cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def settings_of(path, **engine):
    sizes = {"page_size": 8, "num_pages": 64, "max_num_seqs": 4, **engine}
    return ModelSettings(name="mars", path=str(path), engine=EngineSettings(**sizes))


def count_steps(engine):
    """Return a list that grows with every step that the engine runs from now on."""
    steps, run = [], engine._runner.run

    def counted(rows):
        steps.append(len(rows))
        return run(rows)

    engine._runner.run = counted
    return steps


def files_in(tmp_path):
    return list((tmp_path / "home" / "marsray" / "step-times").glob("*"))


def test_what_was_written_is_read(cache):
    assert cache.read() is None
    cache.write(TIMES)
    assert cache.read() == TIMES
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in cache.directory.iterdir()] == [cache.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: text.replace("0.03", "-0.03"),
        lambda text: text.replace("0.03", "NaN"),
        lambda text: text.replace("0.004", "-0.004"),
        lambda text: text.replace("[1,4]", "[4,1]"),
        lambda text: text.replace("[0,512]", "[0]"),
        lambda text: text.replace('"torch":"2"', '"torch":"3"'),
        lambda text: json.dumps({**json.loads(text), "format_version": 1}),
    ],
)
def test_a_damaged_or_foreign_file_is_logged_and_not_used(cache, caplog, damage):
    cache.write(TIMES)
    file = cache.directory / cache.name
    text = file.read_text(encoding="utf-8")
    assert damage(text) != text
    file.write_text(damage(text), encoding="utf-8")
    assert cache.read() is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    cache.write(TIMES)
    assert cache.read() == TIMES


def test_a_directory_that_others_can_write_to_is_not_used(cache, caplog):
    cache.write(TIMES)
    cache.directory.chmod(0o770)
    assert cache.read() is None
    cache.write(TIMES)
    assert len(caplog.records) == 2
    assert all("chmod 700" in record.getMessage() for record in caplog.records)


def test_a_cache_that_cannot_be_written_costs_a_line(tmp_path, caplog):
    (tmp_path / "file").touch()
    StepTimeCache(tmp_path / "file" / "inner", {}).write(TIMES)
    (record,) = caplog.records
    assert "not kept" in record.getMessage()


def test_the_second_start_runs_fewer_steps(mars_dir, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    ticks = partial(next, count(0.0, 0.001))  # each step takes as long, whatever the machine does
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=ticks, thread_time=ticks))
    settings = settings_of(mars_dir)
    first = load_engine(settings)
    num_first = count_steps(first)
    warm_up(settings, first)
    assert len(files_in(tmp_path)) == 1

    second = load_engine(settings)
    num_second = count_steps(second)
    warm_up(settings, second)
    assert 0 < len(num_second) < 0.6 * len(num_first)
    assert "step times of an earlier start hold" in caplog.text


def test_what_masks_add_to_a_step_is_measured_of_an_adapter_and_kept(
    mars_dir, plain_dir, adapter_dir, monkeypatch
):
    now_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now_s, thread_time=lambda: now_s)
    monkeypatch.setattr(step_timer, "time", clock)

    def warmed_up(settings):
        engine = load_engine(settings)
        run = engine._runner.run

        def timed(rows):
            nonlocal now_s
            now_s += 0.010 + 0.004 * any(row.num_masks for row in rows)
            return run(rows)

        engine._runner.run = timed
        return warm_up(settings, engine)

    assert warmed_up(settings_of(mars_dir)).mask_s == 0
    adapted = settings_of(plain_dir).model_copy(update={"adapter": str(adapter_dir)})
    for _ in range(2):  # the second start takes the first one's times
        times = warmed_up(adapted)
        assert times.mask_s == pytest.approx(0.004)
        assert times.at(2, 0) == pytest.approx(0.010)
        assert times.at(2, 0, True) == pytest.approx(0.014)


def test_no_file_is_kept_if_the_setting_says_so(mars_dir, tmp_path):
    settings = settings_of(mars_dir, cache_step_times=False)
    warm_up(settings, load_engine(settings))
    assert files_in(tmp_path) == []


def test_the_key_tells_engines_apart_by_what_changes_their_steps(mars_dir):
    def key(**engine):
        settings = settings_of(mars_dir, **engine)
        return describe(settings, load_engine(settings))

    assert key() == key(max_requests=7, step_timeout_s=3)
    assert key() != key(max_num_seqs=3)
    assert key() != key(num_pages=4)
    settings = settings_of(mars_dir).model_copy(update={"dtype": "bfloat16"})
    assert key() != describe(settings, load_engine(settings))
