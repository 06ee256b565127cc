"""The compiled build and the sources give the same journals, to the last digit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import heddle_compiled
from heddle_core.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import hashlib, sys
from heddle.cluster_config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.setup import prepare
from heddle_compiled import in_force
from heddle_core.controller import Controller
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout

cluster = ClusterConfig(model="qwen3-14b", gpu="h100", gpus=2, tp=1, max_running=12)
policy = PolicyConfig(preset=sys.argv[2])
setup = prepare(RunConfig(trace=sys.argv[1], seed=3, cluster=cluster, policy=policy))
digest = hashlib.sha256()
core = RecordedCore(Controller(setup.policy), lambda *entry: digest.update(repr(entry).encode()))
simulate_rollout(setup.workload.scripts[:160], core, setup.simulation)
print("compiled" if in_force() else "sources", digest.hexdigest())
"""


def journal(preset: str, pure: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "traces" / "coding-512.jsonl.gz"), preset],
        env={**os.environ, "HEDDLE_PURE": pure},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.skipif(not heddle_compiled.in_force(), reason="no compiled build; make compiled")
@pytest.mark.parametrize("preset", PRESETS)
def test_both_builds_give_the_same_journal(preset: str) -> None:
    (compiled, fast), (sources, slow) = journal(preset, "0"), journal(preset, "1")
    assert (compiled, sources) == ("compiled", "sources")
    assert fast == slow
