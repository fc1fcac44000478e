import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mars_train.storage.shards import load_shards, save_shards
from stage_runs import run_group

WIDTHS = (5, 4, 1)  # rows; of a single row only the first process gets one


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 3, generator=generator),
        "vector": torch.randn(7, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "count": torch.tensor(2**53 + 1 + seed),
        "counts": torch.randint(-9, 9, (4,), generator=generator),
        "half": torch.randn(3, 2, generator=generator).bfloat16(),
        "cube": torch.randn(2, 3, 4, generator=generator),
        "view": torch.randn(6, 4, generator=generator).T[1:3],
    }


def save(directory, content, num_ranks):
    for rank in range(num_ranks):
        save_shards(directory, content, rank, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 11])
def test_tensors_survive_bit_for_bit(tmp_path, num_ranks):
    saved, targets = tensors(), tensors(seed=1)
    save(tmp_path, saved, num_ranks)
    assert len(list(tmp_path.iterdir())) == num_ranks
    load_shards(tmp_path, targets)
    for name, tensor in saved.items():
        assert targets[name].dtype == tensor.dtype
        assert torch.equal(targets[name], tensor), name


def test_a_whole_tensor_is_written_once(tmp_path):
    save(tmp_path, {"a": torch.zeros(10_000), "b": torch.zeros(10_000)}, 2)
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    assert all(40_000 < size < 41_000 for size in sizes)


def test_targets_are_filled_in_place_even_if_they_require_gradients(tmp_path):
    parameter = nn.Parameter(torch.zeros(3))
    save(tmp_path, {"a": torch.arange(3.0)}, 1)
    place = parameter.data_ptr()
    load_shards(tmp_path, {"a": parameter})
    assert parameter.tolist() == [0, 1, 2]
    assert parameter.data_ptr() == place


def test_a_target_missing_from_the_files_is_named(tmp_path):
    save(tmp_path, {"a": torch.zeros(3)}, 2)
    with pytest.raises(KeyError, match="missing"):
        load_shards(tmp_path, {"missing": torch.zeros(3)})


# --- sharded by FSDP2 -----------------------------------------------------------------------------


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, rows) for rows in WIDTHS))


def content(model):
    """Return parameters with an optimizer-like state: sharded moments and a whole scalar."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found |= {f"moment.{name}": torch.zeros_like(tensor) + 1 for name, tensor in found.items()}
    return found | {"step": torch.tensor(3.0)}


def sharded(seed):
    model = build_model(seed)
    size = torch.distributed.get_world_size()
    return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_sharded(directory):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = content(sharded(seed=0))
    found["moment.0.weight"].add_(found["0.weight"])
    save_shards(directory, found, rank, size)
    torch.distributed.barrier()


def load_sharded(directory):
    targets = content(sharded(seed=1))
    targets["step"].zero_()
    load_shards(directory, targets)
    return {name: whole(tensor).numpy() for name, tensor in targets.items()}


def expected():
    found = content(build_model(seed=0))
    found["moment.0.weight"].add_(found["0.weight"])
    return found


def assert_expected(loaded):
    assert loaded.keys() == expected().keys()
    for name, tensor in expected().items():
        assert torch.equal(torch.as_tensor(loaded[name]), tensor), name


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    run_group(save_sharded, 2, path)
    return path


def test_shards_are_read_by_another_number_of_processes(saved_by_two):
    for loaded in run_group(load_sharded, 3, saved_by_two):
        assert_expected(loaded)


def test_shards_are_read_into_whole_tensors(saved_by_two):
    targets = content(build_model(seed=1))
    load_shards(saved_by_two, targets)
    assert_expected(targets)


def test_every_process_writes_its_own_rows_only(saved_by_two):
    first, second = sorted(saved_by_two.iterdir())
    assert first.stat().st_size < 1.5 * second.stat().st_size
