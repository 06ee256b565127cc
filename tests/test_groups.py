"""Tests with the same `xdist_group` run in one process, one after the other."""

import os
import subprocess
import sys
from pathlib import Path

MANY = 8


def test_the_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(f"""\
import os, pathlib, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range({MANY}))
def test(number):
    pathlib.Path(f"ran-{{number}}").write_text(os.environ["PYTEST_XDIST_WORKER"])
""")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup"],
        cwd=tmp_path,
        env=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    processes = [path.read_text() for path in tmp_path.glob("ran-*")]
    assert len(processes) == MANY
    assert len(set(processes)) == 1
