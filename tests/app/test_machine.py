"""A run beside other work on its machine says so, to whoever compares it with its simulation."""

import json
from pathlib import Path
from typing import Any

import pytest

from heddle import running
from heddle.runs import load_run
from heddle.runs.conditions import load_figures, load_note, other_cpu_share
from heddle_runtime.cpu_load import CpuLoad
from tests.app.journals import Heddle


@pytest.mark.parametrize(
    ("load", "busy"),
    [(CpuLoad(2, 0.0), False), (CpuLoad(8, 0.8), False), (CpuLoad(2, 0.3), True)],
)
def test_a_machine_is_busy_if_others_take_more_than_a_tenth(load: CpuLoad, busy: bool):
    summary = load_figures(load)
    assert other_cpu_share(summary) == pytest.approx(load.share)
    note = load_note(summary)
    assert (note is not None) == busy
    if busy:
        assert note is not None
        assert "took 0.3 of its 2 CPUs" in note
        assert "(15%)" in note


def test_a_run_that_measured_nothing_says_nothing():
    assert load_figures(None) == {}
    assert other_cpu_share({}) is None
    assert load_note({}) is None


class Meter:
    """In the place of the real one: what others take of two CPUs."""

    others = 0.0

    def read(self) -> CpuLoad:
        return CpuLoad(2, self.others)


class MeasuringSink(running.RunSink):
    """Fake engines measure nothing by themselves."""

    def __init__(self, *args: Any, measures_load: bool) -> None:
        assert not measures_load
        super().__init__(*args, measures_load=True)


@pytest.mark.parametrize("others", [0.1, 1.5])
def test_check_blames_the_machine_and_not_the_profile_if_others_used_it(
    heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch, others: float
):
    monkeypatch.setattr(running, "CpuMeter", Meter)
    monkeypatch.setattr(running, "RunSink", MeasuringSink)
    monkeypatch.setattr(Meter, "others", others)
    busy = others > 0.2
    done = heddle("run", trace, "--engine", "fake", "--set", "runtime.time_scale=0.02", "--json")
    assert done.exit_code == 0, done.output
    assert ("the machine was busy" in done.stderr) == busy
    path = json.loads(done.stdout)["run"]
    summary = load_run(path).summary
    assert (summary["other_cpus"], summary["machine_cpus"]) == (others, 2)
    checked = heddle("profile", "check", path)
    assert checked.exit_code == 0, checked.output
    assert ("the machine was busy" in checked.stderr) == busy
    assert ("The machine was busy with other processes in 1 of 1 runs" in checked.stdout) == busy
    assert f"{others / 2:.0%}" in checked.stdout
    as_json = json.loads(heddle("profile", "check", path, "--json").stdout)
    assert as_json["runs"][0]["other_cpu_share"] == pytest.approx(others / 2)
    assert ("the machine was busy" in heddle("report", path, "-o", "out").stderr) == busy


def test_a_run_on_fake_engines_measures_no_load(heddle: Heddle, trace: Path):
    done = heddle("run", trace, "--engine", "fake", "--set", "runtime.time_scale=0.02", "--json")
    path = json.loads(done.stdout)["run"]
    assert "other_cpus" not in load_run(path).summary
    as_json = json.loads(heddle("profile", "check", path, "--json").stdout)
    assert as_json["runs"][0]["other_cpu_share"] is None
    assert "others' CPU" not in heddle("profile", "check", path).stdout
