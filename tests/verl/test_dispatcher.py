"""Steps wait for the policy: their order, their engines, and what happens when these go."""

import asyncio

import pytest

from heddle_core.estimate.cost import StepCost
from heddle_rollout.engines import StepRequest
from heddle_verl.dispatcher import DRAIN_S, StepFailedError
from heddle_verl.engines import DecodeClock
from heddle_verl.steps import SampleIdentity
from tests.verl.one_loop import Handle, World, in_virtual_time, settle


def dispatched(world, *calls):
    return [call.granted.address if call.granted else None for call in calls]


@in_virtual_time
async def test_no_engine_has_more_steps_than_slots_and_all_of_them_end():
    world = World(2, slots=3)
    most = 0

    async def trajectory(number):
        nonlocal most
        for step in range(5):
            call = world.begin(f"r{number}", 100 + 50 * step)
            grant = await call.waiter
            most = max(most, *world.dispatcher.in_flight.values())
            await asyncio.sleep(0.001 * (number % 7))
            world.dispatcher.release(grant.address, f"r{number}")
            await asyncio.sleep(0)

    await asyncio.gather(*(trajectory(number) for number in range(64)))
    assert most == 3
    assert sum(world.dispatcher.in_flight.values()) == world.dispatcher.waiting == 0
    assert world.dispatcher.idle == 64
    assert len(world.of("StepFinished")) == 64 * 5
    assert len(world.of("TrajectoryArrived")) == 64


@in_virtual_time
async def test_waiting_steps_are_dispatched_in_the_order_of_the_policy():
    # By fewest steps done: the second step of a trajectory comes after the first of all others.
    world = World(1, slots=1, policy="verl+round_robin")
    first = world.begin("old")
    await first.waiter
    rivals = [world.begin(f"new{i}") for i in range(4)]
    await settle()
    world.dispatcher.release("a0", "old")
    second = world.begin("old", 200)
    order = []
    for _ in range(5):
        await settle()
        running = [c for c in (*rivals, second) if c.granted and not c.released and c not in order]
        assert len(running) == 1
        order += running
        name = "old" if running[0] is second else f"new{rivals.index(running[0])}"
        world.dispatcher.release("a0", name)
    assert order == [*rivals, second]


@in_virtual_time
async def test_a_trajectory_stays_on_its_engine_and_new_ones_are_spread():
    world = World(2, slots=8, policy="verl")
    calls = [world.begin(f"r{i}") for i in range(8)]
    await settle()
    homes = dispatched(world, *calls)
    assert sorted(homes) == ["a0"] * 4 + ["a1"] * 4
    for i, home in enumerate(homes):
        world.dispatcher.release(home, f"r{i}")
    again = [world.begin(f"r{i}", 300) for i in range(8)]
    await settle()
    assert dispatched(world, *again) == homes


def test_tokens_of_a_step_are_estimated_by_the_time_that_its_engine_had_for_it():
    now_s = 0.0
    cost = StepCost(t0_s=0.01, t1_s=0.005, t2_s=0.0, prefill_s=0.001, kv_capacity_tokens=10_000)
    clock = DecodeClock(cost, lambda: now_s)

    def step(name, prompt_tokens, max_tokens=1000):
        return StepRequest(
            trajectory=name,
            group="g",
            prompt_tokens=prompt_tokens,
            shared_tokens=0,
            max_tokens=max_tokens,
            exact=False,
        )

    clock.begin(step("a", 15))
    now_s = 0.015 + 10 * 0.015  # its prefill, and ten iterations alone
    clock.begin(step("b", 20))
    now_s += 0.020 + 5 * 0.020  # a prefill, and five iterations of two
    assert clock.end("a") == 16
    assert clock.end("b") == 5
    clock.begin(step("c", 0, max_tokens=3))
    now_s += 100.0
    assert clock.end("c") == 3


@in_virtual_time
async def test_the_next_prompt_shows_what_a_step_and_its_tool_appended_together():
    world = World(1, slots=4)
    call = world.begin("r", 100)
    await call.waiter
    world.dispatcher.release("a0", "r")
    world.begin("r", 400)
    await settle()
    (finished,), (returned,) = world.of("StepFinished"), world.of("ToolReturned")
    assert returned.context_tokens == 400
    assert returned.observation_tokens == 300 - finished.output_tokens


@in_virtual_time
async def test_behind_a_proxy_calls_of_a_request_at_once_are_trajectories_of_their_own():
    world = World(1, slots=4, aborts=True)
    first, second = world.begin("r"), world.begin("r", 120)
    await settle()
    assert first.session is not second.session
    assert dispatched(world, first, second) == ["a0", "a0"]
    for call in (first, second):
        world.dispatcher.dispatch_ended(call, call.granted.request_id, 9, aborted=False)
    assert world.dispatcher.in_flight == {"a0": 0}
    third = world.begin("r", 200)
    assert third.session is first.session


@in_virtual_time
async def test_a_request_may_come_before_the_release_of_the_step_before_it():
    world = World(1, slots=4)
    first = world.begin("r")
    await first.waiter
    second = world.begin("r", 200)
    assert second.session is first.session
    await settle()
    assert not second.waiter.done()
    world.dispatcher.release("a0", "r")
    await second.waiter
    world.dispatcher.release("a0", "r")
    assert world.dispatcher.in_flight == {"a0": 0}
    assert world.dispatcher.idle == 1
    assert [e.step for e in world.of("StepFinished")] == [0, 1]


@in_virtual_time
async def test_a_trajectory_without_a_request_ends_and_may_come_again():
    world = World(1, slots=1, idle_s=0.05)
    call = world.begin("r")
    await call.waiter
    world.dispatcher.release("a0", "r")
    assert world.dispatcher.idle == 1
    await asyncio.sleep(0.15)
    assert world.dispatcher.idle == 0
    assert [e.outcome for e in world.of("TrajectoryFinished")] == ["completed"]
    again = world.begin("r", 200)
    await again.waiter
    assert again.session is not call.session
    assert len({e.trajectory for e in world.of("TrajectoryArrived")}) == 2


@in_virtual_time
async def test_a_running_trajectory_is_never_ended_for_want_of_requests():
    world = World(1, slots=1, idle_s=0.05)
    running, waiting = world.begin("r"), world.begin("s")
    await running.waiter
    await asyncio.sleep(0.2)
    assert world.of("TrajectoryFinished") == []
    world.dispatcher.release("a0", "r")
    await waiting.waiter


@in_virtual_time
async def test_finish_frees_what_the_policy_keeps_of_a_trajectory():
    world = World(1, slots=1)
    call = world.begin("r")
    await call.waiter
    world.dispatcher.release("a0", "r")
    world.dispatcher.finish(["r", "never seen"])
    assert len(world.of("TrajectoryFinished")) == 1
    assert world.dispatcher.idle == 0


@in_virtual_time
async def test_an_end_may_be_announced_before_the_release_of_the_last_step():
    world = World(1, slots=1, ends="announced")
    call, waiting, never = world.begin("r"), world.begin("s"), world.begin("t")
    await call.waiter
    world.dispatcher.finish(["r", "t"])
    assert world.dispatcher.in_flight == {"a0": 1}
    assert not never.waiter.done()
    world.dispatcher.release("a0", "r")
    await waiting.waiter
    world.dispatcher.release("a0", "s")
    world.dispatcher.finish(["s"])
    await settle()
    assert world.dispatcher.in_flight == {"a0": 0}
    assert world.dispatcher.waiting == world.dispatcher.idle == 0
    assert len(world.of("TrajectoryFinished")) == 3


# -- engines that come and go ---------------------------------------------------------------------


@in_virtual_time
async def test_steps_wait_while_there_is_no_engine():
    world = World(0)
    call = world.begin("r")
    await settle()
    assert not call.waiter.done()
    assert world.dispatcher.waiting == 1
    world.dispatcher.add_engines({"late": object()})
    assert (await call.waiter).address == "late"


@in_virtual_time
async def test_an_engine_that_is_added_takes_its_share_of_what_waits():
    world = World(1, slots=2)
    calls = [world.begin(f"r{i}") for i in range(12)]
    await settle()
    world.dispatcher.add_engines({"b": object()})
    await settle()
    assert world.dispatcher.in_flight == {"a0": 2, "b": 2}
    ended = {}
    while len(ended) < len(calls):
        running = [c for c in calls if c.granted and not c.released]
        assert running
        for call in running:
            ended[call.session.id] = call.granted.address
            world.dispatcher.release(call.granted.address, f"r{calls.index(call)}")
        await settle()
    # Of the six that it is given, two may be running ones, which end where they are.
    assert 4 <= list(ended.values()).count("b") <= 6


@in_virtual_time
async def test_behind_a_proxy_running_steps_are_preempted_for_an_engine_that_is_added():
    world = World(1, slots=4, policy="verl", aborts=True)
    calls = [world.begin(f"r{i}") for i in range(4)]
    await settle()
    world.dispatcher.add_engines({"b": Handle()})
    moved = []
    for _ in range(2):  # one at a time
        await settle()
        (call,) = [c for c in calls if c.granted.request_id in world.aborted and c not in moved]
        assert world.dispatcher.dispatch_ended(call, call.granted.request_id, 5, aborted=True)
        moved.append(call)
    await settle()
    assert dispatched(world, *moved) == ["b", "b"]
    assert [c.granted.kept_tokens for c in moved] == [5, 5]
    assert world.dispatcher.in_flight == {"a0": 2, "b": 2}
    assert len([c for c in world.commands if type(c).__name__ == "Preempt"]) == 2


@in_virtual_time
async def test_without_a_proxy_steps_of_a_removed_engine_end_there_and_go_on_elsewhere():
    world = World(2, slots=1, policy="verl", proxy=False)
    calls = [world.begin(f"r{i}") for i in range(6)]
    await settle()
    gone = next(c for c in calls if c.granted and c.granted.address == "a0")
    name = f"r{calls.index(gone)}"
    world.dispatcher.remove_engines(["a0"])
    await settle()
    assert dict(world.dispatcher.in_flight) == {"a1": 1}
    world.dispatcher.release("a0", name)
    following = world.begin(name, 200)
    for _ in range(7):
        await settle()
        running = [c for c in (*calls, following) if c.granted and not c.released]
        assert {c.granted.address for c in running} <= {"a1"}
        for call in running:
            world.dispatcher.release("a1", call.session.id.partition("/")[0])
    assert following.released
    assert all(c.released for c in calls)
    assert world.dispatcher.in_flight == {"a1": 0}


@in_virtual_time
async def test_behind_a_proxy_running_steps_of_a_removed_engine_are_aborted_and_resumed():
    world = World(2, slots=2, policy="verl", aborts=True)
    calls = [world.begin(f"r{i}") for i in range(4)]
    await settle()
    moved = [c for c in calls if c.granted.address == "a0"]
    before = {c: c.granted.request_id for c in moved}
    world.dispatcher.remove_engines(["a0"])
    await settle()
    assert sorted(world.aborted) == sorted(before.values())
    for call in moved:
        assert world.dispatcher.dispatch_ended(call, before[call], 7, aborted=True)
    assert all(not c.waiter.done() for c in moved)  # a1 is full
    for call in calls:
        if call not in moved:
            ended = world.dispatcher.dispatch_ended(call, call.granted.request_id, 9, aborted=False)
            assert not ended
    await settle()
    assert dispatched(world, *moved) == ["a1", "a1"]
    assert [c.granted.kept_tokens for c in moved] == [7, 7]
    assert {c.granted.request_id for c in moved}.isdisjoint(before.values())


@in_virtual_time
async def test_a_step_that_may_not_be_resumed_begins_again():
    world = World(2, slots=2, policy="verl", aborts=True)
    calls = [world.begin(f"r{i}", resumable=False) for i in range(2)]
    await settle()
    call = next(c for c in calls if c.granted.address == "a0")
    first = call.granted.request_id
    world.dispatcher.remove_engines(["a0"])
    await settle()
    assert world.dispatcher.dispatch_ended(call, first, 7, aborted=True)
    grant = await call.waiter
    assert (grant.address, grant.kept_tokens) == ("a1", 0)


@in_virtual_time
async def test_a_dead_engine_loses_nothing_and_late_reports_of_it_change_nothing():
    world = World(2, slots=2, policy="verl", aborts=True)
    calls = [world.begin(f"r{i}") for i in range(4)]
    await settle()
    lost = [c for c in calls if c.granted.address == "a0"]
    others = [c for c in calls if c not in lost]
    before = {c: c.granted.request_id for c in lost}
    world.dispatcher.engine_died(lost[0], before[lost[0]], "its process has ended")
    for call in others:
        world.dispatcher.dispatch_ended(call, call.granted.request_id, 3, aborted=False)
    await settle()
    world.dispatcher.engine_died(lost[1], before[lost[1]], "its process has ended")
    assert world.dispatcher.dispatch_ended(lost[1], before[lost[1]], 5, aborted=False)
    await settle()
    assert dispatched(world, *lost) == ["a1", "a1"]
    assert [c.granted.kept_tokens for c in lost] == [0, 0]
    assert len(world.of("EngineFailed")) == 1


# -- what trainers do -----------------------------------------------------------------------------


@in_virtual_time
async def test_nothing_is_dispatched_while_a_trainer_aborts_and_waits_for_the_drain():
    world = World(1, slots=1, policy="verl")
    first, second = world.begin("r"), world.begin("s")
    await settle()
    assert world.dispatcher.redistribute(end_idle=True) == 0
    world.dispatcher.release("a0", "r")
    await settle()
    assert world.dispatcher.in_flight == {"a0": 0}
    assert not second.waiter.done()
    world.dispatcher.drained()
    assert (await second.waiter).address == "a0"
    assert first.released


@in_virtual_time
async def test_a_trainer_that_does_not_wait_holds_dispatch_up_for_a_limited_time(monkeypatch):
    monkeypatch.setattr("heddle_verl.dispatcher.DRAIN_S", 0.05)
    assert DRAIN_S > 1.0
    world = World(1, slots=2, policy="verl")
    await world.begin("r").waiter
    world.dispatcher.redistribute(end_idle=True)
    late = world.begin("s")
    await settle()
    assert not late.waiter.done()
    await late.waiter


@in_virtual_time
async def test_idle_trajectories_end_at_a_phase_switch_unless_their_ends_are_announced():
    world = World(1, slots=2)
    for name in ("r", "s"):
        call = world.begin(name)
        await call.waiter
        world.dispatcher.release("a0", name)
    assert world.dispatcher.redistribute(end_idle=False) == 0
    assert world.dispatcher.idle == 2
    assert world.dispatcher.redistribute(end_idle=True) == 2
    assert world.dispatcher.idle == 0
    assert len(world.of("WeightsUpdated")) == 2


@in_virtual_time
async def test_an_announced_rollout_is_placed_as_a_whole():
    world = World(2, slots=8)
    world.dispatcher.announce("train-1", 6, 1)
    who = SampleIdentity(rollout="train-1", group="p", task="coding")
    calls = [world.begin(f"r{i}", identity=who) for i in range(5)]
    await settle()
    assert not any(c.waiter.done() for c in calls)
    calls.append(world.begin("r5", identity=who))
    await asyncio.gather(*(c.waiter for c in calls))
    arrived = world.of("TrajectoryArrived")
    assert {e.task for e in arrived} == {"coding"}
    assert {e.group for e in arrived} == {"p"}
    for i, call in enumerate(calls):
        world.dispatcher.release(call.granted.address, f"r{i}")
    world.dispatcher.finish([f"r{i}" for i in range(6)])
    world.dispatcher.conclude("train-1")
    world.dispatcher.announce("train-1", 1, 2)  # the same name again, in the next epoch
    again = world.begin("r9", identity=who)
    await again.waiter


@in_virtual_time
async def test_a_rollout_that_lacks_trajectories_starts_with_its_end():
    world = World(1, slots=8)
    world.dispatcher.announce("train-1", 3, 1)
    call = world.begin("r", identity=SampleIdentity(rollout="train-1"))
    await settle()
    assert not call.waiter.done()
    world.dispatcher.conclude("train-1")
    await call.waiter


@in_virtual_time
async def test_the_end_of_a_rollout_with_all_its_trajectories_may_come_before_the_last_release():
    world = World(1, slots=8)
    world.dispatcher.announce("train-1", 2, 1)
    who = SampleIdentity(rollout="train-1")
    calls = [world.begin(f"r{i}", identity=who) for i in range(2)]
    await asyncio.gather(*(c.waiter for c in calls))
    world.dispatcher.finish(["r0", "r1"])
    world.dispatcher.conclude("train-1")
    for i, call in enumerate(calls):
        world.dispatcher.release(call.granted.address, f"r{i}")
    await settle()
    assert world.of("RolloutClosed") == []
    assert [e.outcome for e in world.of("TrajectoryFinished")] == ["completed"] * 2


# -- failures -------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_step_that_fits_no_engine_fails_with_the_remedy():
    world = World(1, slots=1, kv_tokens=1000)
    call = world.begin("r", 2000)
    with pytest.raises(StepFailedError, match=r"context of 2000 tokens, KV capacity 1000.*kv_tok"):
        await call.waiter
    world.begin("s", 500)
    await settle()
    assert world.dispatcher.in_flight == {"a0": 1}


@in_virtual_time
async def test_a_client_that_gives_up_frees_its_slot_or_its_place_in_the_queue():
    world = World(1, slots=1, policy="verl", aborts=True)
    calls = [world.begin(f"r{i}") for i in range(3)]
    await settle()
    world.dispatcher.failed(calls[1], "cancelled")
    world.dispatcher.failed(calls[0], "cancelled")
    grant = await calls[2].waiter
    assert grant.address == "a0"
    assert len(world.of("TrajectoryFinished")) == 2


@in_virtual_time
async def test_a_client_that_gives_up_at_once_leaves_nothing_behind():
    world = World(1, slots=1, policy="verl", aborts=True)
    for number in range(5):
        world.dispatcher.failed(world.begin(f"r{number}"), "cancelled")
    await world.begin("s").waiter
    await settle()
    assert world.dispatcher.in_flight == {"a0": 1}
    assert world.dispatcher.waiting == 0
    assert len(world.of("TrajectoryFinished")) == 5


@in_virtual_time
async def test_an_abort_is_repeated_until_the_engine_knows_the_request(monkeypatch):
    monkeypatch.setattr("heddle_verl.engines.ABORT_AGAIN_S", 0.01)
    world = World(2, slots=1, policy="verl", aborts=True)
    world.knows = False
    call = world.begin("r")
    grant = await call.waiter
    world.dispatcher.remove_engines([grant.address])
    await asyncio.sleep(0.1)
    assert len(world.aborted) > 2
    assert set(world.aborted) == {grant.request_id}
    world.dispatcher.dispatch_ended(call, grant.request_id, 4, aborted=True)
    made = len(world.aborted)
    await asyncio.sleep(0.05)
    assert len(world.aborted) == made
    assert (await call.waiter).kept_tokens == 4


@in_virtual_time
async def test_an_abort_that_is_not_ours_is_the_end_of_the_step():
    world = World(2, slots=1, policy="verl", aborts=True)
    call = world.begin("r")
    grant = await call.waiter
    assert not world.dispatcher.dispatch_ended(call, grant.request_id, 4, aborted=True)
    assert world.dispatcher.idle == 1
