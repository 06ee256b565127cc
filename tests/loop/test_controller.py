"""The rules of every regime, in a world that fails, is late and answers in any order."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from heddle_core.commands import AccumulateGradients, StartTrajectory, UpdateWeights
from heddle_core.events import EngineReady, EngineUpdated, LoopStarted, Trained
from heddle_core.ids import EngineId, EngineShape
from heddle_core.ledger import LedgerError
from heddle_core.loop.controller import LoopController, TooManyFailuresError
from heddle_core.loop.hybrid import RatioPool, WaitLending
from heddle_core.loop.presets import REGIMES
from heddle_core.loop.regime import (
    Batching,
    BatchShape,
    Regime,
    RegimeError,
    Sampling,
    Split,
    Staleness,
    Update,
)
from heddle_core.loop.regime_text import regime_named
from heddle_core.loop.split_plan import GpuCounts, SplitPlan, SplitPlanner, StepEnd
from tests.in_turn import some
from tests.loop.worlds import HostileWorld, NoRollouts

POOL = RatioPool(plan=SplitPlan(interval=2, warm_up=0, history=1))
"""One that is planned within few steps."""
EVEN = GpuCounts(rollout=8, training=0, hybrid=8)
LOOPS = 100_000
PARTS = 40
"""Of the loops; the first is a test of every day, the others have mark soak."""


def shape(*, groups: int = 3, samples: int = 2, colocated: bool = False) -> BatchShape:
    return BatchShape(groups=groups, samples=samples, slots=8, colocated=colocated)


def any_regime(random_: random.Random) -> Regime:
    """A regime of random parts; most are accepted."""
    while True:
        try:
            return Regime(
                groups=random_.randint(1, 4),
                samples=random_.randint(1, 3),
                sampling=Sampling(
                    extra_groups=random_.choice((0, 0, 1, 3)),
                    extra_samples=random_.choice((0, 0, 1)),
                ),
                staleness=Staleness(
                    bound=random_.choice((0.0, 0.5, 1.0, 2.0, 4.0)),
                    counted_by=random_.choice(("version", "version", "batch", "nothing")),
                    late=random_.choice(("wait", "drop", "train")),
                    max_concurrent=random_.choice((None, 6, 20)),
                    growth=random_.choice((0.0, 0.0, 0.0, 1.0)),
                    admits=random_.choice(("slots", "groups", "samples")),
                ),
                batching=Batching(
                    order=random_.choice(("oldest", "first_finished", "started")),
                    equal_rewards=random_.choice(("train", "train", "drop")),
                    rest=random_.choice(("keep", "cancel", "defer")),
                    accumulate_from=random_.choice((None, None, 1, 2)),
                    most_complete=random_.choice((None, None, 4)),
                ),
                update=Update(
                    mode=random_.choice(("drain", "interrupt", "in_flight")),
                    keep_kv=random_.random() < 0.5,
                    every=random_.choice((1, 1, 2, 3)),
                    waits=random_.random() < 0.7,
                ),
                split=Split(
                    colocated=random_.random() < 0.3,
                    hybrid=random_.choice((None, None, WaitLending(), POOL)),
                ),
            )
        except RegimeError:
            continue


@pytest.mark.parametrize("part", some(range(PARTS), PARTS))
def test_any_regime_trains_every_batch_of_complete_groups_within_its_bound(part: int):
    for seed in range(part, LOOPS, PARTS):
        random_ = random.Random(seed)
        regime, failures = any_regime(random_), random_.choice((0.0, 0.1, 0.3))
        batches = random_.choice((*range(1, 6), *range(1, 6), 14))
        latest = random_.choice((0.0, 0.0, 0.5))
        world = HostileWorld(regime, seed, batches=batches, failures=failures, latest=latest)
        world.run()
        every = [t for batch in world.trained for t in batch]
        assert len(every) == len(set(every)), f"seed {seed}: trained twice"
        if regime.staleness.late != "train":
            assert regime.staleness.late == "drop" or not regime.staleness.growth
            assert max(world.staleness) <= regime.staleness.most, f"seed {seed}: {regime}"
        assert not world.core.groups.samples
        fates = set(world.state.values())
        assert fates <= {"ended", "trained", "discarded", "cancelled"}, f"seed {seed}: lost"


def test_no_straggler_passes_a_bound_that_is_enforced():
    for seed in range(200):
        random_ = random.Random(seed)
        regime = Regime(
            groups=random_.randint(1, 4),
            samples=random_.randint(1, 2),
            staleness=Staleness(bound=random_.choice((1.5, 2.0, 3.0, 4.0, 6.0, 8.0))),
            batching=Batching(
                order=random_.choice(("oldest", "first_finished")),
                accumulate_from=random_.choice((None, 1, 2)),
            ),
            update=Update(mode="in_flight", every=random_.choice((1, 1, 2))),
        )
        latest, failures = random_.choice((0.5, 0.9, 0.99)), random_.choice((0.0, 0.1))
        world = HostileWorld(regime, seed, batches=14, failures=failures, latest=latest)
        world.run()
        assert max(world.staleness) <= regime.staleness.most, f"seed {seed}: {regime}"


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("failures", [0.0, 0.2])
def test_a_named_regime_ends_in_any_order(name: str, failures: float):
    for seed in range(30):
        regime = regime_named(name, shape())
        world = HostileWorld(regime, seed, batches=4, failures=failures)
        world.run()
        assert len(world.trained) == 4


def test_samples_start_one_by_one_as_there_is_room():
    def started(admits: str) -> Counter[str]:
        text = f"areal:max_head_offpolicyness=4:max_concurrent_rollouts=5:staleness.admits={admits}"
        core = LoopController(NoRollouts(), regime_named(text, shape()), _prompts(), batches=9)
        commands = core.handle(LoopStarted(time_s=0.0))
        return Counter(c.group for c in commands if isinstance(c, StartTrajectory))

    assert sorted(started("slots").values()) == [2, 2]
    assert sorted(started("samples").values()) == [1, 2, 2]


@pytest.mark.parametrize("order", ["oldest", "started"])
def test_batches_of_the_groups_that_started_first(order: str):
    regime = regime_named(f"areal:max_head_offpolicyness=2:batching.order={order}", shape())
    stragglers = 0
    for seed in range(20):
        world = HostileWorld(regime, seed, batches=4, failures=0.0)
        world.run()
        numbers = [int(world.group[t][1:]) for batch in world.trained for t in batch]
        stragglers += numbers != sorted(numbers)
    assert bool(stragglers) == (order == "oldest")


def test_a_replay_of_the_events_gives_the_same_commands():
    for seed in range(100):
        regime = any_regime(random.Random(seed))
        world = HostileWorld(regime, seed, batches=3)
        world.run()
        again = HostileWorld(regime, seed, batches=3).core
        for event, commands in world.entries:
            assert tuple(again.handle(event)) == commands


def test_on_policy_batches_are_never_stale():
    world = HostileWorld(regime_named("sync", shape()), 1, batches=5)
    world.run()
    assert set(world.staleness) == {0}


def test_one_step_off_is_one_version_behind_after_the_first_batch():
    world = HostileWorld(regime_named("one-step-off", shape()), 2, batches=5, failures=0.0)
    world.run()
    per_batch = shape().groups * shape().samples
    assert world.staleness == [0] * per_batch + [1] * 4 * per_batch


def test_staleness_0_starts_no_more_than_a_batch():
    core = LoopController(
        NoRollouts(), regime_named("areal:max_head_offpolicyness=0", shape()), _prompts(), batches=9
    )
    core.handle(LoopStarted(time_s=0.0))
    assert core.groups.started == 3
    eager = LoopController(
        NoRollouts(), regime_named("areal:max_head_offpolicyness=2", shape()), _prompts(), batches=9
    )
    eager.handle(LoopStarted(time_s=0.0))
    assert eager.groups.started == 8  # 3 batches of 3 groups, but 16 trajectories at once


def test_a_batch_that_is_not_in_training_is_refused():
    core = LoopController(NoRollouts(), regime_named("sync", shape()), _prompts(), batches=1)
    core.handle(LoopStarted(time_s=0.0))
    with pytest.raises(LedgerError, match="not in training"):
        core.handle(Trained(time_s=1.0, batch=0))


def test_a_loop_in_which_everything_fails_is_given_up():
    world = HostileWorld(regime_named("areal", shape()), 3, batches=2, failures=0.999)
    with pytest.raises(TooManyFailuresError, match="fail too often"):
        world.run()


def test_a_prompt_is_given_up_after_its_first_try_and_three_more():
    world = HostileWorld(
        regime_named("sync", shape(groups=1, samples=1)), 3, batches=1, failures=1.0
    )
    with pytest.raises(TooManyFailuresError, match="each after 4 failures of its samples"):
        world.run()
    assert set(Counter(world.group.values()).values()) == {4}


def test_groups_do_not_pile_up_behind_a_trainer_without_end():
    world = HostileWorld(regime_named("pipelinerl", shape()), 4, batches=2, failures=0.0)
    slow = (event for event in iter(lambda: next(_but(Trained, world.due), None), None))
    world.deliver(LoopStarted(time_s=0.0))
    for event in slow:
        world.due.remove(event)
        if world.still_possible(event):
            world.deliver(event)
    assert world.core.groups.started == 2 * shape().groups * 2


def _but(kind: type, events: list):
    return (event for event in events if not isinstance(event, kind))


def _prompts():
    return HostileWorld(regime_named("sync", shape()), 0, batches=1)._prompts()


def test_verl_fully_async_has_16_prompts_an_engine_and_trains_in_order_of_completion():
    mine = replace(shape(groups=5, samples=4), engines=3)
    regime = regime_named("verl-fully-async:trigger_parameter_sync_step=2", mine)
    assert regime.staleness.max_concurrent == 3 * 16 * 4
    assert regime.staleness.admits == "groups"
    assert regime.batching.order == "first_finished"
    waits = "verl-fully-async:partial_rollout=false:staleness_threshold=0"
    assert regime_named(waits, mine).staleness.max_concurrent == 3 * 16 * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tomorrow", "no regime is named 'tomorrow'"),
        ("sync:eta=1", "regime sync has no parameter 'eta'; it has none"),
        ("areal:eta=1", "it has max_head_offpolicyness"),
        ("areal:max_head_offpolicyness=much", "must be a number, not 'much'"),
        ("areal:max_head_offpolicyness=nan", "must be from 0 to 1,000,000"),
        ("areal:max_head_offpolicyness=-1", "must be from 0 to 1,000,000"),
        ("areal:max_concurrent_rollouts=1", "max_concurrent must be 2 or more"),
        ("verl-fully-async:trigger_parameter_sync_step=0", "every 1 or more batches"),
        ("verl-fully-async:partial_rollout=maybe", "true or false"),
        ("verl-fully-async:partial_rollout=false", "needs partial_rollout=true"),
        ("april:over_sampling=0.5", "1 or more"),
        ("rollpacker:eta_prompts=0.5", "1 or more"),
        ("rollpacker:eta_responses=1e300", "must be from 0 to 1,000,000"),
        ("sync:staleness.admits=samples", "admits samples is of max_concurrent"),
        ("pipelinerl:batching.order=started", "most_complete discards them"),
        ("areal:staleness.late=never", "must be one of wait, drop, train"),
        ("areal:update.every=often", "a whole number"),
        ("areal:split.colocated=true", "and the fields of sampling, staleness, batching, update"),
        ("libra:borrow=0.5", "borrow must be above release"),
        ("verl-separate-async:switch_ratio=2", "above 0 and at most 1"),
        ("roll:group_size_redundancy=1:group_size_redundancy=2", "given twice"),
        ("sync:update.waits=false", "reach engines that generate"),
        ("areal:enforce=true:update.waits=false", "late groups are found too late"),
        ("rollart:update.waits=false", "late groups are found too late"),
        ("laminar:buffered_batches=0", "most_complete must be 3 or more"),
        ("heddle-loop:trigger_parameter_sync_step=0", "every 1 or more batches"),
        (
            "verl-separate-async:update.mode=drain:staleness.counted_by=batch",
            "lent GPUs come back when groups of 4 batches are complete",
        ),
        ("verl-separate-async:batching.most_complete=5", "most_complete must be 12 or more"),
    ],
)
def test_a_wrong_regime_is_named_with_its_parameter(text: str, said: str):
    with pytest.raises(RegimeError, match=said):
        regime_named(text, shape())


def test_a_bound_of_0_that_drops_late_groups_cannot_carry_any_over():
    with pytest.raises(RegimeError, match="would discard what rest keep carries over"):
        Regime(groups=2, samples=2, staleness=Staleness(late="drop"))
    Regime(groups=2, samples=2, staleness=Staleness(late="drop"), batching=Batching(rest="cancel"))


@pytest.mark.parametrize("name", [n for n, preset in REGIMES.items() if not preset.can_share_gpus])
def test_regimes_that_generate_while_they_train_need_gpus_of_their_own(name: str):
    with pytest.raises(RegimeError, match=r"leave out loop\.colocated"):
        regime_named(name, shape(colocated=True))


def _step(**changes: float) -> StepEnd:
    return replace(StepEnd(ready=0, train_s=100.0, rollout_s=100.0, pressure=0.1), **changes)


def test_a_waiting_trainer_lends_its_gpus_when_that_saves_more_than_the_switches_cost():
    rule = WaitLending().rule(groups=10, every=2, gpus=GpuCounts(rollout=1, training=0, hybrid=2))
    assert rule.threshold == 10  # 0.4 of 20 groups, but a batch at least
    assert rule.lends(_step())  # nothing is known yet
    rule.switched("rollout", 11.0)
    rule.switched("training", 8.0)
    rule.waited(27.0, 10)
    # 10 groups at 2.7 s, of which three times the GPUs save two thirds: 18 s, for 19 s of switches.
    assert not rule.lends(_step())
    rule.waited(3.0, 0)
    assert rule.lends(_step())  # 20 s
    assert not rule.lends(_step(ready=10))
    assert rule.takes_back(10, None)
    assert not rule.takes_back(9, None)


def test_the_ratio_rises_after_two_steps_with_waits_and_falls_after_two_without():
    rule = WaitLending().rule(groups=10, every=4, gpus=EVEN)
    ratios = []
    for wait_s in (5.0, 5.0, 5.0, 0.0, 1.9, 0.0):
        rule.waited(wait_s, 1)
        rule.lends(_step())
        ratios.append(round(rule.ratio, 2))
    assert ratios == [0.40, 0.45, 0.50, 0.50, 0.47, 0.44]


def test_a_pool_follows_the_ratio_of_training_to_rollout_time():
    rule = RatioPool(most_steps=3).rule(groups=1, every=1, gpus=EVEN)
    assert rule.takes_back(0, _step(train_s=115.0))
    assert not rule.takes_back(0, _step(train_s=114.0))
    assert not rule.takes_back(0, _step(train_s=200.0, pressure=0.8))
    assert not rule.takes_back(99, None)
    assert rule.lends(_step(train_s=90.0))
    assert not rule.lends(_step(train_s=91.0))
    assert rule.lends(_step(train_s=91.0))  # the third step that it trains
    rule.switched("training", 8.0)
    assert not rule.lends(_step(train_s=91.0))
    assert rule.lends(_step(train_s=200.0, pressure=0.8))


def _planner(**changes: object) -> SplitPlanner:
    gpus = GpuCounts(rollout=80, training=8, hybrid=8)
    return SplitPlanner(SplitPlan(**changes), gpus)  # type: ignore[arg-type]


def test_a_plan_needs_its_history_and_gains_what_the_gpus_add():
    planner = _planner(least_gain=0.01, reconfiguration_s=0.0)
    steps = [planner.wants_training("rollout", _step(train_s=112.0)) for _ in range(10)]
    # Ten steps are an interval, of which the first is no history.
    assert steps == [False] * 9 + [True]
    assert planner.estimated_s("rollout") == pytest.approx(112.0)
    # Twice the GPUs halve the training; the rollout keeps 80 of 88.
    assert planner.estimated_s("training") == pytest.approx(100.0 * 88 / 80)


def test_a_plan_that_gains_too_little_is_not_made():
    for least, wanted in ((0.01, True), (0.05, False)):
        planner = _planner(least_gain=least, reconfiguration_s=0.0)
        found = [planner.wants_training("rollout", _step(train_s=112.0)) for _ in range(10)]
        assert found[-1] is wanted
    costly = _planner(least_gain=0.0, reconfiguration_s=30.0)
    assert not any(costly.wants_training("rollout", _step(train_s=112.0)) for _ in range(10))


def test_no_plan_is_made_in_the_step_after_one_even_where_an_interval_ends():
    planner = _planner(interval=1, warm_up=0, history=1, least_gain=0.0, reconfiguration_s=0.0)
    assert planner.wants_training("rollout", _step(train_s=1_000.0))
    assert planner.wants_training("training", _step(train_s=1.0))
    assert not planner.wants_training("training", _step(train_s=1.0))


def test_full_engines_and_uneven_sides_are_planned_for_at_once():
    for step in (_step(pressure=0.85, train_s=300.0), _step(train_s=79.0)):
        planner = _planner(interval=1_000)
        found = [planner.wants_training("rollout", step) for _ in range(9)]
        assert found == [False] * 8 + [step.train_s > step.rollout_s]


def test_only_in_the_release_a_plan_of_the_interval_follows_another_at_once():
    plans = []
    for name in ("libra", "libra-release"):
        hybrid = regime_named(f"{name}:plan_interval=10", shape()).split.hybrid
        assert isinstance(hybrid, RatioPool)
        assert hybrid.plan is not None
        planner = SplitPlanner(hybrid.plan, GpuCounts(rollout=8, training=8, hybrid=8))
        for _ in range(8):
            assert not planner.wants_training("rollout", _step(train_s=0.0))
        # Full engines have it planned at step 9, with training that is shorter.
        assert not planner.wants_training("rollout", _step(pressure=0.9))
        plans.append(planner.wants_training("rollout", _step(train_s=1e6, pressure=0.0)))
    assert plans == [False, True]


def test_a_plan_keeps_the_pool_where_the_ratio_would_move_it_back_and_forth():
    gpus = GpuCounts(rollout=1_000, training=8, hybrid=8)
    moves = []
    for plan in (None, SplitPlan()):
        rule = RatioPool(plan=plan, most_steps=1_000).rule(groups=1, every=1, gpus=gpus)
        trains, count = False, 0
        for _ in range(60):
            step = _step(train_s=60.0 if trains else 120.0)
            before = trains
            trains = not rule.lends(step) if trains else rule.takes_back(0, step)
            count += trains != before
        moves.append(count)
        assert rule.lends(_step(pressure=0.8))
    assert moves[0] == 60
    assert moves[1] < 12


@pytest.mark.parametrize("failures", [0.0, 0.3])
def test_gpus_of_a_pool_change_sides_and_come_back(failures: float):
    loans = 0
    for seed in range(100):
        regime = regime_named("verl-separate-async:parameter_sync_step=1", shape())
        world = HostileWorld(regime, seed, batches=4, failures=failures)
        world.run()
        loans += world.loans
    assert loans > 100


def test_parts_of_a_batch_are_trained_as_their_groups_complete():
    world = HostileWorld(regime_named("heddle-loop", shape(groups=5)), 7, batches=3, failures=0.0)
    world.run()
    parts = [c for _, out in world.entries for c in out if isinstance(c, AccumulateGradients)]
    assert parts
    assert {len(batch) for batch in world.trained} == {10}


def test_a_trainer_with_relay_workers_goes_on_before_any_engine_has_its_weights():
    world = HostileWorld(regime_named("laminar", shape()), 3, batches=3, failures=0.0)
    world.run()
    events = [event for event, _ in world.entries]
    first = next(i for i, event in enumerate(events) if isinstance(event, Trained))
    assert [c.engine for c in _updates(world.entries[first][1])] == world.engines
    assert world.core.version == 2
    assert set(world.versions.values()) <= {1, 2}


def test_an_engine_that_took_older_weights_takes_the_newest_next():
    core = LoopController(NoRollouts(), regime_named("laminar", shape()), _prompts(), batches=9)
    engine = EngineId("e0")
    ready = EngineReady(
        time_s=0.0,
        engine=engine,
        shape=EngineShape("h100", 1),
        kv_capacity_tokens=9,
        max_running=1,
    )
    core.handle(ready)
    core.stage, core.begun = "training", 1
    first = _updates(core.handle(Trained(time_s=1.0, batch=0)))
    core.stage, core.begun = "training", 2
    assert not _updates(core.handle(Trained(time_s=2.0, batch=1)))
    second = _updates(core.handle(EngineUpdated(time_s=3.0, engine=engine, version=1)))
    assert [each.version for each in (*first, *second)] == [1, 2]


def _updates(commands):
    return [each for each in commands if isinstance(each, UpdateWeights)]


def test_libras_pool_and_planner_go_with_the_parts_of_other_regimes():
    ours = regime_named("heddle-loop:max_head_offpolicyness=4", shape())
    planned = regime_named("libra:staleness.late=train:batching.accumulate_from=1", shape())
    assert isinstance(planned.split.hybrid, RatioPool)
    assert planned.split.hybrid.plan is not None
    assert replace(planned, split=Split()) == ours


def test_libra_as_released_admits_a_batch_more_with_every_version():
    started = []
    for name in ("libra", "libra-release"):
        wide = replace(shape(), slots=1_000)
        world = HostileWorld(regime_named(name, wide), 5, batches=6, failures=0.0)
        world.run()
        started.append(world.core.groups.started)
    assert started[1] > started[0]


def test_the_release_of_libra_does_not_wait_for_what_it_cannot_bound():
    regime = regime_named("libra-release:max_head_offpolicyness=0", shape())
    assert regime.staleness.late == "train"
    assert regime_named("libra:max_head_offpolicyness=0", shape()).staleness.late == "wait"
    with pytest.raises(RegimeError, match="bounds nothing"):
        replace(regime, staleness=replace(regime.staleness, late="wait"))


def test_a_ratio_below_a_batch_is_not_raised_by_calm_steps():
    rule = WaitLending().rule(groups=10, every=1, gpus=EVEN)
    for _ in range(4):
        rule.lends(_step())
    assert rule.ratio == 0.4


def test_the_oldest_complete_groups_make_room_for_new_ones():
    """PipelineRL's ring: 4 + 2 samples wait, three groups of two."""
    text = "pipelinerl:ring_buffer_size=4:max_ready_samples_per_lead=2"
    regime = regime_named(text, shape())
    assert regime.batching.most_complete == 3
    assert regime_named("pipelinerl", shape()).batching.most_complete == (128 + 64) // 2
    world = HostileWorld(regime, 4, batches=3, failures=0.0)
    world.deliver(LoopStarted(time_s=0.0))
    completed: list[str] = []
    while len(completed) < 9:
        event = next(_but(Trained, world.due))
        world.due.remove(event)
        if world.still_possible(event):
            world.deliver(event)
        completed += [g for g in world.core.groups.complete if g not in completed]
        assert len(world.core.groups.complete) <= 3
    assert list(world.core.groups.complete) == completed[-3:]
    assert world.core.groups.dropped > 0
    world.run()
    assert len(world.trained) == 3
    with pytest.raises(RegimeError, match="most_complete must be 3 or more"):
        replace(regime, batching=Batching(most_complete=2))
