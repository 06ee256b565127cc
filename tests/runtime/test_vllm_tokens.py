"""Whatever is done to a step on real engines, its tokens are those of an undisturbed run.

Greedy decoding in float32 of a tiny model: on CPU, its results were the same bit for bit whatever
else was in the batch and however a prompt was cut into chunks. In bfloat16 they are not: two logits
that are nearly equal then change places, a token differs, and all after it. So tokens are compared
in float32 only, and a difference there is a bug.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import EngineClient, KvPlaced
from heddle_runtime.process.child import group_members
from heddle_runtime.vllm.engine import VllmEngine
from tests.rollout.contract import ATTEMPTS, LIMIT_S, Bench, grown, ids, request, until
from tests.runtime.vllm_bench import needs_nixl, needs_vllm, vllm_bench

pytestmark = needs_vllm

PROMPT, OUTPUT = 400, 200
HANG_S = 20.0
"""Long enough for any iteration, and short enough to be waited for."""
PROGRESS_S = 0.02
"""Steps are cut when some of their tokens have been heard of, and most are still to be made."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_bench(folder, progress_s=PROGRESS_S, hang_s=HANG_S) as bench:
        yield bench


def command_of(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


async def whole(bench: Bench, engine: EngineClient, name: str, output: int = OUTPUT) -> list[int]:
    """A step from beginning to end, alone; context and tokens."""
    context = ids(name, PROMPT)
    engine.start(request(f"{name} undisturbed", context, output))
    return grown(context, await bench.recorder.end_of(f"{name} undisturbed"))


async def heard_of(engine: EngineClient, name: str) -> None:
    """Wait until a step has made tokens, or has ended."""
    assert isinstance(engine, VllmEngine)

    def heard() -> bool:
        dispatch = engine._running.get(TrajectoryId(name))
        return dispatch is None or bool(dispatch.made)

    await until(heard)


async def cut(bench: Bench, engine: EngineClient, name: str, context: Sequence[int]) -> list[int]:
    """Part of a step, aborted somewhere; context and tokens so far.

    All of it, when this process was kept waiting for so long; then there is nothing to cut again.
    """
    left = PROMPT + OUTPUT - len(context)
    if left == 0:
        return list(context)
    engine.start(request(name, context, left))
    await heard_of(engine, name)
    engine.abort(TrajectoryId(name))
    return grown(context, await bench.recorder.end_of(name))


async def rest(bench: Bench, engine: EngineClient, name: str, context: Sequence[int]) -> list[int]:
    left = PROMPT + OUTPUT - len(context)
    if left == 0:
        return list(context)
    engine.start(request(name, context, left, shared=len(context)))
    return grown(context, await bench.recorder.end_of(name))


async def moved(
    bench: Bench, source: EngineClient, target: EngineClient, name: str, context: Sequence[int]
) -> KvPlaced:
    source.export_kv(TrajectoryId(name), context)
    _, handle = await bench.recorder.take("exported", lambda report: report[0] == name)
    assert handle is not None
    target.import_kv(TrajectoryId(name), GroupId(name), context, handle)
    _, placed = await bench.recorder.take("placed", lambda report: report[0] == name)
    assert isinstance(placed, KvPlaced)
    return placed


def test_under_preemption_beside_other_steps(bench):
    async def main() -> None:
        engine = await bench.engine()
        draw = random.Random(5)
        for attempt in range(ATTEMPTS):
            names = [f"preempted{attempt}-{i}" for i in range(5)]
            if await cuts_of_steps(bench, engine, names, draw) > len(names):
                return
        pytest.fail("steps ended before they could be aborted, in every attempt")

    bench.run(main())


async def cuts_of_steps(
    bench: Bench, engine: EngineClient, names: Sequence[str], draw: random.Random
) -> int:
    """Abort steps at random until all are whole; return how many aborts came before an end."""
    expected = {name: await whole(bench, engine, name) for name in names}
    context = {name: ids(name, PROMPT) for name in names}
    running = dict.fromkeys(names)
    for name in names:
        engine.start(request(name, context[name], OUTPUT))
    cuts = 0
    while running:
        await asyncio.sleep(0.03)
        victim = draw.choice(list(running))
        engine.abort(TrajectoryId(victim))
        end = await bench.recorder.end_of(victim)
        context[victim] = grown(context[victim], end)
        cuts += not end.finished
        left = PROMPT + OUTPUT - len(context[victim])
        if left:
            engine.start(request(victim, context[victim], left, shared=len(context[victim])))
        else:
            del running[victim]
    assert context == expected
    return cuts


def test_moved_by_prefill(bench):
    async def main() -> None:
        source, target = await bench.engine(0), await bench.engine(1)
        expected = await whole(bench, source, "prefilled")
        context = await cut(bench, source, "prefilled", ids("prefilled", PROMPT))
        name = TrajectoryId("prefilled")
        target.import_kv(name, GroupId("g"), context, None)
        _, placed = await bench.recorder.take("placed")
        assert placed == ("prefill", len(context) // 32 * 32)
        assert await rest(bench, target, "prefilled", context) == expected

    bench.run(main())


@needs_nixl
def test_prefilled_on_one_engine_and_decoded_on_another(bench):
    async def main() -> None:
        prefills, decodes = await bench.engine(0), await bench.engine(1)
        expected = await whole(bench, prefills, "split")
        context = ids("split", PROMPT)
        first = msgspec.structs.replace(request("split", context, 1), keep_kv=True)
        prefills.start(first)
        context = grown(context, await bench.recorder.end_of("split"))
        placed = await moved(bench, prefills, decodes, "split", context)
        assert placed.way == "kv"
        assert placed.tokens >= PROMPT // 32 * 32
        decodes.start(request("split", context, OUTPUT - 1, shared=len(context)))
        end = await bench.recorder.end_of("split")
        assert grown(context, end) == expected
        assert end.cached_tokens >= PROMPT // 32 * 32

    bench.run(main())


@needs_nixl
def test_pulled_in_mid_decode_there_and_back(bench):
    async def main() -> None:
        one, other = await bench.engine(0), await bench.engine(1)
        expected = await whole(bench, one, "traveller")
        context = await cut(bench, one, "traveller", ids("traveller", PROMPT))
        assert len(context) > PROMPT
        placed = await moved(bench, one, other, "traveller", context)
        assert placed == ("kv", len(context) // 32 * 32)
        context = await cut(bench, other, "traveller", context)
        placed = await moved(bench, other, one, "traveller", context)
        assert placed.way == "kv"
        assert await rest(bench, one, "traveller", context) == expected

    bench.run(main())


@needs_nixl
def test_several_pulls_at_once(bench):
    async def main() -> None:
        source, target = await bench.engine(0), await bench.engine(1)
        names = [f"flock{i}" for i in range(4)]
        expected = {name: await whole(bench, source, name) for name in names}
        context = {name: await cut(bench, source, name, ids(name, PROMPT)) for name in names}
        placed = await asyncio.gather(
            *(moved(bench, source, target, name, context[name]) for name in names)
        )
        assert [p.way for p in placed] == ["kv"] * 4
        done = await asyncio.gather(*(rest(bench, target, name, context[name]) for name in names))
        assert dict(zip(names, done, strict=True)) == expected

    bench.run(main())


@needs_nixl
def test_a_handle_whose_lease_is_nearly_over_is_not_pulled(bench):
    """A pull after its lease is not refused by the source: its blocks may be another's by then."""

    async def main() -> None:
        source, target = await bench.engine(0), await bench.engine(1)
        expected = await whole(bench, source, "late")
        context = await cut(bench, source, "late", ids("late", PROMPT))
        name = TrajectoryId("late")
        source.export_kv(name, context)
        _, handle = await bench.recorder.take("exported")
        late = msgspec.structs.replace(
            handle, expires_s=bench.loop.time() + 4.0
        )  # the margin is 5 s
        target.import_kv(name, GroupId("late"), context, late)
        _, placed = await bench.recorder.take("placed")
        assert placed.way == "prefill"
        source.forget(name)
        assert await rest(bench, target, "late", context) == expected

    bench.run(main())


@needs_nixl
def test_what_is_kept_for_a_pull_is_let_go_when_the_trajectory_goes_on_there(bench):
    async def main() -> None:
        engine = await bench.engine(0)
        context = await cut(bench, engine, "stays", ids("stays", PROMPT))
        engine.export_kv(TrajectoryId("stays"), context)
        _, handle = await bench.recorder.take("exported")
        assert handle is not None
        await asyncio.sleep(0.1)
        # Also where `cut` came too late to cut: only a step on the same engine lets it go.
        engine.start(request("stays", context, OUTPUT, shared=len(context)))
        await bench.recorder.end_of("stays")
        # Long before the lease is over: nothing runs, and nothing is held.
        async with asyncio.timeout(LIMIT_S):
            while engine.sample().kv_used_tokens:
                await asyncio.sleep(0.1)

    bench.run(main())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "it has hung", marks=pytest.mark.soak),
    ],
)
def test_an_engine_that_is_killed_or_stopped_loses_no_reported_token(bench, how, says):
    async def main() -> None:
        survivor, victim = await bench.engine(0), await bench.engine(1)
        names = [f"rescued{i}" for i in range(3)]
        expected = {name: await whole(bench, survivor, name) for name in names}
        for name in names:
            victim.start(request(name, ids(name, PROMPT), OUTPUT))
        for name in names:
            await heard_of(victim, name)
        bench._engines.remove(victim)
        os.kill(victim.pid, how)
        reason, salvaged = await bench.recorder.take("failed")
        assert reason.startswith(says)
        assert group_members(victim.pid) == []
        ended = {t.what.trajectory: t.what for t in bench.recorder.reports if t.kind == "ended"}
        bench.recorder.reports.clear()
        for name in names:
            end = salvaged.get(name) or ended[name]
            context = grown(ids(name, PROMPT), end)
            assert await rest(bench, survivor, name, context) == expected[name]

    bench.run(main())


@pytest.mark.soak
@needs_nixl
def test_a_source_that_dies_before_the_pull_costs_a_prefill(bench):
    async def main() -> None:
        target, source = await bench.engine(0), await bench.give()
        expected = await whole(bench, target, "orphaned")
        context = await cut(bench, source, "orphaned", ids("orphaned", PROMPT))
        source.export_kv(TrajectoryId("orphaned"), context)
        _, handle = await bench.recorder.take("exported")
        assert handle is not None
        source.kill()
        target.import_kv(TrajectoryId("orphaned"), GroupId("g"), context, handle)
        _, placed = await bench.recorder.take("placed")
        assert placed == ("prefill", len(context) // 32 * 32)
        assert await rest(bench, target, "orphaned", context) == expected

    bench.run(main())


@pytest.mark.soak
@needs_nixl
def test_moved_between_tp_1_and_tp_2_and_back(bench):
    """Then one of the wide engine's processes dies: the engine has failed, and nothing is left."""

    async def main() -> None:
        narrow, wide = await bench.engine(0), await bench.begin(tp=2)
        expected = await whole(bench, narrow, "tp")
        assert await whole(bench, wide, "tp") == expected
        context = await cut(bench, narrow, "tp", ids("tp", PROMPT))
        assert (await moved(bench, narrow, wide, "tp", context)).way == "kv"
        context = await cut(bench, wide, "tp", context)
        assert (await moved(bench, wide, narrow, "tp", context)).way == "kv"
        assert await rest(bench, narrow, "tp", context) == expected

        wide.start(request("doomed", ids("doomed", PROMPT), 4000))
        await heard_of(wide, "doomed")
        members = [pid for pid in group_members(wide.pid) if pid != wide.pid]
        parts = [pid for pid in members if b"resource_tracker" not in command_of(pid)]
        assert len(parts) == 2
        os.kill(parts[1], signal.SIGKILL)
        reason, salvaged = await bench.recorder.take("failed")
        assert reason == "one of its TP processes died"
        assert list(salvaged) == ["doomed"]
        assert group_members(wide.pid) == []

    bench.run(main())
