"""Names of the hardware that this process runs on."""

import platform
from pathlib import Path

import torch


def hardware_name(device: str) -> str:
    """Return a device's name as ``frontier.json`` records it; a CPU's has the number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """Return the processor's model if the system reports it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
