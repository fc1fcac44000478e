"""Checks that load torch or start Ray, for a process of its own.

A library that is broken can end the process that loads it, or never return. Run as a program, this
module prints each finding as a line of JSON.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.errors import UserError
from mars_serve.cli.doctor.finding import Finding, guarded

if TYPE_CHECKING:  # importing it loads torch
    from mars_serve.engine.attention.interface import LayerGroup

_CONNECT_S = 1.0
_INSTALL_TORCH = "install a build of torch that fits this machine: https://pytorch.org/get-started"
_INSTALL_RAY = "run pip install 'ray[data,serve,train]' in marsray's range"
_COPY = "copy all of the checkpoint's files from one place"


def torch_findings(model: Path | None, adapter: Path | None = None) -> Iterator[Finding]:
    """Check torch and its GPU, and how the engine would serve the checkpoint."""
    found = list(guarded("torch", _torch, _INSTALL_TORCH))
    yield from found
    if model is None or found[-1].state == "failed":
        return
    yield from guarded("checkpoint", partial(_checkpoint, model), _COPY)
    if adapter is not None:
        yield from guarded("adapter", partial(_adapter, model, adapter), _COPY)
    with_adapter = f" --adapter {adapter}" if adapter else ""
    remedy = f"run marsray calibrate {model}{with_adapter} --data FILE"
    yield from guarded("frontier", partial(_frontier, model, adapter, remedy), remedy)


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    level = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}: {cuda}, {level}")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        free, total = (each / 2**30 for each in torch.cuda.mem_get_info())
        found = f"{', '.join(names)}; {free:.1f} of {total:.1f} GiB free on the first"
        yield Finding("GPU", "ok", found)
    elif not list(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("GPU", "ok", "none; models run on the CPU")
    else:
        found = f"there is one, but this torch cannot use it ({cuda})"
        yield Finding("GPU", "warning", found, f"update the driver, or {_INSTALL_TORCH}")


def _checkpoint(path: Path) -> Iterator[Finding]:
    """Load the checkpoint's model by the headers of its files, and say how it is served."""
    import torch

    from mars_platform.checkpoint.adapted import check_fit
    from mars_platform.checkpoint.directory import read_checkpoint
    from mars_platform.checkpoint.inspection import check_chat_template
    from mars_platform.checkpoint.number_type import stored_dtype
    from mars_platform.checkpoint.weights import load_model
    from mars_platform.mixing.latent import absorb
    from mars_platform.mixing.probe import record
    from mars_serve.cli.doctor import layers
    from mars_serve.engine.attention.interface import group_layers

    checkpoint = read_checkpoint(path)
    # Products of experts have no float32 form without numbers.
    model = load_model(path, dtype=torch.bfloat16, headers_only=True)
    num = sum(each.numel() for each in model.parameters())
    recorded = record(model, torch.ones(1, 4, dtype=torch.long, device="meta"))
    specs = absorb(model, recorded.attention)
    mars, dtype = checkpoint.metadata, stored_dtype(path)
    yield from layers.findings(specs, checkpoint.max_length, getattr(torch, dtype))
    block_size = mars.block_size if mars is not None else 0
    yield from layers.states(recorded, block_size, getattr(torch, dtype))
    check_fit(checkpoint)
    kind = _masks(mars) if mars else "plain AR"
    found = f"{type(model).__name__}, {num / 1e6:,.1f}M weights in {dtype}, {kind}"
    yield Finding("checkpoint", "ok", found)
    yield _path_served(dtype, group_layers(specs)[0])
    yield layers.works(model, has_masks=mars is not None)
    try:
        check_chat_template(path)
    except UserError as error:
        found = str(error).rpartition("; ")[0]
        remedy = "add the model's as chat_template.jinja, or ask /v1/completions only"
        yield Finding("chat template", "warning", found, remedy)


def _path_served(dtype: str, groups: Sequence["LayerGroup"]) -> Finding:
    """Say where and how the engine would run a model of this number type and layers."""
    import torch

    from mars_platform.checkpoint.number_type import is_bfloat16_slow
    from mars_serve.engine.attention.selection import why_gathered
    from mars_serve.engine.kernels.native import why_not_native
    from mars_serve.engine.settings import EngineSettings

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_gathered(EngineSettings(), device, getattr(torch, dtype), groups)
    if device.type == "cuda":
        if reason is None:
            return Finding("served", "ok", "on the GPU; a paged kernel reads the KV cache in place")
        found = f"on the GPU; pages of the KV cache are gathered, which is slower: {reason}"
        remedy = "serve in bfloat16 (dtype: bfloat16) on a GPU of compute capability 8.0 or more"
        return Finding("served", "warning", found, remedy)
    found = f"on the CPU; pages of the KV cache are gathered: {reason}"
    if reason is None:
        found = "on the CPU; functions of C++ read the KV cache in place"
    missing = why_not_native(device, getattr(torch, dtype))
    if missing is None:
        return Finding("served", "ok", found)
    if missing != reason:
        found += f"; {missing}"
    remedy = "install g++ or let CXX name one that works, and serve in bfloat16 or float32"
    if dtype == "bfloat16" and is_bfloat16_slow():
        found += "; the weights are bfloat16, for which this processor has no instructions"
        remedy = (
            "install g++ or let CXX name one that works, or serve in float32 (dtype: float32), "
            "which takes twice the memory"
        )
    return Finding("served", "warning", found, remedy)


def _adapter(model: Path, path: Path) -> Iterator[Finding]:
    """Read the adapter, and compare its weights' names and shapes with the checkpoint's layers."""
    from mars_platform.checkpoint.adapted import check_fit, read_model

    adapted = read_model(model, path)
    check_fit(adapted)
    assert adapted.adapter is not None
    settings, metadata = adapted.adapter.settings, adapted.adapter.metadata
    yield Finding("adapter", "ok", f"rank {settings.rank}, {_masks(metadata)}")


def _masks(metadata: MarsMetadata) -> str:
    head = metadata.draft_head
    beside = "" if head is None else f", {head.kind} draft head of rank {head.rank}"
    return f"block size {metadata.block_size}{beside}"


def _frontier(model: Path, adapter: Path | None, remedy: str) -> Iterator[Finding]:
    """Check what the autoscaler decides by, and whether it was measured on this hardware."""
    import torch

    from mars_autoscale.model.frontier import FRONTIER_FILE, read_frontier
    from mars_platform.checkpoint.metadata import read_metadata
    from mars_serve.config.hardware import hardware_name

    path = adapter or model
    if not (path / FRONTIER_FILE).is_file():
        if adapter is not None or read_metadata(path) is not None:
            found = "there is none, so that the autoscaler never lowers τ"
            yield Finding("frontier", "warning", found, f"{remedy}, on the machine that serves")
        return
    frontier = read_frontier(path)
    here = hardware_name("cuda" if torch.cuda.is_available() else "cpu")
    found = f"{len(frontier.points)} settings in {frontier.dtype}, measured on"
    if frontier.hardware == here:
        yield Finding("frontier", "ok", f"{found} this hardware ({here})")
    else:
        found += f" {frontier.hardware}, while this is {here}: the autoscaler goes by its speed"
        yield Finding("frontier", "warning", found, remedy)


def ray_findings() -> Iterator[Finding]:
    """Check that Ray and Ray Serve can be imported, and that a cluster starts or answers."""
    yield from guarded("Ray", _ray, _INSTALL_RAY)


def _ray() -> Iterator[Finding]:
    import ray
    from ray import serve  # noqa: F401 - tells whether it can be imported

    from mars_platform.cluster.session import ray_session
    from mars_platform.cluster.settings import ClusterSettings

    address, began_s = os.environ.get("RAY_ADDRESS", "local"), time.monotonic()
    if ":" in address and not _answers(address):  # Ray would wait for minutes
        raise UserError(
            f"RAY_ADDRESS is {address}, where nothing answers; unset it for a cluster of the "
            "command's own, or start that one"
        )
    with ray_session(ClusterSettings(), min_cpus=1):
        took_s = time.monotonic() - began_s
        how = "a cluster starts" if address == "local" else f"the cluster at {address} answers"
        yield Finding("Ray", "ok", f"{ray.__version__}; {how} within {took_s:.1f} s")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def main(group: str, model: str = "", adapter: str = "") -> None:
    """Print the findings of ``torch`` or ``Ray`` as lines of JSON.

    What the libraries print goes to standard error.
    """
    output, sys.stdout = sys.stdout, sys.stderr
    paths = [Path(path) if path else None for path in (model, adapter)]
    for finding in ray_findings() if group == "Ray" else torch_findings(*paths):
        print(json.dumps(asdict(finding)), file=output, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
