"""Run by ``torch.distributed.run``: the objective under FSDP2 against the whole one."""

import itertools
import os
import sys

import torch
import torch.distributed
from test_objective import VOCABULARY, build_batch, build_model, checkpoint_layers, gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import mars_train.method.objective as objective_module
from mars_train.method.objective import Objective


def compare(reshard, checkpointing):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = [build_batch(seed=seed) for seed in range(size)]
    whole = Objective(build_model(), masked=True)
    expected = [gradients(whole, batch) for batch in batches]
    objective = Objective(build_model().train(), masked=True)
    if checkpointing:
        checkpoint_layers(objective.model)
    mesh = init_device_mesh("cpu", (size,))
    for layer in objective.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh, reshard_after_forward=reshard)
    register_fsdp_forward_method(objective, "label_losses")
    with torch.no_grad():
        clean, _ = objective.label_losses(batches[rank])
        torch.testing.assert_close(clean.sum(), whole(batches[rank]).clean)
    loss, ours = gradients(objective, batches[rank])
    torch.testing.assert_close(loss, expected[rank][0])
    for name, gradient in ours.items():
        mean = sum(part[name] for _, part in expected) / size
        full = gradient.full_tensor()
        assert mean.any(), name
        torch.testing.assert_close(full, mean, rtol=1e-4, atol=2e-5 * float(mean.abs().max()))
    if rank == 0:
        print("equal")  # noqa: T201 - counted by the test


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    objective_module.MAX_LOGITS = 10 * VOCABULARY
    for setting in itertools.product([None, True], [False, True]):
        compare(*setting)
    torch.distributed.destroy_process_group()
    # A thread of gloo's may still have to drop a Python object, and aborts the process if it does
    # so while the interpreter shuts down (seen with torch 2.13).
    sys.stdout.flush()
    os._exit(0)
