"""Writes which tests `make test` leaves out, from the CPU time that each takes.

    make compiled && python -m tests.slow

Functions go in order of their time, the longest first, until the rest takes `LEFT_S`. Half a second
and less a case is never slow: what is left out is little time for many checks. Tests that wait take
none: others run meanwhile.
"""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SLOW

LEFT_S = 270.0
"""Seconds of one core that `make test` takes at most, beside starts of processes."""
CASE_S = 0.5
"""A function whose longest case takes less stays."""
KEPT = "tests/test_architecture.py"
"""Rules of all sources, whose first test reads them for the others."""
FOLDER = "HEDDLE_TEST_SECONDS"
"""The environment variable with the folder that processes of tests write into."""
ALL = ("-n", "4", "--dist", "loadgroup", "-m", "not real_engines and not soak")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write a line for a test: CPU seconds of this process and its children, and its name."""
    before = os.times()
    outcome = yield
    cpu_s = sum(os.times()[:4]) - sum(before[:4])
    with (Path(os.environ[FOLDER]) / str(os.getpid())).open("a", encoding="utf-8") as file:
        file.write(f"{cpu_s:.3f} {item.nodeid}\n")
    return outcome


def slow_functions(lines: list[str]) -> list[str]:
    """Return the functions that are left out, in order of their names."""
    total: dict[str, float] = defaultdict(float)
    longest: dict[str, float] = defaultdict(float)
    for line in lines:
        cpu_s, test = line.split(" ", 1)
        name = test.partition("[")[0].partition("@")[0]
        total[name] += float(cpu_s)
        longest[name] = max(longest[name], float(cpu_s))
    left, out = sum(total.values()), []
    for name in sorted(total, key=lambda name: -total[name]):
        if left <= LEFT_S:
            break
        if longest[name] >= CASE_S and not name.startswith(KEPT):
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
