"""What a guard has started ends with whoever holds its standard input."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from campaigns.processes import wait_until_gone
from tests.patience import PATIENCE_S


def guarded(*command: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "heddle_runtime.process.guard", *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE)


def test_the_status_is_that_of_the_command():
    guard = guarded("sh", "-c", "exit 7")
    assert guard.wait(PATIENCE_S) == 7
    assert guard.stdin is not None
    guard.stdin.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_command_and_its_children_end_with_the_input(tmp_path: Path, killed: bool):
    out = tmp_path / "ids"
    guard = guarded("sh", "-c", f"sleep 600 & echo $$ $! > {out}; wait")
    until_s = time.monotonic() + PATIENCE_S
    while not (out.exists() and out.read_text().strip()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    ids = [int(word) for word in out.read_text().split()]
    if killed:
        guard.send_signal(signal.SIGKILL)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(PATIENCE_S)
    assert wait_until_gone(ids) == []
