"""Writes which tests `make test` leaves out, from the seconds that each takes.

    make compiled && python -m tests.slow

Functions go in order of their cost, the dearest first, until the rest costs `LEFT_S`. Half a second
and less a case is never slow: what is left out is little time for many checks.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SLOW

LEFT_S = 330.0
"""What `make test` costs at most, in seconds of one core."""
CASE_S = 0.5
"""A function whose dearest case costs less stays."""
FOLDER = "HEDDLE_TEST_SECONDS"
"""The environment variable with the folder that processes of tests write into."""
ALL = ("-n", "4", "--dist", "loadgroup", "-m", "not real_engines and not soak")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write a line for a test: the two costs of it, and its name."""
    used, wall_s = os.times(), time.perf_counter()
    outcome = yield
    cpu_s = sum(os.times()[:4]) - sum(used[:4])
    with (Path(os.environ[FOLDER]) / str(os.getpid())).open("a", encoding="utf-8") as file:
        file.write(f"{cpu_s:.3f} {time.perf_counter() - wall_s:.3f} {item.nodeid}\n")
    return outcome


def slow_functions(lines: list[str]) -> list[str]:
    """Return the functions that are left out, in order of their names.

    A test costs its CPU time, or half of its time where it waits: two run on a core.
    """
    total: dict[str, float] = defaultdict(float)
    dearest: dict[str, float] = defaultdict(float)
    for line in lines:
        cpu_s, wall_s, test = line.split(" ", 2)
        cost_s = max(float(cpu_s), float(wall_s) / 2)
        name = test.partition("[")[0].partition("@")[0]
        total[name] += cost_s
        dearest[name] = max(dearest[name], cost_s)
    left, out = sum(total.values()), []
    for name in sorted(total, key=lambda name: -total[name]):
        if left <= LEFT_S:
            break
        if dearest[name] >= CASE_S:
            out.append(name)
            left -= total[name]
    return sorted(out)


def main() -> None:
    """Run all tests, and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "tests.slow", *ALL]
        subprocess.run(command, env={**os.environ, FOLDER: folder}, check=True)
        found = [f.read_text(encoding="utf-8").splitlines() for f in Path(folder).iterdir()]
    SLOW.write_text("\n".join(slow_functions([line for each in found for line in each])) + "\n")


if __name__ == "__main__":
    main()
