"""Services of a simulated loop: rewards, environments and tools, and what a step's seconds are."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config_files import ConfigError
from heddle.loops.comparison import compare_regimes, run_loop
from heddle.loops.config import LoopConfig
from heddle.loops.measure import LoopFigures, distance
from heddle.loops.setup import prepare_loop
from heddle.loops.splits import splits
from heddle.setup import Workspace
from heddle_core.events import Scored, ToolReturned, ToolStarted, TrajectoryArrived
from heddle_trace.files import read_trace, write_trace
from heddle_trace.loop_fields import with_loop_fields
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.synth import synth
from heddle_trace.table import Records
from tests.loop.test_simulation import (
    GROUPS,
    PER_GROUP,
    SAMPLES,
    STEPS,
    Recorded,
    config,
    prepared,
    run,
    trace,
)

__all__ = ["trace"]


def records() -> Records:
    prompts = GROUPS * (STEPS + 4)
    return synth("coding", trajectories=prompts * PER_GROUP, samples_per_group=PER_GROUP, seed=2)


def changed(path: Path, change) -> str:
    write_trace(path, [change(k, record) for k, record in enumerate(records())])
    return str(path)


def figures(trace: str, name: str, **changes: object) -> LoopFigures:
    return run_loop(prepared(trace, name, **changes), lambda _: None)[0]


def test_seconds_of_a_step_are_what_its_trainer_did_or_waited_for(trace: str):
    for colocated in (False, True):
        plain = figures(trace, "sync", colocated=colocated)
        slow = figures(trace, "sync", colocated=colocated, reward_s="50")
        for found in (plain, slow):
            assert sum(found.mean_split.values()) == pytest.approx(found.mean_step_s)
            assert min(found.mean_split.values()) >= 0.0
        assert plain.mean_split["reward"] == 0.0
        assert slow.mean_split["reward"] == pytest.approx(50.0)
        assert slow.mean_split["rollout"] == pytest.approx(plain.mean_split["rollout"])
        setup = prepared(trace, "sync", colocated=colocated)
        moves_s = setup.world.to_training_s + setup.world.to_rollout_s
        assert plain.mean_split["update"] == pytest.approx(setup.world.update_s + moves_s)
        assert plain.training_s == pytest.approx(sum(b.training_s for b in plain.batches))


def test_asynchronous_regimes_hide_rewards(trace: str):
    longer = []
    for name in ("sync", "one-step-off", "areal", "verl-fully-async"):
        slow = figures(trace, name, reward_s="50", batches=12)
        assert sum(slow.mean_split.values()) == pytest.approx(slow.mean_step_s)
        assert min(slow.mean_split.values()) >= 0.0
        longer.append(slow.mean_step_s - figures(trace, name, batches=12).mean_step_s)
    assert longer[0] == pytest.approx(50.0)
    assert longer[2] < 25.0


def test_a_reward_service_on_gpus_is_a_bound_and_costs_dollars(trace: str):
    loop = config(trace, "areal", reward_s="400", reward_gpus=2, reward_per_gpu=1)
    cluster = replace(loop.run.cluster, gpus=14)
    (split,) = splits(replace(loop, run=replace(loop.run, cluster=cluster)), [8], [2])
    assert split.run.cluster.gpus == 4
    (row,) = compare_regimes([split]).regimes
    assert row.setup.gpus == 14
    assert row.reward_busy == pytest.approx(1.0, abs=0.02)
    assert row.bound_fraction == pytest.approx(1.0, abs=0.02)
    assert row.samples_per_s == pytest.approx(2 / 400, rel=0.02)
    price = row.cost_per_1k_samples.dollars * row.samples_per_s * 3.6 / 14
    assert price == pytest.approx(2.7)
    plain = row.plain()
    assert plain["busy"]["reward"] == row.reward_busy
    assert plain["reward_gpus"] == 2
    with pytest.raises(ConfigError, match="2 train, 2 compute rewards, so 0 are left"):
        splits(replace(loop, run=replace(loop.run, cluster=replace(cluster, gpus=4))), [2], [2])


def test_an_elastic_reward_service_has_no_limit_and_no_share(trace: str):
    (row,) = compare_regimes([config(trace, "sync", reward_s="20")]).regimes
    assert row.reward_busy is None
    assert row.plain()["busy"]["reward"] is None
    work_s = 20.0 * GROUPS * SAMPLES * STEPS
    assert row.mean_rewards * row.runs[0].duration_s == pytest.approx(work_s, rel=0.05)
    cold = figures(trace, "sync", reward_s="20", reward_cold_start_s=7.0)
    never = figures(trace, "sync", reward_s="20", reward_cold_start_s=7.0, reward_keep_alive_s=1e8)
    assert cold.mean_split["reward"] >= never.mean_split["reward"] >= 20.0


def test_times_and_rewards_of_the_trace_hold_unless_an_option_replaces_them(tmp_path: Path):
    def own(k: int, record: TrajectoryRecord) -> TrajectoryRecord:
        values = {"reward": k / 1000, "reward_s": 30.0 + k, "env_start_s": 5.0 + k / 10}
        return replaced(record, **values)

    path = changed(tmp_path / "own.jsonl", own)
    scored = run(prepared(path, "sync"))
    rewards = {e.trajectory: e.reward for e, _ in scored.entries if isinstance(e, Scored)}
    numbers = {r.trajectory_id: k for k, r in enumerate(records())}
    ended = {e.trajectory: e.time_s for e, _ in scored.entries if is_end(e)}
    at = {e.trajectory: e.time_s for e, _ in scored.entries if isinstance(e, Scored)}
    arrived = [e for e, _ in scored.entries if isinstance(e, TrajectoryArrived)]
    for trajectory, reward in rewards.items():
        group, _, sample = trajectory.partition("/")
        k = numbers[f"{group}/{int(sample):02d}"]
        assert reward == k / 1000
        assert at[trajectory] - ended[trajectory] == pytest.approx(30.0 + k)
        if arrived[0].time_s <= 5.0 + GROUPS * PER_GROUP / 10 and k < GROUPS * PER_GROUP:
            (mine,) = [e.time_s for e in arrived if e.trajectory == trajectory]
            assert mine == pytest.approx(5.0 + k / 10)
    other = run(prepared(path, "sync", reward_s="1", env_start_s="2"))
    ended = {e.trajectory: e.time_s for e, _ in other.entries if is_end(e)}
    for event, _ in other.entries:
        if isinstance(event, Scored):
            assert event.time_s - ended[event.trajectory] == pytest.approx(1.0)


def is_end(event: object) -> bool:
    return type(event).__name__ == "TrajectoryFinished"


def replaced(record: TrajectoryRecord, **values: object) -> TrajectoryRecord:
    import msgspec

    return msgspec.structs.replace(record, **values)


def test_a_time_that_only_some_trajectories_have_is_refused(tmp_path: Path):
    def some(k: int, record: TrajectoryRecord) -> TrajectoryRecord:
        return replaced(record, reward_s=3.0) if k else record

    path = changed(tmp_path / "some.jsonl", some)
    with pytest.raises(ConfigError, match=r"lacks reward_s for 1 of \d+ .* give loop.reward_s"):
        prepared(path, "sync")
    assert prepared(path, "sync", reward_s="3")


def test_prompts_come_in_order_of_their_training_step_under_every_seed(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    numbered = list(with_loop_fields(records(), seed=0, steps=4))
    write_trace(path, numbered[::-1])
    known = {r.group_id: r.step for r in read_trace(path).records}
    for seed in (0, 1):
        loop = config(str(path), "sync")
        loop = replace(loop, run=replace(loop.run, seed=seed))
        setup = prepare_loop(loop, "sync", workspace=Workspace())
        order = [known[prompt.group] for prompt in setup.data.prompts(repeat=False)]
        assert order == sorted(order)


def test_prompts_without_a_step_come_last(tmp_path: Path):
    def some(k: int, record: TrajectoryRecord) -> TrajectoryRecord:
        return replaced(record, step=1) if k >= PER_GROUP else record

    path = changed(tmp_path / "last.jsonl", some)
    names = list(prepared(path, "sync").data.groups)
    assert names[-1] == records()[0].group_id


def test_latency_is_added_to_every_tool_call_and_is_the_same_under_every_regime(trace: str):
    def waits(name: str, **cluster: object) -> dict:
        loop = config(trace, name)
        loop = replace(loop, run=replace(loop.run, cluster=replace(loop.run.cluster, **cluster)))
        core = Recorded(prepare_loop(loop, name, workspace=Workspace()))
        return tool_times(core, loop, name)

    plain = waits("sync")
    slow = waits("sync", env_latency="10,5")
    other = waits("areal", env_latency="10,5")
    added = {key: slow[key] - plain[key] for key in plain.keys() & slow.keys()}
    assert len(added) > 200
    assert min(added.values()) >= -1e-9
    assert 8.0 < sum(added.values()) / len(added) < 12.0
    both = slow.keys() & other.keys()
    assert len(both) > 200
    assert all(slow[key] == pytest.approx(other[key]) for key in both)


def tool_times(core: Recorded, loop: LoopConfig, name: str) -> dict:
    """Seconds of each tool call, by trajectory and step."""
    from heddle_sim.loop import LoopSimulation

    setup = prepare_loop(loop, name, workspace=Workspace())
    LoopSimulation(core, setup.run.simulation, setup.world).run()
    began: dict = {}
    found: dict = {}
    for event, _ in core.entries:
        if isinstance(event, ToolStarted):
            began[event.trajectory] = event
        elif isinstance(event, ToolReturned):
            started = began[event.trajectory]
            found[event.trajectory, started.step] = event.time_s - started.time_s
    return found


def test_a_pool_of_the_only_tool_limits_the_loop(trace: str):
    loop = config(trace, "sync")
    cluster = replace(loop.run.cluster, tool_pools=("sandbox=1",), env_latency="5")
    setup = prepare_loop(
        replace(loop, run=replace(loop.run, cluster=cluster)), "sync", workspace=Workspace()
    )
    core = run(setup)
    running = most = 0
    for event, _ in core.entries:
        running += isinstance(event, ToolStarted)
        running -= isinstance(event, ToolReturned)
        most = max(most, running)
    assert most > 4
    returned = [e.time_s for e, _ in core.entries if isinstance(e, ToolReturned)]
    assert min(b - a for a, b in pairwise(returned)) >= 5.0 - 1e-9


def test_distance_of_two_samples():
    assert distance([1, 2, 3], [3, 1, 2]) == 0.0
    assert distance([1, 1], [2, 2]) == 1.0
    assert distance([1, 2, 3, 4], [3, 4]) == 0.5
    assert distance([1, 1, 1, 9], [1, 9, 9, 9]) == 0.5


def test_discarding_long_samples_shows_in_both_measures_of_bias(trace: str):
    packer = figures(trace, "rollpacker:eta_responses=1.5")
    assert packer.mean_trained_tokens < packer.mean_started_tokens
    assert 0.05 < packer.length_distance < 1.0
    assert figures(trace, "sync").length_distance == 0.0


def test_every_step_has_its_figures(trace: str):
    found = figures(trace, "areal:max_head_offpolicyness=2", batches=12)
    assert [batch.batch for batch in found.batches] == list(range(12))
    assert sum(batch.trajectories for batch in found.batches) == 12 * GROUPS * SAMPLES
    assert sum(batch.tokens for batch in found.batches) == found.all_trained_tokens
    assert sum(batch.wasted_tokens for batch in found.batches) == found.wasted_tokens
    measured = found.batches[found.first_measured :]
    total = sum(batch.mean_staleness * batch.trajectories for batch in measured)
    assert total / found.trained_trajectories == pytest.approx(found.mean_staleness)
    ends = [batch.end_s for batch in found.batches]
    assert ends[-1] == found.duration_s
    assert [b - a for a, b in pairwise(ends)] == pytest.approx(
        [batch.step_s for batch in found.batches[1:]]
    )


def test_groups_may_be_more_than_the_trajectories_that_ever_start():
    one = config("traces/tiny.jsonl", samples=1, groups=3, batches=10, env_failure_rate=0.3)
    one = replace(one, run=replace(one.run, cluster=ClusterConfig(gpus=8, model="qwen3-8b")))
    found = compare_regimes([replace(one, train_gpus=2, seeds=6)]).regimes[0]
    assert any(run.failed_starts for run in found.runs)
    assert all(run.trained_trajectories == 3 * len(run.step_s) for run in found.runs)


@pytest.mark.parametrize("name", ["sync", "areal", "rollpacker:eta_responses=1.5"])
def test_no_more_environments_are_alive_than_there_are(trace: str, name: str):
    setup = prepared(trace, name, environments=5, env_start_s="3", env_failure_rate=0.2)
    core = run(setup)
    alive: set = set()
    most = 0
    for event, _ in core.entries:
        if is_end(event):
            alive.discard(event.trajectory)
        elif isinstance(event, TrajectoryArrived):
            alive.add(event.trajectory)
        most = max(most, len(alive))
    assert most == 5
    few, many = (
        compare_regimes([config(trace, name, environments=n, env_start_s="3")]).regimes[0]
        for n in (5, 500)
    )
    assert few.step_s.mean > 1.2 * many.step_s.mean
    assert 0.5 < few.environment_busy < 1.0 + 1e-9
    assert many.environment_busy < 0.1


def test_a_trainer_that_sums_gradients_waits_for_rewards_between_parts_too(trace: str):
    slow = figures(trace, "heddle-loop", reward_s="400", reward_gpus=2, reward_per_gpu=1)
    split = slow.mean_split
    assert split["reward"] > 20.0 * split["rollout"]
    parts = ("rollout", "reward", "training", "update")
    assert sum(split[name] for name in parts) == pytest.approx(slow.mean_step_s)
