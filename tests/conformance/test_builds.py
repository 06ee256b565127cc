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
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.setup import prepare
from heddle_compiled import in_force
from heddle_core.controller import Controller
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout

print("compiled" if in_force() else "sources")
cluster = ClusterConfig(model="qwen3-14b", gpu="h100", gpus=2, tp=1, max_running=12)
trace, *presets = sys.argv[1:]
for preset in presets:
    policy = PolicyConfig(preset=preset)
    setup = prepare(RunConfig(trace=trace, seed=3, cluster=cluster, policy=policy))
    digest = hashlib.sha256()
    core = RecordedCore(
        Controller(setup.policy), lambda *entry: digest.update(repr(entry).encode())
    )
    simulate_rollout(setup.workload.scripts[:160], core, setup.simulation)
    print(preset, digest.hexdigest())
"""


def journals(pure: str) -> tuple[str, dict[str, str]]:
    """The build that ran, and the digest of each preset's journal under it."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "traces" / "coding-512.jsonl.gz"), *PRESETS],
        env={**os.environ, "HEDDLE_PURE": pure},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    build, *lines = ran.stdout.splitlines()
    return build, dict(line.split() for line in lines)


@pytest.fixture(scope="module")
def digests() -> dict[str, tuple[str, str]]:
    """Of each preset, of the compiled build and of the sources."""
    (compiled, fast), (sources, slow) = journals("0"), journals("1")
    assert (compiled, sources) == ("compiled", "sources")
    return {preset: (fast[preset], slow[preset]) for preset in PRESETS}


@pytest.mark.skipif(not heddle_compiled.in_force(), reason="no compiled build; make compiled")
@pytest.mark.parametrize("preset", PRESETS)
def test_both_builds_give_the_same_journal(
    digests: dict[str, tuple[str, str]], preset: str
) -> None:
    compiled, sources = digests[preset]
    assert compiled == sources
