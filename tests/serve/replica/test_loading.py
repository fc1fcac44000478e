import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from mars_platform.errors import UserError
from mars_serve.config.served import with_dtype
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.execution import warm_up
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica import engine_main
from mars_serve.replica.loading import load_engine, within_memory

SIZES = EngineSettings(page_size=8, num_pages=64, max_num_seqs=4)


def settings_of(path, **more):
    return ModelSettings(name="mars", path=str(path), engine=SIZES, **more)


@pytest.fixture
def half_dir(mars_dir, tmp_path):
    """Return a checkpoint that says that it is stored in bfloat16."""
    path = shutil.copytree(mars_dir, tmp_path / "half")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "dtype": "bfloat16"})
    (path / "config.json").write_text(text, encoding="utf-8")
    return path


def test_a_model_is_loaded_in_its_own_number_type_unless_another_is_set(mars_dir, half_dir):
    assert load_engine(settings_of(mars_dir)).dtype == torch.float32
    assert load_engine(settings_of(half_dir)).dtype == torch.bfloat16
    assert load_engine(settings_of(half_dir, dtype="float32")).dtype == torch.float32


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return the path of a compiler that fails after two seconds, or once it may."""
    path = tmp_path / "compiler"
    path.write_text(
        f"#!/bin/sh\ntouch {path}.began\n"
        f"for i in $(seq 200); do [ -e {path}.may ] && exit 1; sleep .01; done\n"
        f"touch {path}.ended; exit 1\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    yield path
    path.with_suffix(".may").touch()


def test_an_error_of_a_checkpoint_does_not_wait_for_the_compiler(compiler, tmp_path):
    with pytest.raises(UserError, match="missing"):
        load_engine(settings_of(tmp_path / "missing"))
    assert not compiler.with_suffix(".ended").exists()


def test_nothing_is_compiled_for_steps_in_fixed_shapes(compiler, mars_dir):
    sizes = SIZES.model_copy(update={"batch_invariant": True})
    load_engine(settings_of(mars_dir).model_copy(update={"engine": sizes}))
    assert not compiler.with_suffix(".began").exists()


def test_a_link_is_not_followed_by_each_replica_for_itself(plain_dir, adapter_dir, tmp_path):
    for name, target in (("current", plain_dir), ("adapter", adapter_dir)):
        (tmp_path / name).symlink_to(target)
    for path, more in ((tmp_path / "current", {}), (plain_dir, {"adapter": f"{tmp_path}/adapter"})):
        with pytest.raises(UserError, match=r"^models: mars: \S+ is a link .* mount it there, too"):
            load_engine(settings_of(path, **more))


def test_an_adapter_gets_the_number_type_of_its_model(plain_dir, adapter_dir):
    engine = load_engine(settings_of(plain_dir, adapter=str(adapter_dir), dtype="bfloat16"))
    assert {weight.dtype for weight in engine._runner.model.parameters()} == {torch.bfloat16}
    assert engine.window == 4


def test_the_number_type_that_is_reported_is_the_resolved_one(half_dir):
    assert with_dtype(settings_of(half_dir)).dtype == "bfloat16"
    assert with_dtype(settings_of(half_dir, dtype="float16")).dtype == "float16"


@pytest.mark.parametrize(
    ("dtype", "is_slow", "compiler", "is_warned"),
    [
        ("bfloat16", True, "missing", True),
        ("bfloat16", True, "g++", False),
        ("bfloat16", False, "missing", False),
        ("float32", True, "missing", False),
    ],
)
def test_bfloat16_is_warned_of_where_it_is_slow(
    mars_dir, monkeypatch, caplog, dtype, is_slow, compiler, is_warned
):
    monkeypatch.setattr(engine_main, "is_bfloat16_slow", lambda: is_slow)
    monkeypatch.setenv("CXX", compiler)
    engine_main._warn_of_slow_bfloat16(load_engine(settings_of(mars_dir, dtype=dtype)))
    assert ("dtype: float32" in caplog.text) == is_warned


def test_what_masks_add_to_a_step_is_measured_of_an_adapter(
    mars_dir, plain_dir, adapter_dir, monkeypatch
):
    now_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now_s, thread_time=lambda: now_s)
    monkeypatch.setattr(warm_up, "time", clock)

    def times_of(settings):
        engine = load_engine(settings)
        run = engine._runner.run

        def timed(rows):
            nonlocal now_s
            now_s += 0.010 + 0.004 * any(row.num_masks for row in rows)
            return run(rows)

        engine._runner.run = timed
        return engine.warm_up()

    assert times_of(settings_of(mars_dir)).mask_s == 0
    adapted = settings_of(plain_dir).model_copy(update={"adapter": str(adapter_dir)})
    times = times_of(adapted)
    assert times.mask_s == pytest.approx(0.004)
    assert times.at(2, 0) == pytest.approx(0.010)
    assert times.at(2, 0, True) == pytest.approx(0.014)


def test_a_lack_of_memory_is_one_error_with_the_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 37 * 2**30)
    settings = ModelSettings(name="large", path="models/large", num_gpus=0.5)
    with pytest.raises(UserError) as caught, within_memory(settings):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
    for part in (
        "large",
        "0.5 of a GPU",
        "40.0 of its 80.0 GiB",
        "37.0 GiB",
        "3.0 GiB",
        "num_gpus",
    ):
        assert part in str(caught.value)
