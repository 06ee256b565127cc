"""A sweep of real engines, small and quick: what is measured is only checked for being there."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm_settings import has_nixl
from heddle_sim.profile_files import read_profile
from heddle_trace.sweep_files import read_sweep
from tests.runtime.processes import descendants, wait_until_gone
from tests.runtime.vllm_bench import needs_vllm

pytestmark = needs_vllm

HEDDLE = (sys.executable, "-m", "heddle.cli", "calibrate")
SMALL = ("--sweep", "quick", "--max-running", "2", "--max-context", "192", "--set",
         "runtime.kv_mib=64")  # fmt: skip


def test_a_sweep_of_real_engines_makes_a_profile(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    kv = ("--kv-transfer", "nixl") if has_nixl() else ()
    sweep_file, profile_file = tmp_path / "sweep.json", tmp_path / "tiny.json"
    measure = (*HEDDLE, "measure", "--engine", "vllm", "--model-dir", model, *SMALL, *kv)
    subprocess.run([*measure, "-o", sweep_file], check=True, timeout=400, capture_output=True)
    sweep = read_sweep(sweep_file)
    assert (sweep.model, sweep.gpu, sweep.engine, sweep.precision) == (
        "tiny",
        "cpu",
        "vllm",
        "bfloat16",
    )
    assert sweep.block_tokens == 32
    assert {trial.batch for trial in sweep.decode} == {1, 2}
    assert any(trial.held_out for trial in sweep.decode)
    assert any(trial.cached for trial in sweep.prefill)
    assert any(trial.batch for trial in sweep.prefill)
    assert sweep.aborts
    assert len(sweep.lives) == 2
    assert {move.way for move in sweep.moves} == ({"kv", "prefill"} if kv else {"prefill"})
    assert [len(loop.clients) for loop in sweep.loops] == [2]
    # A machine that tests run on is no place to measure: any error will do.
    fit = (*HEDDLE, "fit", sweep_file, "-o", profile_file, "--max-error", "1e9")
    subprocess.run(fit, check=True, timeout=60, capture_output=True)
    profile = read_profile(profile_file)
    assert profile.costs is not None
    assert profile.costs.moves_by == ("kv" if kv else "prefill")
    assert profile.table(1).base_s[2] > 0


def test_an_interrupted_sweep_leaves_no_engine_behind(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    measure = (*HEDDLE, "measure", "--engine", "vllm", "--model-dir", model, *SMALL)
    running = subprocess.Popen(
        [*measure, "-o", tmp_path / "sweep.json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        deadline_s = time.monotonic() + 60
        while not (engines := engines_of(running.pid)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert engines, "no engine was started"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "Interrupted" in said
    assert wait_until_gone(engines) == []


def engines_of(pid: int) -> list[int]:
    found = []
    for each in descendants(pid):
        with suppress(OSError):
            if b"vllm_process" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found
