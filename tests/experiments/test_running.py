import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments import __main__ as command
from experiments.harness import running
from experiments.harness.experiment import FIGURES as PICTURES
from experiments.harness.experiment import LOCAL, Place, experiments, finish_all
from experiments.harness.extract import FIGURES, QUANTILES
from experiments.harness.jobs import (
    FULL,
    REDUCED,
    Computation,
    Job,
    Rollout,
    content_key,
    planned_runs,
)
from experiments.harness.running import Skipped, records_of, run_missing, trace_of
from experiments.harness.store import ROOT, Store
from heddle.cluster.config import ClusterConfig
from heddle.setup import Workspace

NUMBERS = ROOT / "experiments" / "f10_placement" / "measured.json"
PICTURE = PICTURES / "f10_placement.png"
ROLLOUT = Rollout(workload="coding", trajectories=16, samples=4)
JOB = Job(rollout=ROLLOUT, cluster=ClusterConfig(gpus=1, max_running=8), policy="verl")


def unheard(done: int, total: int) -> None:
    pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_equal_questions_have_one_address_and_others_another():
    assert content_key({"a": 1, "b": [2.0]}) == content_key({"b": [2.0], "a": 1})
    others = [
        replace(JOB, policy="slime"),
        replace(JOB, seed=1),
        replace(JOB, history="none"),
        replace(JOB, cluster=ClusterConfig(gpus=1, max_running=9)),
        replace(JOB, rollout=replace(ROLLOUT, tool_scale=2.0)),
    ]
    assert len({job.key for job in (JOB, replace(JOB), *others)}) == 6


def test_a_run_is_kept_whole_and_never_made_again(store: Store):
    jobs = [JOB, JOB, replace(JOB, policy="heddle")]
    assert run_missing(jobs, store, processes=1, on_progress=unheard) == 2
    found = store.get(JOB.key)
    assert set(FIGURES) <= found.keys()
    assert found["arrived"] == 16
    assert 0 < found["bound_s"] <= found["makespan_s"]
    assert len(found["completion_s"]) == len(found["group_completion_s"]) == QUANTILES
    assert found["completion_s"] == sorted(found["completion_s"])
    assert found["completion_s"][-1] == pytest.approx(found["makespan_s"], abs=1e-3)
    assert found["group_completion_s"][-1] == found["completion_s"][-1]
    assert found["tps"] == [1]
    assert run_missing(jobs, store, processes=1, on_progress=unheard) == 0
    assert not store.outdated(JOB.key)


def test_two_processes_make_what_one_makes(tmp_path: Path):
    jobs = [JOB, replace(JOB, policy="slime")]
    alone, shared = Store(tmp_path / "alone"), Store(tmp_path / "shared")
    calls: list[tuple[int, int]] = []
    run_missing(jobs, alone, processes=1, on_progress=unheard)
    assert run_missing(jobs, shared, processes=2, on_progress=lambda *t: calls.append(t)) == 2
    assert calls == [(0, 2), (1, 2), (2, 2)]
    for job in jobs:
        one, two = dict(alone.get(job.key)), dict(shared.get(job.key))
        assert one.pop("wall_s") > 0
        assert two.pop("wall_s") > 0
        assert one == two


def test_what_had_finished_before_an_interrupt_is_not_run_again(store: Store, monkeypatch):
    jobs = [replace(JOB, seed=seed) for seed in range(5)]
    ran: list[int] = []

    def fake(job: Job, into: Store, shared: Workspace) -> None:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(job.seed)
        into.put(job.key, "asked", {"seed": job.seed})

    monkeypatch.setattr(running, "run_one", fake)
    calls: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        run_missing(jobs, store, processes=1, on_progress=lambda *counts: calls.append(counts))
    assert calls == [(0, 5), (1, 5), (2, 5), (3, 5)]
    first, ran = ran, []
    assert run_missing(jobs, store, processes=1, on_progress=unheard) == 2
    assert sorted(first + ran) == list(range(5))
    assert [store.get(job.key)["seed"] for job in jobs] == list(range(5))


def test_only_the_paper_size_writes_results_that_are_part_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    committed = Place(tmp_path / "committed", tmp_path / "pictures", committed=True)
    local = Place(tmp_path / "local", tmp_path / "local" / "figures", committed=False)
    monkeypatch.setattr(command, "COMMITTED", committed)
    monkeypatch.setattr(command, "LOCAL", local)
    monkeypatch.setattr(command, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(command, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(command, "run_missing", lambda jobs, store, **_: 0)
    kept = {path: path.read_bytes() for path in (NUMBERS, PICTURE)}

    def run(*options: str) -> None:
        done = CliRunner().invoke(command.main, ["f10_placement", "--jobs", "1", *options])
        assert done.exit_code == 0, done.output

    for options in ((), ("--gpus", "8"), ("--full", "--gpus", "16"), ("--full", "--seeds", "1")):
        run(*options)
        assert (local.numbers / "f10_placement" / "measured.json").is_file()
        assert (local.figures / "f10_placement.png").is_file()
        assert "f10_placement.png" in (local.numbers / "results.md").read_text()
        assert not committed.numbers.exists()
    assert {path: path.read_bytes() for path in kept} == kept
    monkeypatch.setattr(command, "page", lambda place: (tmp_path / "results.md", ""))
    run("--full")
    assert (committed.numbers / "f10_placement" / "measured.json").is_file()
    assert (committed.figures / "f10_placement.png").is_file()


def test_git_ignores_results_of_other_sizes():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"/{LOCAL.numbers.relative_to(ROOT)}/" in ignored
    assert LOCAL.figures.is_relative_to(LOCAL.numbers)


def figures_of(folder: str) -> Mapping[str, int]:
    """A result, and a file that counts how often it was made."""
    (Path(folder) / str(time.monotonic_ns())).touch()
    return {"n": len(list(Path(folder).iterdir()))}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_computation_is_made_once_until_it_is_forgotten(tmp_path: Path, processes: int):
    store, counted = Store(tmp_path / "store"), tmp_path / "counted"
    counted.mkdir()
    asked = {"question": 1}
    one = Computation(question=asked, make=partial(figures_of, str(counted)))

    def done() -> int:
        return run_missing([one, one], store, processes=processes, on_progress=unheard)

    assert [done(), done(), done()] == [1, 0, 0]
    assert store.get(content_key(asked)) == {"n": 1}
    store.forget(one.key)
    assert done() == 1
    assert store.get(one.key) == {"n": 2}
    with pytest.raises(KeyError, match="run the experiment"):
        store.get("none")


def test_long_jobs_of_a_seed_come_first_and_those_of_a_rollout_together():
    sizes = {16: "coding", 64: "math", 32: "search"}
    jobs: list[Job | Computation] = [
        replace(JOB, policy=policy, rollout=Rollout(workload=w, trajectories=n, seed=seed))
        for policy in ("verl", "slime")
        for n, w in sizes.items()
        for seed in (102, 101)
    ]
    made = sorted([*jobs, Computation(question={}, make=dict)], key=running._order)
    assert isinstance(made[0], Computation)
    runs = [job for job in made if isinstance(job, Job)]
    assert [(job.rollout.seed, job.rollout.trajectories) for job in runs] == [
        (seed, n) for seed in (101, 102) for n in (64, 32, 16) for _ in range(2)
    ]


def test_experiments_are_finished_in_order_and_those_that_measure_time_alone(tmp_path: Path):
    place = Place(tmp_path / "numbers", tmp_path / "pictures", committed=False)
    chosen = [e for e in experiments(place) if e.name in ("f07_parallelism", "f10_placement")]
    calls: list[tuple[int, int]] = []
    finished = finish_all(
        chosen, REDUCED, Store(tmp_path), processes=2, on_progress=lambda *t: calls.append(t)
    )
    assert [e.name for e, _ in finished] == ["f07_parallelism", "f10_placement"]
    assert calls == [(1, 2), (2, 2)]
    assert all(e.measured and e.figure.is_file() for e in chosen)
    timed = {e.name for e in experiments(place) if e.measures_time}
    assert timed == {"t1_overheads", "t2_solver_time", "d_annealing"}


def test_lists_in_a_configuration_stand_for_each_of_their_values():
    config = {"runs": [{"workload": ["coding", "math"], "policy": ["verl", "heddle"]}]}
    runs = planned_runs(config, REDUCED)
    assert len(runs) == 2 * 2 * REDUCED.seeds
    assert {a.job.rollout.trajectories for a in runs} == {100 * REDUCED.gpus}
    assert {a.job.rollout.seed for a in runs} == {101, 102}
    assert {a.job.cluster.prediction_s for a in runs} == {0.10, 0.27}
    large = planned_runs({"runs": [{"model": "qwen3-32b"}]}, FULL)
    assert {(a.job.cluster.tp, a.job.rollout.trajectories) for a in large} == {(2, 3200)}


def test_every_policy_is_given_the_same_rollouts():
    config = {"runs": [{"policy": ["verl", "heddle"], "max_running": [50, 100]}]}
    by_seed: dict[int, set[Rollout]] = {}
    for run in planned_runs(config, FULL):
        by_seed.setdefault(run.job.rollout.seed, set()).add(run.job.rollout)
    assert [len(rollouts) for rollouts in by_seed.values()] == [1, 1, 1]


def test_a_key_that_nothing_reads_is_refused():
    with pytest.raises(ValueError, match="polcy"):
        planned_runs({"runs": [{"polcy": "verl"}]}, REDUCED)


def test_tools_can_be_scaled_and_nothing_else_moves():
    plain, slow = records_of(ROLLOUT), records_of(replace(ROLLOUT, tool_scale=3.0))
    for a, b in zip(plain, slow, strict=True):
        assert [s.output_tokens for s in a.steps] == [s.output_tokens for s in b.steps]
        called = [(x.tool_s, y.tool_s) for x, y in zip(a.steps, b.steps, strict=True) if x.tool_s]
        assert called
        assert all(y == pytest.approx(3.0 * x, abs=1e-6) for x, y in called)


def test_sessions_have_the_shape_that_their_source_describes():
    steps = sorted(len(r.steps) for r in records_of(Rollout(workload="sessions", trajectories=610)))
    assert 26 <= steps[305] <= 32
    assert 49 <= steps[549] <= 63
    assert steps[-1] <= 99


def test_a_recorded_trace_that_is_not_there_is_a_reason_to_skip(tmp_path: Path):
    absent = Rollout(workload="x", path="../shared/traces/no-such-trace.jsonl.gz")
    with pytest.raises(Skipped, match="no-such-trace"):
        trace_of(absent, tmp_path)
