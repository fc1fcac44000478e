"""What this process computes on, in words."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def hardware_name(device: str) -> str:
    """The device, as ``frontier.json`` has it.

    Args:
        device: ``cpu``, whose threads are named, too, or ``cuda``.
    """
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor: its model where the system says it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
