import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mars_train.stage.parallel import Workers, whole_weights
from stage_runs import run_group

WAYS = [(1, "fsdp2"), (2, "ddp"), (3, "fsdp2")]


class Layer(nn.Linear):
    """A layer that FSDP2 shards as a unit."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(4, 4), Layer(4, 4)])
        self.head = nn.Linear(4, 5)

    def forward(self, values):
        for layer in self.layers:
            values = layer(values).tanh()
        return self.head(values)


def build_model():
    torch.manual_seed(0)
    return Model()


def inputs(rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def plain_gradients(ranks):
    """Return the gradients averaged over ranks."""
    model = build_model()
    for rank in ranks:
        (model(inputs(rank)).square().sum() / len(ranks)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole_gradients(model):
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy().copy()
        for name, p in model.named_parameters()
    }


def use(strategy, precision="no"):
    """Exercise a worker's methods and return the results."""
    workers = Workers(strategy, use_gpu=False, precision=precision)
    rank = workers.rank
    plain = build_model()
    wrapped = workers.wrap(plain, ["Layer"])
    found = {
        "sum": workers.sum(2.0**53 + rank, 0.1, float("nan") if rank else 1.0),
        "sharded": [name for name, m in plain.named_modules() if isinstance(m, FSDPModule)],
        "weights": {k: v.numpy().copy() for k, v in whole_weights(plain).items()},
    }
    with workers.gradient_exchange(wrapped, last=False):
        torch.autograd.backward(wrapped(inputs(rank)).square().sum())
    found["before the last"] = whole_gradients(plain)
    with workers.gradient_exchange(wrapped, last=True):
        torch.autograd.backward(wrapped(inputs(rank)).square().sum())
    found["after the last"] = whole_gradients(plain)
    found["norms"] = [workers.clip_gradients(wrapped, limit) for limit in (1e9, 0.5, 1e9)]
    with workers.autocast():
        found["output"] = wrapped(inputs(rank)).dtype
        found["matmul"] = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    return found


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def found(request):
    num_workers, strategy = request.param
    return strategy, run_group(use, num_workers, strategy)


def test_sums_are_exact_and_the_same_on_every_worker(found):
    _, each = found
    size = len(each)
    for one in each:
        whole, tenths, last = one["sum"]
        assert whole == sum(2.0**53 + rank for rank in range(size))
        assert tenths == pytest.approx(0.1 * size, rel=1e-15)
        assert np.isnan(last) == (size > 1)


def test_layers_are_sharded_as_units_by_fsdp2_alone(found):
    strategy, each = found
    sharded = strategy == "fsdp2" and len(each) > 1
    expected = ["", "layers.0", "layers.1"] if sharded else []
    assert all(one["sharded"] == expected for one in each)


def test_weights_are_whole_on_every_worker(found):
    _, each = found
    for one in each:
        for name, parameter in build_model().named_parameters():
            np.testing.assert_array_equal(one["weights"][name], parameter.detach().numpy())


def test_gradients_are_averaged_in_the_last_micro_batch(found):
    strategy, each = found
    mean = plain_gradients(range(len(each)))
    for rank, one in enumerate(each):
        own = mean if strategy == "fsdp2" else plain_gradients([rank])
        for name, gradient in mean.items():
            np.testing.assert_allclose(one["before the last"][name], own[name], atol=1e-5)
            np.testing.assert_allclose(one["after the last"][name], 2 * gradient, atol=1e-5)


def test_clipping_returns_the_norm_of_the_whole_gradient_before(found):
    _, each = found
    gradients = plain_gradients(range(len(each))).values()
    norm = 2 * float(torch.nn.utils.get_total_norm(list(gradients)))
    for one in each:
        assert one["norms"] == pytest.approx([norm, norm, 0.5], rel=1e-4)
        assert one["norms"] == each[0]["norms"]


def test_precision_no_computes_in_float32(found):
    _, each = found
    assert {(one["output"], one["matmul"]) for one in each} == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_bf16_computes_in_bf16_and_keeps_weights_and_gradients_in_float32(strategy):
    for one in run_group(use, 2, strategy, "bf16"):
        assert one["matmul"] == torch.bfloat16
        mean = plain_gradients(range(2))
        for name, gradient in one["after the last"].items():
            assert gradient.dtype == one["weights"][name].dtype == np.float32
            expected = 2 * mean[name].numpy()
            assert not np.array_equal(gradient, expected)
            np.testing.assert_allclose(gradient, expected, atol=0.05 * np.abs(expected).max())


def outlast_the_limit(meeting):
    """Wait for a worker that writes for longer than the group's time limit."""
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    distributed.init_process_group(
        *("gloo", f"file://{meeting}"), timedelta(seconds=1), rank=rank, world_size=2
    )
    workers = Workers("ddp", use_gpu=False, precision="no")
    if rank == 0:
        time.sleep(2)
    return workers.gather(rank)


def test_long_work_of_one_worker_outlasts_the_process_groups_time_limit(tmp_path):
    assert run_group(outlast_the_limit, 2, tmp_path / "meeting") == [[0, 1], [0, 1]]
