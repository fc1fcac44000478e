"""Checks that load torch or Ray, for a process of its own.

A library that is broken can end the process that loads it, or never return. Run as a program, this
module prints each finding as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from mars_serve.cli.doctor.finding import Finding, failed, guarded, ok, warning

_HEAD_DIM = 128
"""Size of a head if there is no checkpoint."""
_CONNECT_S = 1.0
_INSTALL_TORCH = "install a build of torch that fits this machine: https://pytorch.org/get-started"


def torch_findings(model: Path | None, adapter: Path | None = None) -> Iterator[Finding]:
    """Check torch, its threads and device, and how the engine would run the checkpoint."""
    try:
        import torch
    except Exception as error:  # a broken build raises many kinds of errors
        from mars_serve.cli.doctor.finding import described

        yield failed("torch", f"it cannot be imported: {described(error)}", _INSTALL_TORCH)
        return
    yield _build()
    yield _gpu()
    yield from guarded("threads", _threads)
    yield from guarded("attention", lambda: _attention(model))
    if model is not None:
        yield from guarded("model", lambda: _model(model))
        if adapter is not None:
            yield from guarded("adapter", lambda: _adapter(model, adapter))
        yield from guarded("frontier", lambda: _frontier(model, adapter))
    yield from guarded("number type", lambda: _number_type(model))
    del torch


def _build() -> Finding:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    mkldnn = "oneDNN" if torch._C._has_mkldnn else "no oneDNN"
    level = torch.backends.cpu.get_cpu_capability()
    return ok("torch", f"{torch.__version__}: {cuda}, {mkldnn}, {level}")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        free, total = (each / 2**30 for each in torch.cuda.mem_get_info())
        return ok("GPU", f"{', '.join(names)}; {free:.1f} of {total:.1f} GiB free on the first")
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return ok("GPU", "none; models run on the CPU")
    if torch.version.cuda is None:
        return warning("GPU", "there is one, but this torch is built without CUDA", _INSTALL_TORCH)
    return warning(
        "GPU",
        f"there is one, but torch cannot use it with CUDA {torch.version.cuda}",
        "update the driver, or install a build of torch for an older CUDA",
    )


def _threads() -> Iterator[Finding]:
    import torch

    num, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    quota = _quota()
    usable = cores if quota is None else min(cores, quota)
    found = f"torch uses {num} threads on {cores} cores"
    if quota is not None and quota < cores:
        found += f", of which the container may use {quota:g}"
    if num > usable:
        yield warning(
            "threads",
            f"{found}: the threads wait for each other",
            f"set OMP_NUM_THREADS={max(1, int(usable))}",
        )
    elif num < cores // 2:
        yield warning(
            "threads",
            f"{found}: most cores are idle",
            "unset OMP_NUM_THREADS; on a processor with two threads a core, half of them is right",
        )
    else:
        yield ok("threads", found)
    load = os.getloadavg()[0]
    if load > cores:
        yield warning(
            "other programs",
            f"{load:.1f} of them wanted a core at once in the last minute, and there are {cores}",
            "end some: a step waits for its slowest thread",
        )


def _quota() -> float | None:
    """Return the cores' worth of time that a container may use; None without a limit."""
    file = Path("/sys/fs/cgroup/cpu.max")
    if not file.is_file():
        return None
    quota, period = file.read_text(encoding="utf-8").split()
    return None if quota == "max" else int(quota) / int(period)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _attention(model: Path | None) -> Iterator[Finding]:
    """Ask the engine how it would read the pages of the checkpoint's keys and values."""
    import torch

    from mars_platform.checkpoint.number_type import stored_dtype
    from mars_serve.engine.attention.interface import KeyValueShape
    from mars_serve.engine.attention.selection import why_gathered
    from mars_serve.engine.settings import EngineSettings

    device, settings = torch.device(_device()), EngineSettings()
    dtype, head_dim = torch.float32 if device.type == "cpu" else torch.bfloat16, _HEAD_DIM
    if model is not None:
        from transformers import AutoConfig

        dtype = getattr(torch, stored_dtype(model))
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        head_dim = KeyValueShape.of(config).head_dim
    reason = why_gathered(settings, device, dtype, head_dim=head_dim)
    if reason is None:
        yield ok("attention", "a paged kernel reads the KV cache in place")
    elif device.type == "cpu":
        yield ok("attention", f"pages are gathered: {reason}")
    else:
        remedy = "serve in bfloat16 (dtype: bfloat16) on a GPU of compute capability 8.0 or more"
        yield warning("attention", f"pages are gathered, which is slower: {reason}", remedy)


def _model(path: Path) -> Iterator[Finding]:
    """Build the checkpoint's model without weights, and compare its tensors with the files'."""
    import torch
    from transformers import AutoModelForCausalLM

    from mars_platform.checkpoint.directory import read_checkpoint, refuse_unsupported
    from mars_platform.checkpoint.inspection import check_weights
    from mars_platform.errors import UserError
    from mars_serve.engine.attention.selection import refuse_unserved

    try:
        checkpoint = read_checkpoint(path)
        refuse_unsupported(checkpoint.config, path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(checkpoint.config, trust_remote_code=False)
        refuse_unserved(model)
        present = set().union(*check_weights(path).values())
    except UserError as error:
        found, _, remedy = str(error).removeprefix("model: ").rpartition("; ")
        yield failed("model", found or remedy, remedy if found else "use another checkpoint")
        return
    wanted = {name for name, _ in model.named_parameters()}  # a tied one once
    missing = sorted(wanted - present)
    if missing and len(missing) < len(wanted):  # else the family's names are others on disk
        yield failed(
            "model",
            f"the files lack {len(missing)} of {len(wanted)} tensors, such as {missing[0]}",
            "copy all of the checkpoint's files from one place",
        )
        return
    num = sum(each.numel() for each in model.parameters())
    yield ok("model", f"{type(model).__name__} can be served, {num / 1e6:,.1f}M weights")


def _adapter(model: Path, path: Path) -> Iterator[Finding]:
    """Read the adapter, and compare its weights' names and shapes with the checkpoint's layers."""
    from mars_platform.checkpoint.adapted import check_fit, read_model
    from mars_platform.errors import UserError

    try:
        adapted = read_model(model, path)
        check_fit(adapted)
    except UserError as error:
        found, _, remedy = str(error).removeprefix("adapter: ").rpartition("; ")
        yield failed("adapter", found, remedy)
        return
    assert adapted.adapter is not None
    settings, metadata = adapted.adapter.settings, adapted.adapter.metadata
    yield ok("adapter", f"rank {settings.rank}, block size {metadata.block_size}")


def _frontier(model: Path, adapter: Path | None) -> Iterator[Finding]:
    """Check what the autoscaler decides by, and whether it was measured on this hardware."""
    from mars_autoscale.model.frontier import FRONTIER_FILE, read_frontier
    from mars_platform.checkpoint.metadata import read_metadata
    from mars_platform.errors import UserError
    from mars_serve.config.hardware import hardware_name

    path = adapter or model
    command = f"marsray calibrate {model}{f' --adapter {adapter}' if adapter else ''} --data FILE"
    if not (path / FRONTIER_FILE).is_file():
        if adapter is not None or read_metadata(path) is not None:
            yield warning(
                "frontier",
                "there is none, so that the autoscaler never lowers τ",
                f"run {command} on the hardware that will serve it",
            )
        return
    try:
        frontier = read_frontier(path)
    except UserError as error:
        found, _, remedy = str(error).rpartition("; ")
        yield failed("frontier", found, remedy)
        return
    here = hardware_name(_device())
    found = (
        f"version {frontier.format_version}, {len(frontier.points)} settings in {frontier.dtype}"
    )
    if frontier.hardware == here:
        yield ok("frontier", f"{found}, measured on this hardware ({here})")
    else:
        yield warning(
            "frontier",
            f"{found}, measured on {frontier.hardware}, while this is {here}: the autoscaler goes "
            "by another machine's speed",
            f"run {command} here",
        )


def _number_type(model: Path | None) -> Iterator[Finding]:
    from mars_platform.checkpoint.number_type import is_bfloat16_slow, stored_dtype

    if _device() != "cpu" or not is_bfloat16_slow():
        yield ok("number type", "bfloat16 is as fast as float32 here, or faster")
    elif model is not None and stored_dtype(model) == "bfloat16":
        yield warning(
            "number type",
            "the weights are bfloat16, for which this processor has no instructions",
            "serve in float32 (dtype: float32), which takes twice the memory",
        )
    else:
        yield ok("number type", "float32 is much faster than bfloat16 on this processor")


def ray_findings(_model: Path | None, _adapter: Path | None = None) -> Iterator[Finding]:
    """Check that Ray and Ray Serve can be imported, and whether a cluster answers."""
    try:
        import ray
        from ray import serve
    except Exception as error:  # a broken installation raises many kinds of errors
        from mars_serve.cli.doctor.finding import described

        yield failed(
            "Ray",
            f"it cannot be imported: {described(error)}; marsray generate, eval and calibrate work "
            "without it, train and serve do not",
            "run pip install 'ray[data,serve,train]' in marsray's range",
        )
        return
    yield ok("Ray", f"{ray.__version__}, with Ray Serve")
    del serve
    yield from guarded("Ray cluster", _cluster)


def _cluster() -> Iterator[Finding]:
    from mars_platform.cluster.ray_private import running_cluster_address

    named = os.environ.get("RAY_ADDRESS")
    address = named or running_cluster_address()
    if not address or address == "local":
        yield ok("Ray cluster", "none runs here; commands start one of their own")
    elif address == "auto" or _answers(address):
        yield ok("Ray cluster", f"{address} answers")
    elif named:
        yield failed(
            "Ray cluster",
            f"RAY_ADDRESS is {named}, where nothing answers",
            "unset RAY_ADDRESS for a cluster of the command's own, or start that one",
        )
    else:
        yield ok("Ray cluster", f"the last one, {address}, has ended; commands start their own")


def _answers(address: str) -> bool:
    import socket

    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


GROUPS: dict[str, Callable[[Path | None, Path | None], Iterator[Finding]]] = {
    "torch": torch_findings,
    "Ray": ray_findings,
}
"""Checks of a process, by the library that it loads."""


def main(group: str, model: str = "", adapter: str = "") -> None:
    """Print the findings of one of `GROUPS` as lines of JSON; libraries print to standard error."""
    output, sys.stdout = sys.stdout, sys.stderr
    paths = [Path(path) if path else None for path in (model, adapter)]
    for finding in GROUPS[group](*paths):
        print(json.dumps(asdict(finding)), file=output, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
