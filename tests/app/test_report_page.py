"""The page of `heddle report`: what it holds is what the journal says, and what it refuses."""

import errno
import html
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle import setup
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.reports.curves import MAX_POINTS, at_least, completion, thin, under_way
from heddle.reports.page.columns import MAX_TICKS, tick
from heddle.reports.page.html import page
from heddle.reports.run_bounds import run_bound
from heddle.runs import load_run
from heddle.runs.record import MOMENT_S, record, slots
from heddle.simulation import simulate
from heddle_core.commands import Migrate
from heddle_core.events import MigrationFinished, RolloutStarted, ToolReturned
from heddle_core.ids import EngineId, RolloutId, TrajectoryId
from heddle_trace import synth, write_trace
from tests.app.journals import (
    BRIEF,
    ONE_RUN,
    Heddle,
    arrived,
    dispatch,
    done,
    entry,
    ready,
    run_of,
)
from tests.app.reported import NONE, Made, by_hand, unpacked
from tests.app.test_metrics import story

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ("--gpus", "2", "--max-running", "2")
TIMES = st.floats(0.0, 50.0)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(sorted), min_size=1, max_size=40)


def test_the_page_holds_every_trajectory_and_every_dispatch_of_every_run(small: Made):
    head, tables = unpacked(small.path.read_bytes())
    for run, facts, table in zip(small.runs, head["runs"], tables, strict=True):
        t, d, tick_s = table["trajectories"], table["dispatches"], facts["tick_s"]
        truth = run.trajectories.to_pandas()
        assert [head["names"][i] for i in t["name"]] == list(truth["trajectory"])
        assert t["finished"] * tick_s == pytest.approx(truth["finished_s"], abs=1e-4)
        assert t["waited"] * tick_s == pytest.approx(
            truth["queueing_s"] + truth["engine_queued_s"], abs=1e-4
        )
        for mine, theirs in (("output", "output_tokens"), ("migrations", "migrations")):
            assert t[mine].tolist() == truth[theirs].tolist()
        assert len(d["step"]) == run.summary["dispatches"]
        assert int((d["flags"] & 2 > 0).sum()) == run.summary["preemptions_policy"]
        assert int((d["flags"] & 4 > 0).sum()) == run.summary["dispatches_lost"] > 0
        assert d["recomputes"].sum() == run.summary["preemptions_engine"]
        assert len(table["migrations"]["ok"]) == run.summary["migrations"]
        assert facts["bound"]["makespan_s"] <= run.summary["makespan_s"]
        assert facts["end_s"] == run.summary["makespan_s"]
        assert (t["pending"] == NONE).all()
        assert facts["curves"]["completion"]["y"][-1] == 1.0
        assert facts["curves"]["active"]["y"][-1] == 0
        assert facts["curves"]["waiting"]["y"][-1] == 0


def test_equal_runs_give_equal_pages(small: Made):
    assert page(small.runs, run_bound) == page(
        [load_run(run.path) for run in small.runs], run_bound
    )


def test_a_page_loads_nothing(small: Made):
    text = small.path.read_text(encoding="utf-8")
    assert "{{" not in text.partition("<script>")[0]
    assert not any(word in text for word in ("<link", "<iframe", "@import", "<script src"))


@given(INTERVALS)
def test_slots_are_never_shared_and_as_many_as_run_at_once(intervals: list[list[float]]):
    begin, end = np.array(intervals).T
    mine = slots(np.zeros(len(begin), np.int64), begin, end)
    for slot in np.unique(mine).tolist():
        order = np.argsort(begin[mine == slot], kind="stable")
        starts, ends = begin[mine == slot][order], end[mine == slot][order]
        assert (starts[1:] >= ends[:-1]).all()
    # One of no length needs its slot for a moment.
    held = np.maximum(end, begin + MOMENT_S)
    assert mine.max() + 1 == max(((begin <= t) & (held > t)).sum() for t in begin)


@given(INTERVALS)
def test_what_is_under_way_is_counted_at_each_change(intervals: list[list[float]]):
    begin, end = np.array(intervals).T
    times, counts = under_way(begin, end)
    assert (np.diff(times) > 0).all()
    for t, count in zip(times.tolist(), counts.tolist(), strict=True):
        assert count == ((begin <= t) & (end > t)).sum()
    assert counts[-1] == 0


def test_a_thinned_curve_has_points_of_the_whole_one():
    begin = np.random.default_rng(3).random(5 * MAX_POINTS).round(4)
    whole, thinned = (under_way(begin, begin + 0.25, thinned=t) for t in (False, True))
    assert len(thinned[0]) <= MAX_POINTS < len(whole[0])
    assert all(map(np.array_equal, thinned, thin(*whole)))


def test_curves_keep_their_ends_when_they_are_thinned():
    delay = np.linspace(0.0, 99.0, 10 * MAX_POINTS)
    x, y = at_least(delay)
    assert len(x) <= MAX_POINTS
    assert (x[0], y[0], x[-1]) == (0.0, 1.0, 99.0)
    assert y[-1] == pytest.approx(1.0 / len(delay))
    x, y = completion(np.zeros(len(delay)), np.where(delay > 50.0, np.nan, delay))
    assert (x[0], y[0]) == (0.0, 0.0)
    assert y[-1] == (delay <= 50.0).mean()


def test_ticks_grow_with_the_run():
    assert tick(3600.0) == 1e-4
    month_s = 31 * 86_400.0
    assert month_s / tick(month_s) <= MAX_TICKS < month_s / (tick(month_s) / 10)


def test_what_is_under_way_when_a_journal_breaks_off_is_shown_so(tmp_path: Path):
    run = by_hand(tmp_path, story()[:6])  # `a` runs anew at 5 s after a preemption; `b` has ended
    found = record(run)
    assert found.note == "is still running, or its process died"
    head, (tables,) = unpacked(page([run], run_bound))
    (facts,) = head["runs"]
    assert facts["summary"]["finished_so_far"] == 0
    assert facts["end_s"] == 4.0  # from the arrival at 1 s to the last entry at 5 s
    d, t = tables["dispatches"], tables["trajectories"]
    assert d["flags"].tolist() == [2, 1, 0]
    assert (t["finished"] == NONE).all()
    assert facts["bound"]["why"].endswith("this run was driven by test")


@pytest.mark.parametrize(
    ("entries", "since"),
    [
        (4, [np.nan, 0.0]),  # both have arrived; `a` was sent to its engine, `b` was not
        (5, [2.0, np.nan]),  # `a` was preempted at 3 s, `b` runs
        (9, [np.nan, np.nan]),  # `a` is in its tool
    ],
)
def test_the_waiting_trajectories_at_the_end_are_known(
    tmp_path: Path, entries: int, since: list[float]
):
    found = record(by_hand(tmp_path, story()[:entries]))
    np.testing.assert_array_equal(found.waiting_since_s - found.start_s, since)


def test_a_tool_that_has_returned_leaves_a_trajectory_waiting(tmp_path: Path):
    returned = story()[10]
    assert isinstance(returned.event, ToolReturned)
    found = record(by_hand(tmp_path, [*story()[:10], entry(returned.event)]))
    np.testing.assert_array_equal(found.waiting_since_s, [returned.event.time_s, np.nan])


def test_each_migration_has_its_own_end(tmp_path: Path):
    a, b = TrajectoryId("a"), TrajectoryId("b")
    e0, e1 = EngineId("e0"), EngineId("e1")

    def ended(trajectory: TrajectoryId, at: float, ok: bool) -> MigrationFinished:
        return MigrationFinished(
            time_s=at, trajectory=trajectory, source=e0, target=e1, ok=ok, kv_tokens=int(at)
        )

    def moved(trajectory: TrajectoryId) -> Migrate:
        return Migrate(trajectory=trajectory, source=e0, target=e1)

    entries = [
        entry(ready("e0")),
        entry(ready("e1")),
        entry(arrived("a"), dispatch("a", 0, "e0")),
        entry(arrived("b"), dispatch("b", 0, "e0")),
        entry(done("b", 0, "e0", at=1.0, tokens=3), moved(b)),
        entry(done("a", 0, "e0", at=2.0, tokens=3), moved(a)),
        entry(ended(a, 3.0, True)),
        entry(ended(b, 4.0, False), moved(a)),
    ]
    m = record(by_hand(tmp_path, entries)).migrations
    assert m["trajectory"].tolist() == [0, 0, 1]
    assert m["began_s"].tolist() == [2.0, 4.0, 1.0]
    np.testing.assert_array_equal(m["ended_s"], [3.0, np.nan, 4.0])
    assert m["ok"].tolist() == [True, False, False]
    assert m["kv_tokens"].tolist() == [3, 0, 4]


def test_names_cannot_break_out_of_the_page(tmp_path: Path):
    name = "</script><script>alert(1)</script>"
    entries = [
        entry(ready("e0")),
        entry(arrived(name), dispatch(name, 0, "e0")),
        entry(done(name, 0, "e0", at=2.0, tokens=3)),
    ]
    made = page([by_hand(tmp_path, entries)], run_bound)
    head, _ = unpacked(made)
    assert head["names"][0].startswith("</script><script>alert(1)</script>")
    assert b"alert(1)" not in made
    assert html.escape("verl s0") in made.decode()


def test_report_writes_a_page_and_prints_its_path(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl,slime", *CLUSTER)
    runs = sorted(path.parent for path in Path("runs").glob("*/*/manifest.json"))
    result = heddle("report", *runs, "-o", "report.html")
    assert result.exit_code == 0, result.output
    assert result.stdout == "report.html\n"
    assert "MB, opens without a network" in result.stderr
    head, _ = unpacked(Path("report.html").read_bytes())
    assert {run["label"] for run in head["runs"]} == {"verl s0", "slime s0"}
    assert not (runs[0].parent / "figures").exists()
    again = heddle("report", *runs, "-o", "report.html", "--force", "--json")
    assert json.loads(again.stdout)["page"] == "report.html"


def test_runs_of_one_policy_are_distinguished_by_their_start(heddle: Heddle, trace: Path):
    for gpus in (1, 2):
        heddle(*ONE_RUN, trace, "--gpus", gpus)
    runs = sorted(path.parent for path in Path("runs").rglob("manifest.json"))
    for run, started in zip(runs, ("08:00:01", "09:30:00"), strict=True):
        path = run / "manifest.json"
        path.chmod(0o644)
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "started": f"2026-11-21T{started}Z"}))
    heddle("report", *runs, "-o", "report.html")
    head, _ = unpacked(Path("report.html").read_bytes())
    assert [run["label"] for run in head["runs"]] == ["verl s0 08:00:01", "verl s0 09:30:00"]


def test_the_page_imports_no_simulator():
    check = (
        "import sys, heddle.reports.page.html\n"
        "assert 'heddle.simulation' not in sys.modules\n"
        "assert 'simpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_bound_needs_the_trace_that_was_replayed(heddle: Heddle, trace: Path):
    heddle(*ONE_RUN, trace, *CLUSTER)
    (run,) = Path("runs").iterdir()

    def bound() -> dict[str, Any]:
        heddle("report", run, "-o", "report.html", "--force")
        found: dict[str, Any] = unpacked(Path("report.html").read_bytes())[0]["runs"][0]["bound"]
        return found

    assert bound()["makespan_s"] > 0
    trace.write_text(trace.read_text().partition("\n")[0] + "\n")
    assert bound() == {"why": f"{trace} is no longer the trace that was replayed"}
    trace.unlink()
    assert bound()["why"].startswith("the trace or its profile cannot be read: ")


def test_a_bound_in_the_manifest_needs_no_trace(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster = ClusterConfig(model="qwen3-8b", gpus=2, max_running=2)
    config = RunConfig(trace=str(trace), cluster=cluster, policy=PolicyConfig(preset="verl"))
    older = load_run(simulate(config, out=tmp_path).path)
    monkeypatch.setattr(setup, "BOUND_KEPT_FROM", 1)
    run = load_run(simulate(config, out=tmp_path).path)
    drafts = replace(config, cluster=replace(cluster, speculation="eagle3:4:0"))
    assert load_run(simulate(drafts, out=tmp_path).path).manifest["bound"] is None
    assert older.manifest["bound"] is None
    assert run.manifest["bound"] == run_bound(run) == run_bound(older)
    trace.unlink()
    assert run_bound(run)["makespan_s"] > 0
    assert run_bound(older)["why"].startswith("the trace or its profile cannot be read: ")
    bound = run.manifest["bound"]
    for damaged in ({**bound, "solo_s": math.nan}, {**bound, "makespan_s": -1.0}, {"other_s": 1.0}):
        manifest = {**run.manifest, "bound": damaged}
        assert "cannot be read" in run_bound(replace(run, manifest=manifest))["why"]


def test_a_run_on_real_engines_names_them(heddle: Heddle, trace: Path):
    run = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"]
    path = Path(run) / "manifest.json"
    path.chmod(0o644)
    world = {"engine": "vllm", "model": "tiny", "gpu": "cpu"}
    other = {**json.loads(path.read_text()), "driver": "heddle_runtime", "world": world}
    path.write_text(json.dumps(other))
    heddle("report", run, "-o", "report.html")
    (facts,) = unpacked(Path("report.html").read_bytes())[0]["runs"]
    assert facts["how"]["cluster"] == "2 x cpu"
    assert facts["how"]["model"] == "tiny"
    assert facts["how"]["driver"] == "heddle_runtime, vllm engines"
    assert "driven by heddle_runtime" in facts["bound"]["why"]


def test_derived_times_of_a_gpu_class_are_marked(heddle: Heddle, trace: Path):
    cluster = ("--model", "qwen3-8b", "--gpu", "h20", "--gpus", 2)
    said = heddle(*ONE_RUN, trace, *cluster)
    assert "cluster  2 x h20 (derived), qwen3-8b" in said.output
    assert "derived: the kernel times of H200" in said.output
    (run,) = Path("runs").iterdir()
    heddle("report", run, "-o", "report.html")
    (facts,) = unpacked(Path("report.html").read_bytes())[0]["runs"]
    assert facts["how"]["cluster"] == "2 x h20 (derived)"
    assert facts["how"]["times of the GPU class"].startswith("the kernel times of H200")
    compared = heddle("compare", trace, "--policies", "verl", *cluster, "--json")
    assert json.loads(compared.stdout)["cluster"]["derived"].startswith("the kernel times of H200")
    write_trace("four.jsonl", synth("coding", 8, seed=5, samples_per_group=2))
    planned = heddle("plan", "four.jsonl", *cluster, *BRIEF, "--json")
    assert json.loads(planned.stdout)["cluster"]["derived"].startswith("the kernel times of H200")
    listed = heddle("policies", "list")
    assert "h20 (derived)" in listed.output
    assert "h800 (derived)" in listed.output
    assert "h200 (derived)" not in listed.output


@pytest.mark.parametrize(("policy", "of_tail"), [("heddle", True), ("heddle-paper", False)])
def test_a_plan_of_the_tail_is_not_taken_for_that_of_the_start(
    heddle: Heddle, policy: str, of_tail: bool
):
    trace = ROOT / "traces" / "coding-512.jsonl.gz"
    cluster = ("--model", "qwen3-14b", "--gpu", "h100", "--gpus", 8)
    done = heddle(*ONE_RUN, trace, "--policies", policy, *cluster)
    assert done.exit_code == 0, done.output
    (run,) = Path("runs").iterdir()
    heddle("report", run, "-o", "report.html")
    (facts,) = unpacked(Path("report.html").read_bytes())[0]["runs"]
    assert facts["plan"]["of_tail"] is of_tail


def test_a_run_that_broke_off_is_reported_as_far_as_it_goes(
    heddle: Heddle, refused: Callable[..., str], tmp_path: Path
):
    run = by_hand(tmp_path, story()[:6])
    result = heddle("report", run.path, "-o", "report.html")
    assert result.exit_code == 0, result.output
    assert "showing its journal as far as it goes" in result.stderr
    assert "so it has no results" in refused("report", run.path)


def test_a_run_in_which_nothing_had_arrived_has_nothing_to_show(
    refused: Callable[..., str], tmp_path: Path
):
    begun = by_hand(
        tmp_path, [entry(RolloutStarted(time_s=0.0, rollout=RolloutId("r"), trajectories=2))]
    )
    assert "there is nothing to show" in refused("report", begun.path, "-o", "report.html")
    empty = by_hand(tmp_path, [])
    assert "there is nothing to show" in refused("report", empty.path, "-o", "report.html")
    assert list(Path().iterdir()) == []


def test_what_cannot_be_written_or_compared_is_refused_in_one_line(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    run = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"]
    other = trace.parent / "elsewhere" / trace.name
    other.parent.mkdir()
    other.write_text("".join(trace.read_text().splitlines(keepends=True)[:4]))
    stranger = run_of(heddle(*ONE_RUN, other, "--json", *CLUSTER))["run"]
    Path("folder.html").mkdir()
    Path("there.html").write_text("mine")
    for options, said in (
        ((trace.parent, "-o", "x.html"), "not a run directory"),
        ((run, "-o", "none/x.html"), "none: no such folder; make it first"),
        ((run, "-o", "folder.html"), "folder.html: is a folder; name a file in it"),
        ((run, "-o", "there.html"), "there.html: exists; name another file, or replace it"),
        ((run, stranger, "-o", "x.html"), "a page compares runs of one trace"),
        ((run, stranger, "-o", "x.json"), "a file for Perfetto has one run, not 2"),
    ):
        message = refused("report", *options)
        assert said in message
        assert message.count("\n") == 1
    assert Path("there.html").read_text() == "mine"
    assert not list(Path().glob("x.*"))


@pytest.mark.parametrize(
    ("number", "said", "status"),
    [
        (errno.EACCES, "x.html: permission denied; name a file in another folder", 2),
        (errno.ENOSPC, "x.html: the disk is full", 1),
    ],
)
def test_a_page_is_there_whole_or_not_at_all(
    heddle: Heddle,
    refused: Callable[..., str],
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    said: str,
    status: int,
):
    run = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"]

    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number), ".x.html.1.tmp")

    monkeypatch.setattr(os, "fsync", fails)
    assert said in refused("report", run, "-o", "x.html", status=status)
    assert [p.name for p in Path().iterdir()] == ["runs"]
