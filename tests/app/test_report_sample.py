"""Pages, figures and Perfetto files of runs that are too large to show whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import Chrome

from heddle.cluster.config import ClusterConfig
from heddle.reports import figures, sample
from heddle.reports.curves import under_way
from heddle.reports.page import columns, html, overall
from heddle.reports.perfetto import trace_events
from heddle.reports.run_bounds import run_bound
from heddle.reports.sample import choose, sample_engines
from heddle.runs import Run, journal_file
from heddle.runs.record import Record, record
from heddle.runs.replay import EVERY, replay
from tests.app.browser import Page
from tests.app.reported import Made, by_hand, made, unpacked
from tests.app.test_metrics import story
from tests.app.test_report_perfetto import strictly

MOST = 1_200
"""Dispatches of one run of a sampled page; the runs have more than that."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Engines enough to show some of them, and a policy that migrates."""
    cluster = ClusterConfig(gpus=16, max_running=4)
    return made(tmp_path_factory.mktemp("wide"), cluster, 256, ("verl", "heddle-paper"))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that the runs exceed."""
    monkeypatch.setattr(sample, "LAST", 5)
    monkeypatch.setattr(sample, "DRAWN", 20)
    monkeypatch.setattr(html, "MAX_DISPATCHES", 2 * MOST)


@pytest.fixture
def sampled(wide: Made, limits: None) -> tuple[dict[str, Any], list[dict[str, dict[str, Any]]]]:
    return unpacked(html.page(wide.runs, run_bound))


@pytest.fixture(scope="module")
def records(wide: Made) -> list[Record]:
    return [record(run) for run in wide.runs]


def test_no_journal_is_read_as_a_whole(wide: Made, monkeypatch: pytest.MonkeyPatch):
    def all_at_once(path: Path, *, whole: bool) -> None:
        pytest.fail("a journal may be larger than memory")

    monkeypatch.setattr(journal_file, "stream_of", all_at_once)
    assert len(html.page(wide.runs, run_bound)) > 10_000
    assert figures.running_by_engine(wide.runs[0])[1] > 0.0
    assert replay(wide.runs[0]).divergence is None


def test_a_replay_counts_events_only_to_say_how_far_it_is(
    wide: Made, monkeypatch: pytest.MonkeyPatch
):
    reads, said = list[Run](), list[tuple[int, int]]()
    batches = Run.batches
    monkeypatch.setattr(Run, "batches", lambda run: reads.append(run) or batches(run))
    found = replay(wide.runs[0])
    assert len(reads) == 1
    replay(wide.runs[0], lambda done, total: said.append((done, total)))
    assert len(reads) == 3
    assert said[-1] == (found.entries // EVERY * EVERY, found.entries)


def test_slots_on_drawn_engines_are_those_of_all_dispatches(records: list[Record], limits: None):
    for each in records:
        shown = sample.sample(each, None, MOST)
        drawn = each.engines["engine"][shown.engines]
        own = shown.trajectories[each.dispatches.trajectory]
        there = np.isin(each.dispatches.engine[own], drawn)
        assert 0 < there.sum() < len(there)
        found = columns._slots(each.dispatches.part(own), drawn)
        assert np.array_equal(found[there], each.slot[own][there])
        assert not found[~there].any()


def test_a_sampled_page_says_what_it_shows(sampled, wide: Made):
    head, tables = sampled
    for run, facts, table in zip(wide.runs, head["runs"], tables, strict=True):
        shown, every = len(table["trajectories"]["name"]), run.summary["arrived"]
        assert 25 <= shown < every == facts["trajectories_in_all"]
        assert facts["sample"].startswith(f"{shown} of {every} trajectories are shown: the 5 that ")
        assert f"{int(table['trajectories']['at_random'].sum())} drawn by" in facts["sample"]
        engines = len(facts["engines"])
        assert 1 <= len(facts["drawn"]) < engines
        assert f"the {len(facts['drawn'])} of {engines} engines that are" in facts["sample"]
        assert len(table["dispatches"]["step"]) <= MOST < run.summary["dispatches"]


def test_what_is_shown_is_shown_whole(sampled, records: list[Record]):
    head, tables = sampled
    for truth, facts, table in zip(records, head["runs"], tables, strict=True):
        d, t = table["dispatches"], table["trajectories"]
        names = [head["names"][name] for name in t["name"]]
        place = {name: at for at, name in enumerate(truth.journal.trajectories)}
        rows = [place[name] for name in names]
        count = np.bincount(truth.dispatches.trajectory)
        assert np.bincount(d["trajectory"]).tolist() == count[rows].tolist()
        assert t["output"].tolist() == truth.trajectories["output_tokens"][rows].tolist()
        words = truth.journal.words("group")
        groups = truth.trajectories["group"][rows].tolist()
        assert [facts["groups"][g] for g in t["group"]] == [words[g] for g in groups]
        for engine in facts["drawn"]:
            code = truth.engines["engine"][engine]
            assert (d["engine"] == engine).sum() == (truth.dispatches.engine == code).sum()
        assert set(table["reports"]["engine"].tolist()) <= set(facts["drawn"])
        moved = truth.migrations["trajectory"]
        assert len(table["migrations"]["ok"]) == np.isin(moved, rows).sum()


def test_the_last_of_each_run_and_those_drawn_are_shown_in_every_run(
    sampled, records: list[Record]
):
    head, tables = sampled
    shown = [{head["names"][n] for n in table["trajectories"]["name"]} for table in tables]
    for truth in records:
        last = np.argsort(-truth.trajectories["finished_s"], kind="stable")[:5]
        assert all({truth.journal.trajectories[at] for at in last} <= names for names in shown)
    drawn = [
        {head["names"][n] for n in t["name"][t["at_random"] == 1]}
        for t in (table["trajectories"] for table in tables)
    ]
    assert drawn[0] == drawn[1]
    assert 5 < len(drawn[0]) < 40


def test_what_counts_all_is_the_same_on_a_sampled_page(sampled, wide: Made):
    whole, _ = unpacked(wide.path.read_bytes())
    for facts, all_of in zip(sampled[0]["runs"], whole["runs"], strict=True):
        assert all_of["sample"] is all_of["activity"] is None
        for name in ("curves", "summary", "fleet", "plan", "engines", "bound"):
            assert facts[name] == all_of[name]
        for kind, lengths in all_of["lengths"].items():
            assert facts["lengths"][kind] == [lengths[engine] for engine in facts["drawn"]]


def test_every_trajectory_is_in_one_state_until_it_ends(records: list[Record]):
    for truth in records:
        found = overall.activity(truth)
        t = truth.trajectories
        times, active = under_way(t["arrived_s"] - truth.start_s, t["finished_s"] - truth.start_s)
        edges = np.linspace(0.0, truth.end_s - truth.start_s, overall.ACTIVITY_BINS + 1)
        area = np.append(0.0, np.cumsum(active[:-1] * np.diff(times)))
        mean = np.diff(np.interp(edges, times, area)) / np.diff(edges)
        assert np.sum(list(found.values()), axis=0) == pytest.approx(mean, abs=0.03)
        assert all(min(counts) >= 0.0 for counts in found.values())


def test_a_run_that_broke_off_is_counted_to_its_last_entry(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(html, "MAX_DISPATCHES", 1)
    run = by_hand(tmp_path, story()[:6])
    head, (table,) = unpacked(html.page([run], run_bound))
    (facts,) = head["runs"]
    assert len(table["trajectories"]["name"]) == 1
    assert facts["sample"].startswith("1 of 2 trajectories are shown: the 1 that ")
    spent_s = {
        state: np.mean(counts) * facts["end_s"] for state, counts in facts["activity"].items()
    }
    # `a` waits, runs, is preempted, waits and runs again; `b` waits and runs until the last entry.
    arrived_s = record(run).trajectories["arrived_s"]
    assert sum(spent_s.values()) == pytest.approx(
        2 * facts["end_s"] - float(arrived_s[1] - arrived_s[0]), abs=0.02
    )


def test_no_engine_is_drawn_where_too_much_ran_on_each(wide: Made, limits, monkeypatch):
    monkeypatch.setattr(html, "MAX_DISPATCHES", 100)
    head, tables = unpacked(html.page(wide.runs[:1], run_bound))
    (facts,) = head["runs"]
    assert facts["drawn"] == []
    assert facts["lengths"] == {"ended": []}
    assert "no engine is drawn, since too much ran on each" in facts["sample"]
    assert 0 < len(tables[0]["dispatches"]["step"]) <= 100


def test_runs_that_fit_are_chosen_nothing_from(wide: Made):
    assert choose(wide.runs, 10**6) is None


def test_many_engines_are_thinned_evenly(wide: Made, monkeypatch):
    monkeypatch.setattr(sample, "MAX_ENGINES", 2)
    head, tables = unpacked(html.page(wide.runs, run_bound))
    for run, facts, table in zip(wide.runs, head["runs"], tables, strict=True):
        engines = len(facts["engines"])
        assert len(facts["drawn"]) == 2
        assert facts["sample"] == f"2 of {engines} engines are drawn, spread evenly"
        assert len(table["trajectories"]["name"]) == run.summary["arrived"]
    for count in (1, 7, 100, 8_192):
        order = list(sample._spread(count, count // 2))
        assert sorted(order) == list(range(count))
        assert order[0] == count // 2
    taken = np.sort(list(sample._spread(8_192, 0))[:64])
    assert np.diff(taken).max() < 3 * 8_192 / 64


def test_a_sampled_page_can_be_used(browser: Chrome, wide: Made, limits, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(html.page(wide.runs, run_bound))
    shown = Page(browser, path)
    assert shown.errors() == []
    facts = shown.run("return page.run.sample")
    assert facts in shown.find("#notes").text
    assert "of a sample of 256 trajectories" in shown.find("#verdict").text.lower()
    here = shown.run("return page.run.trajectories.name.length")
    assert shown.find("#found").text == f"{here} of {here} trajectories shown of 256"
    drawn = shown.run("return page.run.drawn")
    assert shown.run("return byId('engines').data[0].z.length") == len(drawn)
    assert len(shown.texts("#cluster button")) == len(drawn)
    engines = shown.run("return page.run.engines.length")
    assert shown.find("#mix").text.endswith(f" {len(drawn)} of {engines} engines are drawn.")
    total = shown.run("return byId('doing').data.reduce((sum, each) => sum + each.y[3], 0)")
    assert 200 < total <= 256
    end = wide.runs[-1].summary["makespan_s"]
    shown.run("view(page, [0.25 * page.run.end_s, 0.5 * page.run.end_s])")
    assert (
        shown.ranges("doing", "engines", "slots")
        == [[pytest.approx(0.25 * end), pytest.approx(0.5 * end)]] * 3
    )
    assert shown.run("return byId('doing').data[0].x.length") == overall.ACTIVITY_BINS // 4
    shown.click(f"#cluster [data-engine='{drawn[-1]}']")
    assert shown.run("return timeline.engine") == drawn[-1]
    name = shown.run("return page.run.engines[timeline.engine].name")
    assert shown.hover("engines", 0.3 * end, len(drawn) - 1).startswith(f"{name}, TP ")
    assert shown.errors() == []


def test_a_page_without_engines_can_be_used(
    browser: Chrome, wide: Made, limits, monkeypatch, tmp_path: Path
):
    path = tmp_path / "page.html"
    monkeypatch.setattr(html, "MAX_DISPATCHES", 100)
    path.write_bytes(html.page(wide.runs[:1], run_bound))
    shown = Page(browser, path)
    assert shown.errors() == []
    assert not shown.find("#engines").is_displayed()
    assert not shown.find("#slots").is_displayed()
    assert shown.find("#doing").is_displayed()
    shown.run("view(page, [1, 2])")
    assert shown.errors() == []


def test_a_perfetto_file_of_a_large_run_has_some_engines_whole(records: list[Record]):
    truth = records[-1]
    shown = sample_engines(truth, 900)
    every = len(truth.engines["engine"])
    assert shown.note == f"{len(shown.engines)} of {every} engines are shown, spread evenly"
    assert 1 <= len(shown.engines) < every
    document = json.loads(trace_events(truth, shown, packed=False))
    events = document["traceEvents"]
    assert list(strictly(events)) == []
    assert document["otherData"]["sample"] == shown.note
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes[0] == f"rollout ({shown.note})"
    names = [truth.engines["name"][engine] for engine in shown.engines.tolist()]
    assert [name.split()[1] for name in processes[2:]] == names
    codes = truth.engines["engine"][shown.engines]
    steps = sum(event.get("cat") == "step" for event in events)
    assert steps == np.isin(truth.dispatches.engine, codes).sum() <= 900
    active = [e["args"]["trajectories"] for e in events if e["name"] == "active"]
    assert max(active) == len(truth.journal.trajectories)
    assert sample_engines(truth).note is None
    whole = trace_events(truth, sample_engines(truth), packed=False)
    assert whole == trace_events(truth, packed=False)


def test_merged_rows_of_a_timeline_are_means_and_say_so(wide: Made, monkeypatch, tmp_path: Path):
    run = wide.runs[0]
    whole, end_s, tps = figures.running_by_engine(run)
    assert len(whole) == len(tps) > 2
    mean = run.steps.to_pandas()
    mean = (mean["engine_queued_s"] + mean["prefill_s"] + mean["decode_s"]).sum() / end_s
    assert 0.5 * mean < whole.mean(axis=1).sum() <= 1.5 * mean
    monkeypatch.setattr(figures, "MAX_ENGINES", 2)
    merged, _, _ = figures.running_by_engine(run)
    halves = np.array_split(whole, 2)
    assert merged.tolist() == [half.mean(axis=0).tolist() for half in halves]
    figure = figures._timeline(run, "x")
    assert "a row: mean of about" in figure.axes[0].get_ylabel()
    assert figure.axes[0].get_ylim() == (len(tps) - 0.5, -0.5)
