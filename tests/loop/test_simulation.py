"""A simulated loop: closed forms, every regime on a real cluster model, failures, replay."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.config_files import ConfigError
from heddle.loops.comparison import compare_regimes, run_loop
from heddle.loops.config import LoopConfig
from heddle.loops.setup import LoopSetup, loop_core, prepare_loop, regime_of
from heddle.loops.splits import splits
from heddle.reports.run_bounds import run_bound
from heddle.runs import load_run
from heddle.runs.replay import replay
from heddle.setup import Workspace, prepare
from heddle.workload import CapacityError
from heddle_core.commands import (
    AccumulateGradients,
    AssignGpus,
    Command,
    Dispatch,
    Migrate,
    StartEngine,
    StartTrajectory,
    Train,
)
from heddle_core.controller import Controller
from heddle_core.events import EngineUpdated, Event, GpusAssigned, Trained
from heddle_core.ids import EngineId
from heddle_core.loop.hybrid import HYBRID
from heddle_core.loop.presets import REGIMES
from heddle_sim.loop import LoopSimulation
from heddle_sim.rollout import simulate_rollout
from heddle_sim.services import Latency, ServiceConfig
from heddle_sim.training import TrainLayout
from heddle_sim.training_files import load_training
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.in_turn import in_turn

GROUPS, SAMPLES, STEPS = 4, 4, 9
PER_GROUP = 6
"""Samples of a prompt in the trace: a regime may start more than it trains."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("loop") / "coding.jsonl.gz"
    prompts = GROUPS * (STEPS + 4)
    write_trace(
        path,
        synth("coding", trajectories=prompts * PER_GROUP, samples_per_group=PER_GROUP, seed=2),
    )
    return str(path)


def config(trace: str, *names: str, policy: str = "verl", **changes: object) -> LoopConfig:
    pooled = any(name.startswith("libra") and ":" in name for name in names)
    cluster = ClusterConfig(gpus=8 if pooled else 4, tp=2, max_running=8)
    run = RunConfig(trace=trace, cluster=cluster, policy=PolicyConfig(preset=policy))
    made = LoopConfig(
        run=run, regimes=names or ("sync",), groups=GROUPS, samples=SAMPLES, batches=STEPS
    )
    return replace(made, **changes)


class Recorded:
    """A loop's core that keeps every entry and checks both ledgers after each."""

    def __init__(self, setup: LoopSetup) -> None:
        self.rollouts = Controller(setup.run.policy)
        self.core = loop_core(setup, self.rollouts)
        self.entries: list[tuple[Event, tuple[Command, ...]]] = []

    @property
    def deadline_s(self) -> float | None:
        return self.core.deadline_s

    @property
    def over(self) -> bool:
        return self.core.over

    def handle(self, event: Event) -> Sequence[Command]:
        commands = tuple(self.core.handle(event))
        self.entries.append((event, commands))
        self.core.groups.check()
        self.rollouts.ledger.check()
        return commands


def prepared(trace: str, name: str, **changes: object) -> LoopSetup:
    return prepare_loop(config(trace, name, **changes), name, workspace=Workspace())


def run(setup: LoopSetup) -> Recorded:
    core = Recorded(setup)
    LoopSimulation(core, setup.run.simulation, setup.world).run()
    return core


def times(core: Recorded, kind: type) -> list[float]:
    return [event.time_s for event, _ in core.entries if type(event) is kind]


def commands_of(core: Recorded, *kinds: type) -> list[Command]:
    return [c for _, commands in core.entries for c in commands if isinstance(c, kinds)]


def trains(core: Recorded) -> list[tuple[float, Train]]:
    return [
        (event.time_s, command)
        for event, commands in core.entries
        for command in commands
        if isinstance(command, Train)
    ]


def test_a_synchronous_step_is_its_rollout_its_training_and_its_update(trace: str):
    setup = prepared(trace, "sync")
    core = run(setup)
    begun, ended = trains(core), times(core, Trained)
    updates = sorted(set(times(core, EngineUpdated)))
    scripts = list(setup.data.groups.values())
    for step in range(STEPS):
        started_s = 0.0 if step == 0 else updates[step - 1]
        mine = [
            s for group in scripts[step * GROUPS : (step + 1) * GROUPS] for s in group[:SAMPLES]
        ]
        alone = prepare(setup.config.run)
        ends: list[float] = []
        rollout = Controller(alone.policy)
        clocked = _Clocked(rollout, ends)
        simulate_rollout(
            [replace(script, arrival_s=0.0) for script in mine], clocked, alone.simulation
        )
        assert begun[step][0] - started_s == pytest.approx(ends[-1])
        tokens = [s.steps[-1].prompt_tokens + s.steps[-1].output_tokens for s in mine]
        train_s = setup.world.train_s(tokens, True)
        assert ended[step] - begun[step][0] == pytest.approx(train_s)
        if step < STEPS - 1:
            assert updates[step] - ended[step] == pytest.approx(setup.world.update_s)


class _Clocked:
    def __init__(self, core: Controller, ends: list[float]) -> None:
        self._core, self._ends = core, ends

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s

    def handle(self, event):
        self._ends.append(event.time_s)
        return self._core.handle(event)


def test_one_step_off_trains_while_it_generates(trace: str):
    core = run(prepared(trace, "one-step-off"))
    begun = trains(core)
    starts = [
        (event.time_s, command)
        for event, commands in core.entries
        for command in commands
        if isinstance(command, StartTrajectory)
    ]
    second = next(time_s for time_s, _ in starts if time_s > 0.0)
    assert second == begun[0][0]
    updated = sorted(set(times(core, EngineUpdated)))
    # The update waits for the training and for the rollout that it overlaps with.
    assert updated[0] >= times(core, Trained)[0]
    assert begun[1][0] >= updated[0]


def test_a_trainer_that_takes_long_sets_the_pace_of_an_asynchronous_loop(trace: str):
    setup = prepared(trace, "areal")
    slow = replace(setup, world=replace(setup.world, train_s=lambda tokens, pool_trains: 5_000.0))
    figures, _, _ = run_loop(slow, lambda _: None)
    assert figures.mean_step_s == pytest.approx(5_000.0 + setup.world.update_s, rel=0.01)
    assert figures.training_s == pytest.approx(STEPS * 5_000.0)


SMALL = {
    "libra": "libra:pool_gpus=4",
    "libra-release": "libra-release:pool_gpus=4",
    "verl-separate-async": "verl-separate-async:parameter_sync_step=1",
}
"""Regimes whose defaults are too large for this cluster and number of steps."""


@pytest.mark.parametrize(
    ("name", "policy"),
    in_turn([SMALL.get(name, name) for name in REGIMES], ["verl", "heddle", "slime-2026"]),
)
def test_every_regime_survives_failing_engines_environments_and_rewards(
    trace: str, name: str, policy: str
):
    setup = prepared(trace, name, policy=policy)
    flaky = replace(
        setup.world,
        environments=ServiceConfig(
            latency=Latency(seconds=5.0, sigma=4.0), capacity=6, failure_rate=0.1
        ),
        rewards=ServiceConfig(latency=Latency(seconds=2.0), capacity=2, failure_rate=0.1),
    )
    faults = ((40.0, EngineId("e0")), (90.0, EngineId("e1")), (200.0, EngineId("e0+1")))
    simulation = replace(setup.run.simulation, faults=faults, engine_start_s=20.0)
    setup = replace(setup, world=flaky, run=replace(setup.run, simulation=simulation))
    core = run(setup)
    trained = [
        t for command in commands_of(core, AccumulateGradients, Train) for t in command.trajectories
    ]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * SAMPLES
    again = Recorded(prepared(trace, name, policy=policy))
    for event, commands in core.entries:
        assert again.handle(event) == commands


@pytest.mark.parametrize("name", ["sync", "april", "rollpacker"])
def test_colocated_engines_generate_nothing_while_the_trainer_has_the_gpus(trace: str, name: str):
    setup = prepared(trace, name, colocated=True)
    core = run(setup)
    begun, ended = trains(core), times(core, Trained)
    tokens = {
        event.time_s: event.output_tokens
        for event, _ in core.entries
        if type(event).__name__ == "StepFinished"
    }
    for (began_s, _), ended_s in zip(begun, ended, strict=True):
        assert not [at for at in tokens if began_s < at < ended_s]


def test_engines_that_sleep_and_wake_take_the_times_of_their_keys(trace: str):
    def waits_s(**keys: float) -> list[float]:
        core = run(prepared(trace, "sync", colocated=True, **keys))
        updated = sorted(set(times(core, EngineUpdated)))
        return [at - end for end, at in zip(times(core, Trained), updated, strict=False)]

    slept = run(prepared(trace, "sync", colocated=True, sleep_s=9.0, wake_s=0.0))
    usual = run(prepared(trace, "sync", colocated=True, sleep_s=0.0, wake_s=0.0))
    assert trains(slept)[0][0] - trains(usual)[0][0] == pytest.approx(9.0)
    longer = zip(waits_s(wake_s=20.0), waits_s(wake_s=0.0), strict=True)
    assert [each - other for each, other in longer] == pytest.approx([20.0] * (STEPS - 1))


def test_interrupted_steps_go_on_with_their_tokens(trace: str):
    setup = prepared(trace, "areal:max_head_offpolicyness=2")
    core = run(setup)
    preempted = [e for e, _ in core.entries if type(e).__name__ == "StepPreempted"]
    assert preempted
    made: dict[str, int] = {}
    for event, _ in core.entries:
        if type(event).__name__ in ("StepFinished", "StepPreempted"):
            made[event.trajectory] = made.get(event.trajectory, 0) + event.output_tokens
    for _, command in trains(core):
        for trajectory in command.trajectories:
            group, _, number = trajectory.partition("/")
            script = setup.data.script(group, int(number))
            assert made[trajectory] == sum(step.output_tokens for step in script.steps)


def test_memory_does_not_grow_with_the_steps(trace: str):
    setup = prepared(trace, "areal", batches=40, repeat=True)
    core = run(setup)
    assert core.core.groups.samples == {}
    assert core.core.groups.open == {}
    assert core.rollouts.ledger.trajectories == {}
    assert len(core.rollouts.rollouts.closed) <= 2


def test_figures_of_a_comparison_fit_together(trace: str):
    result = compare_regimes([config(trace, "sync", "areal", "rollpacker:eta_responses=1.5")])
    sync, areal, packer = result.regimes
    assert sync.staleness == {0: len(sync.runs[0].step_s) * GROUPS * SAMPLES}
    assert areal.step_s.mean < sync.step_s.mean
    assert sync.length_bias == pytest.approx(1.0)
    assert packer.length_bias < 1.0
    assert packer.wasted_share > 0.0
    for row in result.regimes:
        assert row.samples_per_s == pytest.approx(GROUPS * SAMPLES / row.step_s.mean)
        assert 0.0 < row.bound_fraction <= 1.0
        assert 0.0 < row.rollout_busy <= 1.0
        assert 0.0 < row.train_busy <= 1.0
    told = result.plain()
    assert told["schema"] == "heddle.loop/1"
    assert [r["regime"] for r in told["regimes"]] == [r.setup.name for r in result.regimes]


def test_processes_change_no_result(trace: str):
    configs = [config(trace, "sync", "rollart", seeds=2, batches=5)]
    alone, together = (compare_regimes(configs, jobs=jobs).plain() for jobs in (1, 2))
    assert alone == together


def test_a_run_directory_is_replayed_and_reported(trace: str, tmp_path: Path):
    names = ("rollpacker:eta_responses=1.5", "areal:max_head_offpolicyness=1", "april")
    compare_regimes([config(trace, *names, policy="heddle", batches=5)], out=tmp_path)
    runs = [load_run(path) for path in tmp_path.iterdir()]
    assert {run.label for run in runs} == {f"{name} heddle s0" for name in names}
    for run in runs:
        result = replay(run)
        assert result.divergence is None
        assert result.entries > 100
        assert run.summary["trained_batches"] == 5
        assert run.summary["cancelled"] > 0
        assert 0.0 < run.summary["utilisation"] <= 1.0
        assert "part of its trace" in run_bound(run)["why"]
    longer = replace(config(trace, "sync"), repeat=True)
    figures = compare_regimes([longer], out=tmp_path).regimes[0].runs[0]
    (path,) = tmp_path.glob("*-sync-*")
    assert load_run(path).summary["rl_step_s"] == pytest.approx(figures.mean_step_s)


def test_a_trainer_hands_its_weights_to_a_relay_and_waits_for_no_engine(trace: str):
    waiting, relayed = (prepared(trace, name) for name in ("pipelinerl", "laminar"))
    more_s = relayed.world.train_s([900], False) - waiting.world.train_s([900], False)
    assert more_s == pytest.approx(relayed.update.hand_over_s) == pytest.approx(0.295, abs=0.01)
    assert relayed.world.pause_s == pytest.approx(0.63 * waiting.world.pause_s)
    found = compare_regimes([config(trace, "pipelinerl", "laminar")]).regimes
    updates = [each.runs[0].mean_split["update"] for each in found]
    assert updates == [pytest.approx(waiting.world.update_s), 0.0]


def test_the_same_seed_gives_the_same_figures(trace: str):
    first, second = (compare_regimes([config(trace, "rollart")]).plain() for _ in range(2))
    assert first == second


def test_tokens_of_cancelled_steps_count_as_wasted(trace: str):
    setup = prepared(trace, "rollpacker:eta_prompts=1.5:eta_responses=1.5")
    lost = 0

    def count(trajectory: str, tokens: int) -> None:
        nonlocal lost
        lost += tokens

    core = Recorded(setup)
    simulation = LoopSimulation(core, setup.run.simulation, setup.world, on_tokens_lost=count)
    simulation.run()
    reported = sum(
        event.output_tokens
        for event, _ in core.entries
        if type(event).__name__ in ("StepFinished", "StepPreempted")
    )
    engines = [simulation.launcher.engine(EngineId(name)) for name in ("e0", "e1")]
    decoded = sum(engine._model.decoded_tokens for engine in engines)
    assert lost > 0
    assert reported + lost == decoded
    figures, _, _ = run_loop(
        prepared(trace, "rollpacker:eta_prompts=1.5:eta_responses=1.5"), lambda _: None
    )
    assert figures.wasted_tokens + figures.all_trained_tokens == decoded


def test_no_loop_beats_its_bound(trace: str):
    for colocated in (False, True):
        for name in ("sync", "april:over_sampling=3", "rollpacker:eta_responses=1.5"):
            one = config(trace, name, colocated=colocated, repeat=True, batches=12)
            (row,) = compare_regimes([one]).regimes
            assert row.bound_fraction <= 1.0
    eager = config(trace, "pipelinerl:attempts_in_flight=64", repeat=True, batches=20)
    (row,) = compare_regimes([eager]).regimes
    assert 0.5 < row.bound_fraction <= 1.0


def test_an_engine_that_comes_back_during_training_waits_for_its_gpus(trace: str):
    setup = prepared(trace, "april", colocated=True)
    first = run(setup)
    began_s = trains(first)[1][0]
    faults = ((began_s - 5.0, EngineId("e0")),)
    simulation = replace(setup.run.simulation, faults=faults, engine_start_s=6.0)
    slow = replace(setup.world, train_s=lambda tokens, pool_trains: 500.0)
    again = prepared(trace, "april", colocated=True)
    core = run(replace(again, world=slow, run=replace(again.run, simulation=simulation)))
    begun, ended = trains(core), times(core, Trained)
    finished = [e.time_s for e, _ in core.entries if type(e).__name__ == "StepFinished"]
    for (time_s, _), ended_s in zip(begun, ended, strict=True):
        assert not [at for at in finished if time_s < at < ended_s]


def test_what_a_loop_cannot_do_is_refused(trace: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="without an oracle"):
        prepared(trace, "sync", policy="heddle+oracle")
    with pytest.raises(ConfigError, match=r"take loop\.batches = 7 or more"):
        prepared(trace, "areal", batches=6)
    mixed = config(trace)
    cluster = replace(mixed.run.cluster, mix=(2, 1, 1))
    with pytest.raises(ConfigError, match="engines of one TP degree"):
        splits(replace(mixed, run=replace(mixed.run, cluster=cluster)), [2], [2])
    path = tmp_path / "hash.jsonl"
    write_trace(path, synth("coding", trajectories=8, samples_per_group=4, seed=1))
    path.write_text(path.read_text().replace("coding-00001", "coding#1"))
    with pytest.raises(ConfigError, match="give it another name"):
        prepared(str(path), "sync", groups=1, batches=3)


def test_gradients_of_complete_groups_shorten_a_step_and_train_the_same_batch(trace: str):
    # By a quick update, so that training is more of a step.
    late, early = (
        prepared(trace, name, update_method="rdma_p2p")
        for name in ("heddle-loop:accumulate_from=0", "heddle-loop")
    )
    waiting, _, _ = run_loop(late, lambda _: None)
    figures, _, trained = run_loop(early, lambda _: None)
    assert figures.mean_step_s < waiting.mean_step_s
    assert len(trained) == STEPS * GROUPS * SAMPLES
    core = run(prepared(trace, "heddle-loop"))
    parts = commands_of(core, AccumulateGradients)
    assert parts
    for batch, command in enumerate(commands_of(core, Train)):
        of_batch = [p for p in parts if p.batch == batch]
        size = len(command.trajectories) + sum(len(p.trajectories) for p in of_batch)
        assert size == GROUPS * SAMPLES


def test_a_long_sample_takes_its_data_parallel_rank_as_long_alone_as_among_others(trace: str):
    world = prepared(trace, "heddle-loop").world
    assert world.accumulate_s([8_000], True) == world.accumulate_s([8_000, 1, 1], True)
    assert world.accumulate_s([8_000] * 8, True) > world.accumulate_s([8_000], True)


def test_lent_gpus_generate_between_the_moments_they_change_sides(trace: str):
    setup = prepared(trace, SMALL["verl-separate-async"])
    core = run(setup)
    roles = [e.role for e, _ in core.entries if isinstance(e, GpusAssigned)]
    assert roles[:2] == ["rollout", "training"]
    assert roles == ["rollout", "training"] * (len(roles) // 2)
    lent = [c for c in commands_of(core, Dispatch) if c.engine.startswith(HYBRID)]
    assert lent
    assigned = [(e.time_s, e.role) for e, _ in core.entries if isinstance(e, GpusAssigned)]
    for began_s, _ in trains(core):
        before = [role for time_s, role in assigned if time_s <= began_s]
        assert not before or before[-1] == "training"


def test_the_pool_of_libra_joins_the_side_that_is_slower(trace: str):
    setup = prepared(trace, SMALL["libra"])
    assert setup.gpus == 8 + setup.train_gpus
    slow = replace(setup.world, train_s=lambda tokens, pool_trains: 100.0 if pool_trains else 200.0)
    core = run(replace(setup, world=slow))
    # It trains at first, and training stays the slower side.
    assert not times(core, GpusAssigned)
    quick = replace(setup.world, train_s=lambda tokens, pool_trains: 0.1)
    core = run(replace(setup, world=quick))
    assert [e.role for e, _ in core.entries if isinstance(e, GpusAssigned)][:1] == ["rollout"]


@pytest.mark.parametrize("name", ["libra", "verl-separate-async"])
def test_gpus_whose_switch_fails_return_to_where_they_were(trace: str, name: str):
    setup = prepared(trace, SMALL[name], switch_failure_rate=0.5, switch_timeout_s=33.0)
    if name == "libra":
        # Either side is the slower one as soon as it has no more than its own.
        uneven = replace(
            setup.world, train_s=lambda tokens, pool_trains: 0.1 if pool_trains else 2_000.0
        )
        setup = replace(setup, world=uneven)
    core = run(setup)
    side, asked = "training", 0.0
    fates = []
    for event, commands in core.entries:
        if isinstance(event, GpusAssigned):
            fates.append(event.ok)
            side = event.role if event.ok else side
            if not event.ok:
                assert event.time_s == pytest.approx(asked + 33.0)
        for command in commands:
            if isinstance(command, AssignGpus):
                asked = event.time_s
            lent = isinstance(command, StartEngine) and command.engine.startswith(HYBRID)
            assert not lent or side == "rollout"
            if isinstance(command, Train) and name != "libra":
                assert side == "training"
    assert set(fates) == {True, False}
    assert len(trains(core)) == STEPS


def test_switches_of_gpus_are_counted(trace: str):
    setup = prepared(trace, SMALL["verl-separate-async"], switch_failure_rate=0.5)
    figures, _, _ = run_loop(setup, lambda _: None)
    assert figures.gpu_switches > figures.failed_switches > 0
    with pytest.raises(ConfigError, match="by turns, which sync has none of"):
        compare_regimes([config(trace, "sync", switch_failure_rate=0.5)])


@pytest.mark.parametrize(
    ("cluster", "pool"),
    [
        (ClusterConfig(gpus=24, tp=2), 8),
        (ClusterConfig(gpus=8, tp=2), 4),
        (ClusterConfig(gpus=4, tp=2), 2),
        (ClusterConfig(gpus=2), 1),
    ],
)
def test_a_pool_of_no_given_size_leaves_an_engine(trace: str, cluster: ClusterConfig, pool: int):
    loop = replace(config(trace), run=replace(config(trace).run, cluster=cluster))
    for name in ("libra", "libra-release:plan_interval=0"):
        hybrid = regime_of(loop, name).split.hybrid
        assert hybrid is not None
        assert hybrid.own_gpus == pool


def test_a_pool_that_leaves_no_engine_is_refused(trace: str):
    small = replace(config(trace).run, cluster=ClusterConfig(gpus=4, tp=2))
    with pytest.raises(CapacityError, match="pool of 8 of the 4 GPUs that do not train"):
        prepared(trace, "libra:pool_gpus=8", run=small)
    with pytest.raises(CapacityError, match="no whole engines of 2 GPUs"):
        prepared(trace, SMALL["verl-separate-async"], train_gpus=1)


def test_the_gpus_of_a_pool_are_taken_out_once(trace: str):
    small = replace(config(trace, SMALL["libra"]), repeat=True, batches=12)
    (row,) = compare_regimes([small]).regimes
    assert row.setup.gpus == 8 + small.train_gpus
    assert row.setup.config.run.cluster.gpus == 4
    (again,) = compare_regimes([small, replace(small, train_gpus=16)], fitting_only=True).regimes
    assert again.value("makespan") <= row.value("makespan")


def test_a_run_directory_of_a_pool_is_replayed_where_its_slots_bind(trace: str, tmp_path: Path):
    small = replace(config(trace, SMALL["libra"]), repeat=True, batches=12)
    cluster = replace(small.run.cluster, max_running=2)
    small = replace(small, run=replace(small.run, cluster=cluster))
    compare_regimes([small], out=tmp_path)
    (path,) = tmp_path.iterdir()
    run_ = load_run(path)
    assert run_.config.cluster.gpus == 8
    assert replay(run_).divergence is None


def test_waiting_for_lent_gpus_is_no_waiting_for_rewards(trace: str):
    setup = prepared(trace, SMALL["verl-separate-async"] + ":num_warmup_batches=0")
    figures, _, _ = run_loop(setup, lambda _: None)
    assert figures.mean_split["reward"] == pytest.approx(0.0, abs=1e-9)


def test_the_bound_does_not_count_what_parts_of_a_batch_cost(trace: str):
    many = {"train_backend": "fsdp", "logprob_passes": 8, "train_gpus": 8}
    bounds = []
    for name in ("heddle-loop", "heddle-loop:accumulate_from=0"):
        setup = prepared(trace, name, **many)
        figures, _, trained = run_loop(setup, lambda _: None)
        bounds.append((setup.bound_s(trained, figures), figures.training_s))
    assert bounds[0][1] > 1.1 * bounds[1][1]
    assert bounds[0][0] < bounds[0][1]
    assert bounds[0][0] == pytest.approx(bounds[1][0], rel=0.05)


def test_every_part_gathers_sharded_parameters(trace: str):
    sharded = prepared(trace, "heddle-loop", train_backend="fsdp", logprob_passes=0).world
    whole = sharded.train_s([4_000] * 8, True)
    assert 2 * sharded.accumulate_s([4_000] * 4, True) > whole


def test_a_trainer_has_the_precision_and_the_padding_of_its_keys(trace: str):
    def train_s(**changes: object) -> float:
        return prepared(trace, "sync", **changes).world.train_s([500, 500, 8_000], False)

    assert train_s(train_precision="fp8") < train_s() < train_s(train_padded=True)
    with pytest.raises(ValueError, match="does not train in 'mxfp8', but in bf16, fp8"):
        prepared(trace, "sync", train_precision="mxfp8")
    assert train_s(train_precision="mxfp8", train_gpu="b200") < train_s(train_gpu="b200")


def test_a_colocated_trainer_has_the_speed_of_its_key_or_that_of_verl(trace: str):
    def train_s(speed: float | None) -> float:
        one = prepared(trace, "sync", colocated=True, colocated_speed=speed, logprob_passes=0)
        return one.world.train_s([4_000] * 8, False)

    assert train_s(0.5) == pytest.approx(2 * train_s(1.0))
    assert train_s(1.0) < train_s(None) < train_s(0.5)


def test_experts_are_spread_over_a_node_before_tp_cuts_them(trace: str):
    def layout(gpus: int, **changes: object) -> TrainLayout:
        one = config(trace, "sync", train_gpus=gpus, **changes).on(model="qwen3-30b-a3b")
        return prepare_loop(one, "sync", workspace=Workspace()).layout

    assert (layout(32).tp, layout(32).ep) == (1, 8)
    assert layout(32, train_ep=16).ep == 16
    with pytest.raises(ValueError, match="and EP 64 divides 32 GPUs"):
        layout(32, train_ep=64)
    with pytest.raises(ValueError, match="train_ep = 5 does not divide the 128 experts"):
        layout(40, train_ep=5)
    assert prepared(trace, "sync").layout.ep == 1
    assert prepared(trace, "sync", train_ep=1).layout.ep == 1
    with pytest.raises(ValueError, match=r"train_ep = 2 is of models with experts"):
        prepared(trace, "sync", train_ep=2)


def test_context_parallelism_holds_longer_samples_on_fewer_ranks(trace: str):
    def made(**keys: object) -> LoopSetup:
        one = config(trace, "sync", train_gpus=8, train_pp=1, train_tp=1, **keys)
        return prepare_loop(one.on(model="qwen3-0.6b"), "sync", workspace=Workspace())

    whole, cut = made().world, made(train_cp=4).world
    assert made(train_cp=4).layout.data_parallel(8) == 2
    assert whole.train_s([100_000], False) > 3.5 * cut.train_s([100_000], False)
    even, short = [16_000] * 48, [1_000] * 800
    assert whole.train_s(even, False) == pytest.approx(cut.train_s(even, False))
    # Attention of short ones does not hide the exchange.
    assert 1.2 * whole.train_s(short, False) < cut.train_s(short, False)
    with pytest.raises(ValueError, match="CP 3 and EP any divides 8 GPUs"):
        made(train_cp=3)


def test_a_published_step_with_context_parallelism_can_be_written(trace: str):
    """NeMo-RL 0.4, Qwen3-235B-A22B on 128 H100: TP 2, CP 2, EP 16, PP 8."""
    keys = {"train_tp": 2, "train_cp": 2, "train_ep": 16, "train_pp": 8}
    one = config(trace, "sync", train_gpus=128, **keys).on(model="qwen3-235b-a22b", tp=8, gpus=8)
    layout = prepare_loop(one, "sync", workspace=Workspace()).layout
    assert (layout.tp, layout.cp, layout.ep, layout.pp) == (2, 2, 16, 8)


def test_weights_of_engines_in_fp8_take_about_half_of_the_bytes(trace: str):
    def update_s(model: str) -> float:
        one = config(trace, "sync").on(model=model)
        return prepare_loop(one, "sync", workspace=Workspace()).update.total_s

    bf16, fp8 = update_s("llama-3.1-8b"), update_s("llama-3.1-8b-fp8")
    assert bf16 / 2 < fp8 < bf16


def test_parts_of_a_batch_have_one_optimizer_step(trace: str):
    with pytest.raises(ConfigError, match=r"accumulate_from=0, or loop\.optimizer_steps = 1"):
        prepared(trace, "heddle-loop", optimizer_steps=2)
    assert prepared(trace, "heddle-loop:accumulate_from=0", optimizer_steps=2).regime


def test_a_pool_that_the_trainer_cannot_take_is_named(trace: str):
    with pytest.raises(ValueError, match="pool_gpus must be a multiple of 4, not 2"):
        prepared(trace, "libra:pool_gpus=2", train_tp=4)


def test_engines_on_lent_gpus_share_the_trajectories_evenly(trace: str):
    core = run(prepared(trace, SMALL["verl-separate-async"], train_gpus=8))
    members: dict[str, set[str]] = {}
    for event, commands in core.entries:
        if isinstance(event, GpusAssigned) and event.role == "training":
            break
        for command in commands:
            if isinstance(command, Dispatch | Migrate):
                engine = command.engine if isinstance(command, Dispatch) else command.target
                if engine.startswith(HYBRID):
                    members.setdefault(engine, set()).add(command.trajectory)
    counts = sorted(len(each) for each in members.values())
    assert len(counts) == 4
    assert 3 * counts[0] >= counts[-1], counts


def test_a_regime_has_the_split_that_ranks_best(trace: str):
    """A split that leaves long trajectories out is quicker, and not the better one."""
    result = compare_regimes([config(trace, "sync")])
    (row,) = result.tried
    (run_,) = row.runs
    short = replace(
        run_,
        step_s=tuple(0.9 * seconds for seconds in run_.step_s),
        mean_trained_tokens=0.8 * run_.mean_trained_tokens,
    )
    quicker = replace(row, runs=(short,), step_s=replace(row.step_s, mean=0.9 * row.step_s.mean))
    assert quicker.equal_samples_per_s < row.equal_samples_per_s
    assert replace(result, tried=(quicker, row)).regimes == (row,)


@pytest.mark.parametrize("regime", ["areal:max_head_offpolicyness=2", "heddle-loop", "rollpacker"])
def test_rates_and_lengths_are_of_the_same_batches(trace: str, regime: str):
    (row,) = compare_regimes([config(trace, regime)]).tried
    (run_,) = row.runs
    measured = run_.batches[run_.first_measured :]
    tokens = sum(batch.tokens for batch in measured)
    assert run_.mean_trained_tokens == tokens / sum(batch.trajectories for batch in measured)
    assert run_.samples_per_s * run_.mean_trained_tokens == pytest.approx(run_.tokens_per_s)


def test_regimes_rank_by_tokens_of_like_lengths(trace: str):
    """A regime that drops long trajectories has quicker batches, and less data in each."""
    result = compare_regimes([config(trace, "sync", "one-step-off")])
    sync, _ = result.tried
    assert not result.warnings
    (run_,) = sync.runs
    quicker = tuple(0.8 * seconds for seconds in run_.step_s)
    short = replace(run_, step_s=quicker, mean_trained_tokens=0.7 * run_.mean_trained_tokens)
    step = replace(sync.step_s, mean=0.8 * sync.step_s.mean)
    short_row = replace(sync, runs=(short,), step_s=step, setup=replace(sync.setup, name="short"))
    assert short_row.equal_samples_per_s == pytest.approx(sync.samples_per_s * 0.7 / 0.8)
    turned = replace(result, tried=(short_row, sync))
    assert [row.setup.name for row in turned.ranking] == ["sync", "short"]
    assert turned.warnings == [
        "by makespan per sample, of any length, the order is short (0.70 of the length, 0% "
        "wasted), sync (1.00 of the length, 0% wasted)",
        "short: what it trains has 0.70 of the length of what starts, over 8 measured batches: "
        "with more loop.batches its rank may change",
    ]
    equal = replace(result, tried=(sync, replace(sync, setup=replace(sync.setup, name="other"))))
    assert equal.verdict.endswith(" s a step, at equal data as fast as other.")
    assert turned.verdict.endswith("at equal data 14 % faster than the next best, short.")
    by_cost = replace(turned, objective="cost")
    assert [row.setup.name for row in by_cost.ranking] == ["sync", "short"]
    assert turned.plain()["warnings"] == turned.warnings


def test_the_times_of_lending_gpus_are_keys(trace: str):
    world = prepared(trace, SMALL["libra"]).world
    assert (world.to_rollout_s, world.to_training_s) == (10.8, 8.0)
    name = SMALL["verl-separate-async"]
    slow = prepared(trace, name, lend_s=40.0, return_s=30.0)
    assert (slow.world.to_rollout_s, slow.world.to_training_s) == (40.0, 30.0)
    core = run(slow)
    asked = {"rollout": 40.0, "training": 30.0}
    began: dict[str, float] = {}
    moves = 0
    for event, commands in core.entries:
        if isinstance(event, GpusAssigned):
            assert event.time_s - began[event.role] == pytest.approx(asked[event.role])
            moves += 1
        began |= {c.role: event.time_s for c in commands if isinstance(c, AssignGpus)}
    assert moves
    shared = prepared(trace, "sync", colocated=True, lend_s=40.0).world
    assert shared.to_rollout_s == 6.53


@pytest.mark.parametrize(
    ("method", "colocated", "loan"),
    [("reload", (0.31, 6.53), (8.0, 10.8)), ("sleep", (0.33, 0.39), (3.3, 9.1))],
)
def test_a_method_has_the_times_of_its_sources(
    trace: str, method: str, colocated: tuple[float, float], loan: tuple[float, float]
):
    def times_s(name: str, **keys: object) -> tuple[float, float]:
        world = prepared(trace, name, switch=method, **keys).world
        return world.to_training_s, world.to_rollout_s

    assert times_s("sync", colocated=True) == colocated
    assert times_s(SMALL["libra"]) == loan
    assert times_s("sync", colocated=True, wake_s=2.5) == (colocated[0], 2.5)
    assert times_s(SMALL["libra"], return_s=0.0) == (0.0, loan[1])


def test_engines_on_standby_get_the_weights_of_the_trainer(trace: str):
    name = SMALL["verl-separate-async"]
    setup = prepared(trace, name, switch="standby")
    update = load_training().weight_update.time("qwen3-14b", "colocated", gpus=setup.train_gpus)
    assert setup.config.run.cluster.model == "qwen3-14b"
    assert setup.world.to_rollout_s == pytest.approx(0.05 + update.total_s)
    assert setup.world.to_training_s == 0.03
    assert prepared(trace, name, switch="standby", lend_s=7.0).world.to_rollout_s == 7.0
    shared = prepared(trace, "sync", colocated=True, switch="standby").world
    assert (shared.to_training_s, shared.to_rollout_s) == (0.03, 0.05)


def test_a_batch_beside_the_current_one_is_a_staleness_bound_of_1(trace: str):
    """No more than a batch is ever complete, so its order decides nothing."""
    names = ("april", "verl-colocate-async", "areal:max_head_offpolicyness=1")
    alike = [run(prepared(trace, name)) for name in names]
    assert len({tuple(times(core, Trained)) for core in alike}) == 1
    wider = run(prepared(trace, "april:over_sampling=3"))
    assert times(wider, Trained) != times(alike[0], Trained)
    few = run(prepared(trace, names[2] + ":max_concurrent_rollouts=4"))
    assert times(few, Trained) != times(alike[0], Trained)
