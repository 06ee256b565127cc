"""What the page says of the difference of two runs: sums that add up, means over seeds, words."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cluster.config import ClusterConfig
from heddle.comparison.estimates import estimate
from heddle.config import PolicyConfig, RunConfig
from heddle.reports import curves
from heddle.reports.curves import time_within
from heddle.reports.labels import labels
from heddle.reports.page.html import page
from heddle.reports.page.meanings import COLUMNS, LOOP_FIGURES, MEANINGS
from heddle.reports.page.verdict import verdict
from heddle.reports.page.why import BINS, PARTS, course, why
from heddle.reports.run_bounds import run_bound
from heddle.runs import Run, load_run
from heddle.runs.conditions import lateness_figures
from heddle.runs.record import record
from heddle.runs.tables import union_s
from heddle.simulation import simulate
from heddle_runtime.clock import Lateness
from heddle_trace import synth, write_trace
from tests.app.journals import arrived, dispatch, done, entry, ready
from tests.app.reported import Made, by_hand, unpacked
from tests.app.test_metrics import story

SEEDS = (0, 1, 2)
TIMES = st.floats(0.0, 50.0)
WEIGHTED = st.lists(st.tuples(TIMES, TIMES, st.floats(0.0, 8.0)), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ...]:
    """Two policies under three seeds each, by seed first, as `heddle compare` runs them."""
    folder = tmp_path_factory.mktemp("seeds")
    write_trace(folder / "coding.jsonl.gz", synth("coding", 24, 11, 4))
    config = RunConfig(
        trace=str(folder / "coding.jsonl.gz"), cluster=ClusterConfig(gpus=2, max_running=4)
    )
    return tuple(
        load_run(
            simulate(
                replace(config, seed=seed, policy=PolicyConfig(preset=policy)), out=folder / "runs"
            ).path
        )
        for seed in SEEDS
        for policy in ("slime", "heddle")
    )


def reasons(runs: tuple[Run, ...] | list[Run]) -> dict[str, Any]:
    found: dict[str, Any] = unpacked(page(runs, run_bound))[0]["why"]
    return found


@given(WEIGHTED)
def test_time_within_intervals_is_their_weighted_length_before_each_edge(
    intervals: list[tuple[float, float, float]],
):
    begin, end, weight = np.array(intervals).T
    edges = np.linspace(0.0, 50.0, 23)
    truth = [(weight * np.maximum(np.minimum(end, t) - begin, 0.0)).sum() for t in edges]
    assert time_within(edges, begin, end, weight) == pytest.approx(truth, abs=1e-6)


@given(WEIGHTED, st.lists(st.floats(-9.0, 99.0), min_size=1, max_size=9), st.booleans())
def test_times_are_put_between_edges_as_a_search_finds_them(
    intervals: list[tuple[float, float, float]], others: list[float], even: bool
):
    times = np.array(intervals)[:, :2].ravel()
    edges = np.linspace(0.0, 50.0, 23) if even else np.unique(np.append(0.0, np.abs(others)))
    times = np.concatenate((times, edges, others, np.nextafter(edges, 99.0), [np.inf]))
    assert np.array_equal(curves._places(edges, times), np.searchsorted(edges, times))


def test_the_parts_of_the_last_trajectory_add_up_to_the_makespan(small: Made):
    found = reasons(small.runs)
    assert [row["label"] for row in found["rows"]] == ["verl s0", "heddle-paper s0"]
    for run, row in zip(small.runs, found["rows"], strict=True):
        truth = run.trajectories.to_pandas().sort_values("finished_s").iloc[-1]
        last = row["last"]
        assert last["names"] == [truth["trajectory"]]
        assert tuple(last["seconds"]) == PARTS
        assert sum(last["seconds"].values()) == pytest.approx(run.summary["makespan_s"])
        assert last["seconds"]["decode"] == pytest.approx(truth["decode_s"])
        assert last["seconds"]["tool"] == pytest.approx(truth["tool_s"])
        assert last["seconds"]["waiting"] == pytest.approx(
            truth["queueing_s"] + truth["engine_queued_s"]
        )
        assert abs(last["seconds"]["rest"]) < 1e-6
        assert last["tpot_ms"] * last["intervals"] == pytest.approx(1e3 * truth["decode_s"])


def test_the_steps_from_the_reference_add_up_to_the_best(small: Made):
    found = reasons(small.runs)
    first, best = found["rows"][0], found["rows"][found["best"]]
    changed = sum(step["seconds"] for step in found["waterfall"])
    assert changed == pytest.approx(best["mean_s"] - first["mean_s"])
    decode = {
        s["part"]: s["seconds"] for s in found["waterfall"] if s["part"] in ("tokens", "tpot")
    }
    a, b = (row["last"] for row in (first, best))
    assert sum(decode.values()) == pytest.approx(b["seconds"]["decode"] - a["seconds"]["decode"])
    assert (decode["tpot"] > 0) == (b["tpot_ms"] > a["tpot_ms"])


def test_seconds_that_a_failed_engine_took_are_lost(tmp_path: Path):
    found = reasons([by_hand(tmp_path, story(), finish=True)])
    (row,) = found["rows"]
    assert sum(row["last"]["seconds"].values()) == pytest.approx(row["mean_s"])


def test_gpus_and_time_per_token_over_time_integrate_to_the_runs(small: Made):
    found = reasons(small.runs)
    curves = found["curves"]
    width_s = 2 * curves["at"][0]
    assert len(curves["at"]) == BINS
    for run, gpus, tpot_ms in zip(small.runs, curves["gpus"], curves["tpot_ms"], strict=True):
        kept = record(run)
        d, engines = kept.dispatches, kept.engines
        busy = 0.0
        for code, tp in zip(engines["engine"].tolist(), engines["tp"].tolist(), strict=True):
            own = np.flatnonzero(d.engine == code)
            own = own[np.argsort(d.dispatched_s[own], kind="stable")]
            busy += tp * union_s(d.dispatched_s[own], d.ended_s[own])
        assert sum(gpus) * width_s == pytest.approx(busy, rel=1e-3)
        assert max(gpus) <= 4.0 + 1e-6
        timed = (d.output_tokens >= 2) & (d.decode_s > 0)
        pace = 1e3 * d.decode_s[timed] / (d.output_tokens[timed] - 1)
        known = [value for value in tpot_ms if value is not None]
        assert pace.min() - 1e-3 <= min(known) <= max(known) <= pace.max() + 1e-3
    # The shorter run uses nothing after its end.
    ends = [run.summary["makespan_s"] for run in small.runs]
    short = int(np.argmin(ends))
    after = [at > min(ends) + width_s for at in curves["at"]]
    assert any(after)
    assert all(curves["gpus"][short][i] == 0.0 for i, past in enumerate(after) if past)
    assert all(curves["tpot_ms"][short][i] is None for i, past in enumerate(after) if past)


def test_runs_that_differ_in_their_seed_alone_are_one_row_of_means(seeded: tuple[Run, ...]):
    found = reasons(seeded)
    assert [row["label"] for row in found["rows"]] == ["slime", "heddle"]
    for at, row in enumerate(found["rows"]):
        mine = seeded[at::2]
        assert row["runs"] == [at, at + 2, at + 4]
        makespans = estimate([run.summary["makespan_s"] for run in mine])
        assert (row["mean_s"], row["ci95_s"]) == (makespans.mean, makespans.ci95)
        tokens = np.mean([run.summary["throughput_tok_s"] for run in mine])
        assert row["summary"]["throughput_tok_s"] == pytest.approx(tokens)
        assert sum(row["last"]["seconds"].values()) == pytest.approx(makespans.mean)
        assert len(row["last"]["each"]) == 3
    assert "in the mean of 3 seeds (± " in found["verdict"]
    changed = sum(step["seconds"] for step in found["waterfall"])
    assert changed == pytest.approx(found["rows"][1]["mean_s"] - found["rows"][0]["mean_s"])


def test_what_is_true_of_some_seeds_alone_is_true_of_no_row(seeded: tuple[Run, ...]):
    courses = [course(record(run)) for run in seeded]
    figures = [{"makespan_s": 1.0, "comparable": at > 0} for at in range(len(seeded))]
    rows = why(seeded, [run.label for run in seeded], courses, figures)["rows"]
    assert [row["summary"]["comparable"] for row in rows] == [None, True]


def test_one_seed_twice_is_two_rows(seeded: tuple[Run, ...], tmp_path: Path):
    twice = load_run(shutil.copytree(seeded[0].path, tmp_path / "again"))
    rows = reasons([seeded[0], twice, seeded[2]])["rows"]
    assert [row["runs"] for row in rows] == [[0, 2], [1]]
    assert len({row["label"] for row in rows}) == 2


def test_runs_at_other_tp_degrees_are_named_by_them(seeded: tuple[Run, ...], tmp_path: Path):
    config = seeded[0].config
    wide = replace(config, cluster=replace(config.cluster, tp=2))
    runs = [seeded[0], load_run(simulate(wide, out=tmp_path / "runs").path)]
    assert labels(runs) == ["slime@tp1 s0", "slime@tp2 s0"]
    found = reasons(runs)
    assert [row["label"] for row in found["rows"]] == ["slime@tp1 s0", "slime@tp2 s0"]
    assert found["best"] == 1


def test_a_run_that_was_shown_the_future_is_not_the_best(seeded: tuple[Run, ...]):
    first, other = seeded[:2]
    shown = Run(other.path, {**other.manifest, "oracle": True, "policy": "heddle+oracle"})
    assert reasons([first, shown, other])["best"] == 2
    alone = reasons([first, shown])
    assert alone["best"] == 1
    assert "shown the future: a bound, not a result" in alone["verdict"]


def test_an_unfinished_run_is_compared_with_nothing(tmp_path: Path):
    found = reasons([by_hand(tmp_path, story()[:6])])
    assert found["best"] is None
    assert found["waterfall"] is None
    assert found["rows"][0]["last"] is None
    assert found["verdict"] == "verl s0 did not finish: these are its first 4.0 s."


def test_one_run_is_described_by_its_largest_parts(tmp_path: Path):
    entries = [
        entry(ready("e0")),
        entry(arrived("a"), dispatch("a", 0, "e0")),
        entry(done("a", 0, "e0", at=2.0, tokens=3)),
    ]
    found = reasons([by_hand(tmp_path, entries)])
    assert found["verdict"].startswith("verl s0 did not finish")


def row(label: str, each_s: list[float], **last: float) -> dict[str, Any]:
    """A row of `why`, with what a verdict reads of it."""
    found = estimate(each_s)
    seconds = dict.fromkeys(PARTS, 0.0) | {"decode": found.mean - sum(last.values())} | last
    return {
        "label": label,
        "seeds": list(range(len(each_s))),
        "each_s": each_s,
        "mean_s": found.mean,
        "ci95_s": found.ci95,
        "finished": True,
        "oracle": False,
        "last": {"seconds": seconds, "intervals": 1000.0, "tpot_ms": seconds["decode"]},
    }


def steps(**seconds: float) -> list[dict[str, Any]]:
    return [{"part": part, "seconds": value} for part, value in seconds.items()]


@pytest.mark.parametrize(
    ("ends", "parts", "said"),
    [
        (
            (100.0, 90.0),
            {"waiting": -14.0, "tpot": 5.0, "tool": -1.0, "rest": 0.001},
            "new ends 10.0 s (10.0 %) sooner than old: its last trajectory waits 14.0 s less, but "
            "decodes slower, at 90.0 against 100.0 ms per token (+5.0 s).",
        ),
        (
            (100.0, 102.5),
            {"tool": 2.5},
            "No other run ends sooner than old: new, the next, ends 2.5 s (2.5 %) later: its last "
            "trajectory is in tools for 2.5 s more.",
        ),
        ((100.0, 100.04), {"tool": 0.04}, "new and old take the same time, 100.0 s."),
        ((2000.0, 1000.0), {}, "new ends 1,000 s (50.0 %) sooner than old."),
    ],
)
def test_the_verdict_names_the_largest_parts(
    ends: tuple[float, float], parts: dict[str, float], said: str
):
    rows = [row(name, [end]) for name, end in zip(("old", "new"), ends, strict=True)]
    assert verdict(rows, steps(**parts) or None) == said


def test_a_verdict_over_seeds_says_when_its_sign_is_not_certain():
    sure = verdict([row("old", [100.0, 101.0, 102.0]), row("new", [90.0, 91.0, 92.5])], None)
    assert sure.startswith("new ends 9.8 s (9.7 %) sooner than old in the mean of 3 seeds (± 0.7 s")
    assert "not certain" not in sure
    unsure = verdict([row("old", [100.0, 110.0]), row("new", [90.0, 115.0])], None)
    assert "so the sign is not certain" in unsure


def test_a_verdict_on_one_row_names_its_largest_parts():
    said = verdict([row("only", [100.0], tool=30.0, waiting=10.0, prefill=0.1)], None)
    assert said == (
        "only takes 100.0 s; its last trajectory is 60 % in decode, 30 % in tools and 10 % waiting."
    )


def test_every_figure_has_a_meaning_in_one_sentence(small: Made):
    figures = {key for run in small.runs for key in run.summary}
    figures |= lateness_figures(Lateness(), makespan_s=1.0, trajectories=1).keys()
    assert {key for key in figures if not key.startswith("filled_")} <= MEANINGS.keys()
    assert all(text.endswith(".") and len(text) <= 110 for text in MEANINGS.values())
    assert not COLUMNS.keys() & LOOP_FIGURES.keys()
