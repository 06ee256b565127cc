"""Invariant 5: the same events give the same commands, in this process and in any other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.faults.scenario import Scenario, play, policy_of
from heddle_core import Controller, first_divergence
from heddle_core.events import EngineFailed
from heddle_core.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
NAMES = (*PRESETS, "slime+consistent_hash+served+balance", "heddle-paper+autellix+libra-dp")
SMALL = Scenario(trajectories=24, seed=8, with_history=True)


def digests() -> list[str]:
    """One line for every policy: its name and a digest of its journal."""
    return [f"{name} {play(name, SMALL).digest()}" for name in NAMES]


@pytest.fixture(scope="module")
def here() -> list[str]:
    return digests()


def test_twice_in_one_process(here):
    assert digests() == here
    assert len(dict.fromkeys(line.split()[1] for line in here)) > len(PRESETS) // 2


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_in_another_process_with_another_hash_seed(here, hash_seed):
    code = "from tests.conformance.test_determinism import digests; print(*digests(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == here


def test_another_policy_diverges_so_that_replay_can_fail():
    played = play("heddle", SMALL)
    assert played.events(EngineFailed)
    other = Controller(policy_of("slime", SMALL))
    found = first_divergence(played.entries, other.handle)
    assert found is not None
    assert found.recorded != found.replayed
