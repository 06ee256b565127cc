"""A sweep of real engines, small and quick: what is measured is only checked for being there."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaigns.processes import descendants, wait_until_gone
from heddle.cli import main
from heddle_calibrate.fit.from_sweep import fit_sweep
from heddle_calibrate.measure.cells import SIZES
from heddle_calibrate.sweeps import read_sweep
from heddle_runtime.tiny_model import make_tiny_model
from tests.patience import PATIENCE_S
from tests.runtime.vllm_bench import needs_vllm

pytestmark = needs_vllm

ENGINES = ("--engine", "vllm", "--max-running", "4", "--set", "profile.max_context=192", "--set",
           "runtime.kv_mib=64", "--set", "profile.sweep=quick")  # fmt: skip


@pytest.mark.soak
def test_a_sweep_of_real_engines_makes_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    # Everything that a sweep does, once. A step of 256 tokens is aborted: on a slow machine the
    # abort is late, and a shorter step would have finished.
    least = replace(SIZES["quick"], repeats=1, output=64, joiners=1, ratio=4)
    monkeypatch.setitem(SIZES, "quick", least)
    out = tmp_path / "sweep.json"
    before = descendants()
    shared = tmp_path / "rows.csv"
    measure = ["profile", "measure", *ENGINES, "--model-dir", str(model), "-o", str(out)]
    done = CliRunner().invoke(main, [*measure, "--set", f"profile.share={shared}"])
    assert done.exit_code == 0, done.output
    assert "before, by the known profile: no answer: no profile of unnamed on cpu" in done.output
    assert "after, by a profile of the sweep: TPOT " in done.output
    assert len(shared.read_text().splitlines()) == 1 + 2
    assert str(tmp_path) not in shared.read_text()
    sweep = read_sweep(out)
    assert (sweep.model, sweep.gpu, sweep.engine, sweep.precision) == (
        "tiny",
        "cpu",
        "vllm",
        "bfloat16",
    )
    assert sweep.block_tokens == 32
    assert {trial.batch for trial in sweep.decode} == {1, 2, 3, 4}
    assert any(trial.held_out for trial in sweep.decode)
    assert any(trial.cached for trial in sweep.prefill)
    assert sweep.aborts
    assert len(sweep.lives) == 2
    assert {move.way for move in sweep.moves} == {"prefill"}
    assert [len(loop.clients) for loop in sweep.loops] == [4]
    assert [process for process in descendants() if process not in before] == []
    # A machine that tests run on is no place to measure: any error will do.
    profile = fit_sweep(sweep, file="sweep.json", worst_pct=1e9)
    assert profile.costs is not None
    assert profile.costs.moves_by == "prefill"
    assert profile.table(1).base_s[2] > 0


def test_an_interrupted_sweep_leaves_no_engine_behind(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    heddle = [sys.executable, "-m", "heddle.cli", "profile", "measure", *ENGINES]
    running = subprocess.Popen(
        [*heddle, "--model-dir", str(model), "-o", str(tmp_path / "sweep.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (engines := engines_of(running.pid)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert engines, "no engine was started"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=PATIENCE_S)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "Interrupted" in said
    assert wait_until_gone(engines) == []


def engines_of(pid: int) -> list[int]:
    found = []
    for each in descendants(pid):
        with suppress(OSError):
            if b"heddle_runtime.vllm.process" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found
