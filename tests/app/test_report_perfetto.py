"""The file for Perfetto: strict to its format, true to the journal, and opened by both viewers."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from heddle.reports.perfetto import FIRST_ENGINE, MIGRATIONS, ROLLOUT, trace_events
from heddle.runs.record import Record, record
from tests.app.browser import PATIENCE_S, perfetto_ui
from tests.app.journals import ONE_RUN, Heddle, last_run
from tests.app.reported import Made, by_hand
from tests.app.test_metrics import story

Event = dict[str, Any]

NEEDS: Mapping[str, set[str]] = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""Keys that an event of each phase has, as the Trace Event Format describes it."""


@pytest.fixture(scope="module")
def run_record(small: Made) -> Record:
    return record(small.runs[-1])


@pytest.fixture(scope="module")
def events(run_record: Record) -> list[Event]:
    return list(json.loads(trace_events(run_record, packed=False))["traceEvents"])


def by_thread(events: list[Event]) -> Mapping[tuple[int, int], list[Event]]:
    """Slices of each thread, in the order in which a reader takes them."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    for slices in found.values():
        slices.sort(key=lambda e: (e["ts"], -e["dur"]))
    return found


def strictly(events: list[Event]) -> Iterator[str]:
    """Everything that a reader could stumble over."""
    for event in events:
        phase = event["ph"]
        missing = NEEDS[phase] - event.keys()
        if missing:
            yield f"{event} has no {missing}"
        numbers = [event[k] for k in ("pid", "tid", "ts", "dur") if k in event]
        if not all(isinstance(n, int) and n >= 0 for n in numbers):
            yield f"{event} has numbers that are not whole or below 0"
        if phase == "C" and not all(isinstance(n, int) and n >= 0 for n in event["args"].values()):
            yield f"{event} counts below 0"
    named = {e["name"] for e in events if e["ph"] == "M"}
    if not named <= {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}:
        yield f"unknown metadata {named}"
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xstf"}
    if {e["pid"] for e in events} != processes or not used <= set(threads):
        yield "a track without a name"
    tids = [tid for _, tid in threads]
    if len(set(tids)) != len(tids) or set(tids) & processes:
        yield "a number that names two things"
    yield from nested(events)


def nested(events: list[Event]) -> Iterator[str]:
    """Slices of a thread lie within each other or apart, and flows begin and end within slices."""
    slices = by_thread(events)
    for each in slices.values():
        open_until: list[int] = []
        for event in each:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            if open_until and end > open_until[-1]:
                yield f"{event} outlasts what it is in"
            open_until.append(end)
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            around = slices[event["pid"], event["tid"]]
            if not any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in around):
                yield f"{event} is tied to no slice"
    for flow in flows.values():
        if [e["ph"] for e in flow] not in (["s", "t", "f"], ["s", "f"]):
            yield f"{flow} does not lead from one beginning to one end"
        if [e["ts"] for e in flow] != sorted(e["ts"] for e in flow):
            yield f"{flow} runs back in time"


def test_every_event_is_well_formed_and_every_slice_nests(events: list[Event]):
    assert list(strictly(events)) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda e: e.pop("dur"), "has no {'dur'}"),
        (lambda e: e.update(ts=-1), "below 0"),
        (lambda e: e.update(ts=1.5), "not whole"),
        (lambda e: e.update(dur=10**12), "outlasts what it is in"),
        (lambda e: e.update(tid=1), "without a name"),
    ],
)
def test_the_check_sees_what_it_should(
    events: list[Event], spoil: Callable[[Event], object], said: str
):
    spoilt = [dict(e) for e in events]
    spoil(next(e for e in spoilt if e["ph"] == "X" and e["name"] == "decode"))
    try:
        found = list(strictly(spoilt))
    except KeyError as missing:
        found = [f"has no {{{missing}}}"]
    assert any(said in each for each in found)


def test_slices_flows_and_counters_are_those_of_the_run(run_record: Record, events: list[Event]):
    d, summary = run_record.dispatches, run_record.run.summary
    steps = [e for e in events if e["ph"] == "X" and e["cat"] == "step"]
    assert len(steps) == summary["dispatches"]
    assert sum(e["dur"] for e in steps) / 1e6 == pytest.approx(
        float((d.ended_s - d.dispatched_s).sum()), abs=1e-6 * len(steps)
    )
    assert sum(e["args"]["output_tokens"] for e in steps) == summary["output_tokens"]
    ends = Counter(e["args"]["end"] for e in steps)
    assert ends["preempted"] == summary["preemptions_policy"] > 0
    assert ends["lost"] == summary["dispatches_lost"] > 0
    moves = [e for e in events if e["ph"] == "X" and e["cat"] == "migration"]
    assert len(moves) == summary["migrations"] > 0
    assert sum(e["args"]["ok"] for e in moves) == summary["migrations_ok"]
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(tracks) == 2 + summary["engines"]
    assert tracks[FIRST_ENGINE].startswith("engine e0 (TP ")
    assert (tracks[ROLLOUT], tracks[MIGRATIONS]) == ("rollout", "migrations")
    counters: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append(*event["args"].values())
    assert max(counters[ROLLOUT, "active"]) == summary["arrived"]
    for (pid, name), counts in counters.items():
        if name == "batch":
            slots = {e["tid"] for e in steps if e["pid"] == pid}
            assert max(counts) <= len(slots)
        if name != "KV":
            assert counts[-1] == 0
    reported = [n for (_, name), counts in counters.items() if name == "KV" for n in counts]
    assert sorted(reported) == sorted(run_record.reports["kv_used_tokens"].tolist())


def test_a_flow_leads_from_the_step_before_a_migration_to_the_step_after(events: list[Event]):
    moves = {
        (e["pid"], e["tid"], e["ts"]): e for e in events if e["pid"] == MIGRATIONS and "dur" in e
    }
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = by_thread(events)

    def step(at: Event) -> Event:
        around = slices[at["pid"], at["tid"]]
        return next(
            s for s in around if s["cat"] == "step" and s["ts"] <= at["ts"] < s["ts"] + s["dur"]
        )

    whole = 0
    flows = [e for e in events if e["ph"] in "stf"]
    for begin, middle, end in zip(flows, flows[1:], flows[2:], strict=False):
        if [e["ph"] for e in (begin, middle, end)] != ["s", "t", "f"]:
            continue
        whole += 1
        move = moves[middle["pid"], middle["tid"], middle["ts"]]["args"]
        assert step(begin)["args"]["trajectory"] == move["trajectory"]
        assert step(end)["args"]["trajectory"] == move["trajectory"]
        assert names[begin["pid"]].startswith(f"engine {move['source']} ")
        assert names[end["pid"]].startswith(f"engine {move['target']} ")
    assert whole > 10


def test_a_run_that_broke_off_is_written_as_far_as_it_goes(tmp_path: Path):
    found = json.loads(trace_events(record(by_hand(tmp_path, story()[:6])), packed=False))
    assert found["otherData"]["status"] == "running"
    assert list(strictly(found["traceEvents"])) == []
    ends = [e["args"]["end"] for e in found["traceEvents"] if e.get("cat") == "step"]
    assert ends == ["preempted", "running", "finished"]


def test_report_writes_the_file_packed_or_not(heddle: Heddle, trace: Path):
    heddle(*ONE_RUN, trace)
    run = last_run()
    result = heddle("report", run, "-o", "run.json.gz")
    assert (result.exit_code, result.stdout) == (0, "run.json.gz\n")
    assert json.loads(heddle("report", run, "-o", "run.json", "--json").stdout) == {
        "schema": "heddle.report/1",
        "runs": [{"run": str(run)}],
        "perfetto": "run.json",
    }
    assert gzip.decompress(Path("run.json.gz").read_bytes()) == Path("run.json").read_bytes()


QUERY = """
const [sql, done] = arguments;
(async () => {
  const result = await window.app.trace.engine.query(sql);
  const rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) {
    rows.push(result.columns().map((name) => {
      const value = it.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  }
  done(rows);
})().catch((error) => done(String(error)));
"""


def test_perfetto_s_own_trace_processor_reads_it_without_loss(
    browser: Chrome, run_record: Record, events: list[Event]
):
    with perfetto_ui(trace_events(run_record, packed=True)) as (address, _):
        browser.get(address)
        WebDriverWait(browser, PATIENCE_S).until(
            lambda b: b.execute_script("return Boolean(window.app && window.app.trace)")
        )

        def rows(sql: str) -> Any:
            return browser.execute_async_script(QUERY, sql)

        bad = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        assert rows(bad) == []
        counted = Counter(e["cat"] for e in events if e["ph"] in "Xi")
        found = rows("select category, count(*) from slice group by 1")
        assert dict(found) == counted
        # A step lies in no other, its parts lie in it, and no flow lost an end.
        assert rows("select distinct depth from slice where category in ('step', 'migration')") == [
            [0]
        ]
        assert rows("select distinct depth from slice where category = 'decode'") == [[1]]
        assert rows("select count(*) from flow") == [[sum(e["ph"] in "tf" for e in events)]]
        d = run_record.dispatches
        held = "select p.name, sum(s.dur) from slice s join thread_track t on s.track_id = t.id"
        held += " join thread using (utid) join process p using (upid)"
        held += " where s.category = 'step' group by 1"
        for name, dur in rows(held):
            code = run_record.journal.words("engine").index(name.split()[1])
            mine = d.engine == code
            lasted = float(np.sum((d.ended_s - d.dispatched_s)[mine]))
            assert dur / 1e9 == pytest.approx(lasted, abs=1e-6 * mine.sum())
        counters = rows("select distinct name from counter_track order by name")
        expected = ["KV tokens", "active trajectories", "batch steps", "queue steps"]
        assert [name for (name,) in counters] == expected
        browser.get("about:blank")


IMPORT = """
const model = new tr.Model();
new tr.importer.Import(model).importTraces([arguments[0]]);
const slices = [...model.getDescendantEvents()].filter((e) => e instanceof tr.model.ThreadSlice);
return [model.importWarnings.map((w) => w.message), Object.keys(model.processes).length,
        model.flowEvents.length, slices.filter((s) => s.category === "step").length];
"""


def test_the_viewer_of_chrome_tracing_reads_it_without_a_warning(
    browser: Chrome, run_record: Record, events: list[Event]
):
    text = trace_events(run_record, packed=False)
    with perfetto_ui(b"") as (_, assets):
        browser.get(f"{assets}/catapult_trace_viewer.html")
        WebDriverWait(browser, PATIENCE_S).until(
            lambda b: b.execute_script("return typeof tr === 'object' && Boolean(tr.importer)")
        )
        warnings, processes, flows, steps = browser.execute_script(IMPORT, text.decode())
        browser.get("about:blank")
    assert warnings == []
    assert processes == 2 + run_record.run.summary["engines"]
    assert flows == sum(e["ph"] in "tf" for e in events)
    assert steps == run_record.run.summary["dispatches"]
