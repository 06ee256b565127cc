"""Reports of RL loops: the page's training section, its data, and the file for Perfetto."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver import Chrome

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.reports.page.html import page
from heddle.reports.perfetto import trace_events
from heddle.reports.run_bounds import run_bound
from heddle.runs import Run, load_run
from heddle.runs.loop_record import loop_steps
from heddle.runs.record import record
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.browser import Page
from tests.app.reported import NONE, Made, unpacked
from tests.app.test_report_perfetto import by_thread, strictly

REGIMES = ("areal:max_head_offpolicyness=1", "sync")
STEPS = 6


@pytest.fixture(scope="session")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two regimes with failing environments and engines, and a colocated loop; a page of them."""
    folder = tmp_path_factory.mktemp("loops")
    trace = folder / "search.jsonl.gz"
    write_trace(trace, synth("search", trajectories=96, samples_per_group=4, seed=3))
    cluster = ClusterConfig(
        model="qwen3-8b", gpus=4, max_running=4, failures="e1@60", engine_start_s=10.0
    )
    config = LoopConfig(
        run=RunConfig(trace=str(trace), cluster=cluster),
        regimes=REGIMES,
        groups=3,
        samples=4,
        batches=STEPS,
        train_gpus=4,
        env_start_s="5,2",
        env_failure_rate=0.1,
        reward_s="20",
        reward_capacity=8,
        repeat=True,
    )
    compare_regimes([config], out=folder / "runs")
    shared = replace(config, regimes=("april",), colocated=True)
    compare_regimes([shared], out=folder / "runs")
    runs = [load_run(path) for path in sorted((folder / "runs").iterdir())]
    path = folder / "loops.html"
    path.write_bytes(page(runs, run_bound))
    return Made(path, tuple(runs))


def regime(loops: Made, name: str) -> Run:
    return next(run for run in loops.runs if run.manifest["loop"]["regime"].startswith(name))


@pytest.mark.parametrize("name", ["areal", "sync", "april"])
def test_the_journal_holds_what_was_measured_while_the_loop_ran(loops: Made, name: str):
    run = regime(loops, name)
    found = record(run).loop
    assert found is not None
    steps = loop_steps(run)
    t = found.trainings
    assert [step["batch"] for step in steps] == t["batch"].tolist() == list(range(STEPS))
    assert [step["end_s"] for step in steps] == t["ended_s"].tolist()
    trained_s = (t["ended_s"] - t["began_s"]).tolist()
    assert [step["training_s"] for step in steps] == pytest.approx(trained_s)
    assert [step["mean_staleness"] for step in steps] == pytest.approx(t["mean_staleness"].tolist())
    assert [step["most_staleness"] for step in steps] == t["most_staleness"].tolist()
    assert max(t["most_staleness"]) > 0 or name == "sync"
    for step in steps:
        parts = ("rollout_s", "reward_s", "training_s", "update_s")
        assert sum(step[part] for part in parts) == pytest.approx(step["step_s"])
    rewards, starts = found.rewards, found.starts
    assert len(rewards[0]) == len(rewards[1]) >= STEPS * 12
    assert len(starts[0]) == len(starts[1]) > len(record(run).journal.trajectories)
    known = ~np.isnan(found.updates["ended_s"])
    assert (found.updates["ended_s"] > found.updates["began_s"])[known].all()
    assert len(found.moves["role"]) == (2 * STEPS - 1 if name == "april" else 0)


def test_a_rollout_is_no_loop(small: Made):
    found = record(small.runs[0])
    assert found.loop is None
    assert loop_steps(small.runs[0]) == []
    head, _ = unpacked(small.path.read_bytes())
    assert all(run["training"] is None for run in head["runs"])


def test_the_page_holds_the_loop(loops: Made):
    head, tables = unpacked(loops.path.read_bytes())
    assert len({run["colour"] for run in head["runs"]}) == len(head["runs"])
    for run, own, listed in zip(loops.runs, tables, head["runs"], strict=True):
        found = record(run).loop
        assert found is not None
        tick_s = listed["tick_s"]
        began = own["trainings"]["began"] * tick_s
        assert began == pytest.approx(found.trainings["began_s"], abs=tick_s)
        assert NONE not in own["updates"]["ended"]
        assert listed["training"]["steps"] == list(loop_steps(run))
        assert listed["training"]["rewards"]["y"][-1] == 0
        assert min(listed["training"]["rewards"]["y"]) == 0
        assert listed["end_s"] >= found.trainings["ended_s"].max()
        assert listed["how"]["regime"] == run.manifest["loop"]["regime"]


def test_the_training_section_draws_every_run_and_hides_for_rollouts(
    browser: Chrome, loops: Made, small: Made
):
    shown = Page(browser, loops.path)
    assert shown.errors() == []
    assert shown.run("return document.querySelectorAll('#loop .main-svg').length") >= 1
    for at, run in enumerate(loops.runs):
        shown.click(f"#focus button[data-run='{at}']")
        assert run.manifest["loop"]["regime"] in shown.find("#training h2").text
        assert len(shown.texts("#steps tbody tr")) == STEPS
        bars = shown.run(
            "return document.getElementById('loop').data.filter((t) => t.type === 'bar')"
            ".map((t) => t.x.length)"
        )
        moves = 2 * STEPS - 1 if run.config.cluster.gpus == 4 and at == april(loops) else 0
        assert bars == [STEPS, STEPS - 1, moves]
    wide = shown.run(
        "return document.querySelector('#loop .main-svg').getBoundingClientRect().width"
    )
    assert wide > 1000
    assert shown.errors() == []
    rollout = Page(browser, small.path)
    assert not rollout.find("#training").is_displayed()
    assert not rollout.find("nav a[href='#training']").is_displayed()


def april(loops: Made) -> int:
    return [run.manifest["loop"]["regime"] for run in loops.runs].index("april")


def test_hovering_a_batch_shows_its_staleness(browser: Chrome, loops: Made):
    run = regime(loops, "areal")
    shown = Page(browser, loops.path)
    shown.click(f"#focus button[data-run='{loops.runs.index(run)}']")
    found = record(run).loop
    assert found is not None
    t = found.trainings
    middle = float(t["began_s"][3] + t["ended_s"][3]) / 2
    shown.run("view(page, [arguments[0] - 5, arguments[0] + 5])", middle)
    text = shown.hover("loop", middle, 0)
    assert text.startswith("Batch 3, ")
    assert "12 trajectories" in text
    mean = float(t["mean_staleness"][3])
    assert f"staleness {round(mean, 3):g} in the mean, {t['most_staleness'][3]} at most" in text
    u = found.updates
    of_second = u["version"] == 2
    middle = float(u["began_s"][of_second].min() + np.nanmax(u["ended_s"][of_second])) / 2
    shown.run("view(page, [arguments[0] - 5, arguments[0] + 5])", middle)
    assert shown.hover("loop", middle, 1).startswith("Weights version 2\n")
    assert shown.ranges("loop", "engines")[0] == shown.ranges("loop", "engines")[1]


def test_the_colour_of_a_batch_is_its_staleness(browser: Chrome, loops: Made):
    run = regime(loops, "areal")
    shown = Page(browser, loops.path)
    shown.click(f"#focus button[data-run='{loops.runs.index(run)}']")
    colours = shown.run(
        "return document.getElementById('loop').data.find((t) => t.type === 'bar').marker.color"
    )
    assert colours == pytest.approx([s["mean_staleness"] for s in loop_steps(run)], abs=1e-4)


@pytest.mark.parametrize("name", ["areal", "sync", "april"])
def test_the_file_for_perfetto_has_the_tracks_of_the_loop(loops: Made, name: str):
    found = record(regime(loops, name))
    assert found.loop is not None
    events = json.loads(trace_events(found, packed=False))["traceEvents"]
    assert list(strictly(events)) == []
    names = {e["args"]["name"]: e["pid"] for e in events if e.get("name") == "process_name"}
    trained = [e for e in events if e.get("cat") == "training"]
    assert [e["name"] for e in trained] == [f"batch {k}" for k in range(STEPS)]
    assert {e["pid"] for e in trained} == {names["trainer"]}
    lasted_s = [e["dur"] / 1e6 for e in trained]
    t = found.loop.trainings
    assert lasted_s == pytest.approx((t["ended_s"] - t["began_s"]).tolist(), abs=2e-6)
    updates = [e for e in events if e.get("cat") == "update"]
    assert len(updates) == len(found.loop.updates["engine"])
    assert len([s for s in by_thread(events) if s[0] == names["weight updates"]]) >= 4
    counts = [e for e in events if e["ph"] == "C" and e["pid"] == names["services"]]
    assert {e["name"] for e in counts} == {"rewards", "starts"}
    for counter in ("rewards", "starts"):
        mine = [e for e in counts if e["name"] == counter]
        assert mine[-1]["args"]["trajectories"] == 0
        began_s, ended_s = getattr(found.loop, counter)
        area = sum(a["args"]["trajectories"] * (b["ts"] - a["ts"]) / 1e6 for a, b in pairwise(mine))
        assert area == pytest.approx(ended_s.sum() - began_s.sum(), abs=1e-3)


def test_a_loop_that_broke_off_is_shown_as_far_as_it_goes(loops: Made, tmp_path: Path):
    run = regime(loops, "areal")
    entries = list(run.entries())
    from tests.app.reported import by_hand

    broken = by_hand(tmp_path, entries[: len(entries) // 2])
    found = record(broken).loop
    assert found is not None
    assert 0 < len(found.trainings["batch"]) < STEPS
    made = page([broken], run_bound)
    head, _ = unpacked(made)
    assert head["runs"][0]["training"]["steps"] == []
