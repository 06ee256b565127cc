"""Benchmarks are seldom run; what they import is checked here."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_every_benchmark_finds_what_it_imports():
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(names) > 20
    # As scripts find their neighbours, and as modules of the package.
    paths = os.pathsep.join([str(FOLDER), str(FOLDER.parent)])
    code = f"import {', '.join(names)}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
