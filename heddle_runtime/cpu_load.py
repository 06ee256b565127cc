"""How busy other processes keep the CPUs of this machine, as Linux counts their time in `/proc`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_KINDS: Final = 8
"""Times of a CPU that add up: user, nice, system, idle, waiting for I/O, two of interrupts, and
taken by other machines on the same hardware. See proc_stat(5) of Linux."""
_IDLE: Final = (3, 4)


@dataclass(frozen=True, slots=True)
class CpuLoad:
    """CPUs of a machine over a time, and how many of them other processes kept busy on average."""

    cpus: int
    others: float

    @property
    def share(self) -> float:
        """Of all CPUs' time, what others took."""
        return self.others / self.cpus


class CpuMeter:
    """Measures from its making on.

    Not of others are this process and those that it started, as far as their parents live: those of
    an engine that was killed count as others' from then on.
    """

    def __init__(self, proc: Path = PROC) -> None:
        """`proc` is where Linux shows its processes."""
        self._proc = proc
        self._began = _reading(proc)

    def read(self) -> CpuLoad | None:
        """Return the load since the start; None where Linux does not show it, or without time."""
        now = _reading(self._proc)
        if now is None or self._began is None:
            return None
        cpus, all_ticks, busy_ticks, own_ticks = (
            now[0],
            *(end - begin for end, begin in zip(now[1:], self._began[1:], strict=True)),
        )
        if all_ticks <= 0:
            return None
        return CpuLoad(cpus, max(busy_ticks - own_ticks, 0) * cpus / all_ticks)


def _reading(proc: Path) -> tuple[int, int, int, int] | None:
    """CPUs, and ticks: of all CPUs, those not idle, and those of this process and its tree."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        times = [int(field) for field in lines[0].split()[1 : 1 + _KINDS]]
        cpus = sum(line.startswith("cpu") for line in lines) - 1
        if len(times) < _KINDS or cpus < 1:
            return None
        busy = sum(times) - sum(times[at] for at in _IDLE)
        return cpus, sum(times), busy, _own_ticks(proc)
    except (OSError, ValueError, IndexError):
        return None


def _own_ticks(proc: Path) -> int:
    """Ticks of this process and of all that descend from it, dead ones included once waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name, which may have any characters: state, parent, and so on.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])
        except (OSError, ValueError, IndexError):
            continue  # gone meanwhile
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    total, rest = 0, [os.getpid()]
    while rest:
        process = rest.pop()
        total += ticks.get(process, 0)
        rest += children.get(process, ())
    return total
