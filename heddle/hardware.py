"""The machine that a measurement or a run on engines is made on."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine, as far as the system reports them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": cores,
        "memory": _line("/proc/meminfo", "MemTotal") or "unknown",
        "gpus": gpus(),
    }
    return found


def _line(path: str, name: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    values = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)]
    return values[0] if values else ""


def gpus() -> list[str]:
    """Name, driver and memory of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]
