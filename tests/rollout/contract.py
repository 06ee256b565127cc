"""What every kind of engine does alike: the tests, and the bench that they run on.

A kind of engine is tested by a subclass of `EngineContract` named `Test...` in a module with a
fixture `bench`. Engines are shared between tests, since a real one takes seconds to start; each
test uses trajectories and tokens of its own.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest

from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import (
    EngineClient,
    EngineRefusedError,
    KvHandle,
    KvPlaced,
    Launcher,
    StepRequest,
    StepResult,
)

T = TypeVar("T")

LIMIT_S = 300.0
"""Far beyond anything that is waited for; a test that waits so long has failed."""
PROMPT, OUTPUT = 320, 48
ATTEMPTS = 20
"""To find a step under way: on a busy machine it may end before the test sees it."""
LONG_OUTPUT = 4000
"""Enough to be still at it when something else has been done."""


class Report(NamedTuple):
    """One call of the listener."""

    kind: str
    engine: EngineId
    what: Any = None


class Recorder:
    """Keeps the reports of engines; implements `EngineListener`."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.moves: dict[TrajectoryId, list[int]] = {}
        """Which moves of a trajectory were answered."""
        self._news = asyncio.Event()

    def _report(self, report: Report) -> None:
        self.reports.append(report)
        self._news.set()

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        self._report(Report("ready", engine, kv_capacity_tokens))

    def step_ended(self, engine: EngineId, end: StepResult) -> None:
        self._report(Report("ended", engine, end))

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        self.moves.setdefault(trajectory, []).append(move)
        self._report(Report("exported", engine, (trajectory, kv)))

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        self.moves.setdefault(trajectory, []).append(move)
        self._report(Report("placed", engine, (trajectory, placed)))

    def weights_updated(self, engine: EngineId, version: int) -> None:
        self._report(Report("updated", engine, version))

    def engine_stopped(self, engine: EngineId) -> None:
        self._report(Report("stopped", engine))

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        self._report(Report("failed", engine, (reason, dict(salvaged))))

    def of(self, engine: EngineClient) -> list[Report]:
        return [report for report in self.reports if report.engine == engine.spec.engine]

    async def take(
        self,
        kind: str,
        matches: Callable[[Any], bool] = lambda _: True,
        *,
        unless: Callable[[Any], bool] = lambda _: False,
    ) -> Any:
        """Wait for the first of a kind that matches, and take it out.

        It is waited for in vain once an engine has failed that is meant by `unless`.
        """
        async with asyncio.timeout(LIMIT_S):
            while True:
                for report in self.reports:
                    if report.kind == kind and matches(report.what):
                        self.reports.remove(report)
                        return report.what
                    if report.kind == "failed" and unless(report.what):
                        pytest.fail(f"engine {report.engine} failed: {report.what[0]}")
                self._news.clear()
                await self._news.wait()

    async def end_of(self, trajectory: str) -> StepResult:
        """Wait for the end of a trajectory's step."""
        end: StepResult = await self.take(
            "ended", lambda end: end.trajectory == trajectory, unless=lambda f: trajectory in f[1]
        )
        return end


def ids(name: str, count: int) -> list[int]:
    """Token ids, the same for a name in every run."""
    draw = random.Random(name)
    return [draw.randrange(300, 2000) for _ in range(count)]


def request(
    trajectory: str,
    context: Sequence[int],
    output: int,
    *,
    shared: int = 0,
    group: str = "",
    exact: bool = True,
) -> StepRequest:
    """A dispatch; a trajectory is a group of its own unless one is named."""
    return StepRequest(
        trajectory=TrajectoryId(trajectory),
        group=GroupId(group or trajectory),
        prompt_tokens=len(context),
        shared_tokens=shared,
        max_tokens=output,
        exact=exact,
        prompt_ids=context,
    )


def grown(context: Sequence[int], end: StepResult) -> list[int]:
    """The context with the tokens of a dispatch; invented ones where the engine makes none."""
    return [*context, *(end.output_ids or ids(f"made by {end.trajectory}", end.tokens))]


@dataclass(slots=True, eq=False)
class Bench:
    """A kind of engine, set up for tests."""

    loop: asyncio.AbstractEventLoop
    launcher: Launcher
    recorder: Recorder
    gpu: str
    makes_tokens: bool
    fail: Callable[[Any], None]
    """Makes an engine die."""
    weights: str
    """Weights that it can load."""
    heard: Callable[[Any, str], Awaitable[None]] = lambda engine, name: asyncio.sleep(0.5)
    """Waits until a step has made tokens, where that can be seen; elsewhere for long enough."""
    _engines: list[EngineClient] = field(default_factory=list)
    _started: int = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to its end what a test does on the event loop."""
        return self.loop.run_until_complete(work)

    async def begin(self, *, tp: int = 1, max_running: int = 8) -> EngineClient:
        """Start an engine of one's own and wait until it is ready."""
        self._started += 1
        spec = EngineSpec(
            engine=EngineId(f"e{self._started}"),
            shape=EngineShape(self.gpu, tp),
            max_running=max_running,
        )
        engine = self.launcher.start(spec, self.recorder)
        await self.recorder.take("ready", unless=lambda _: True)
        return engine

    async def engine(self, which: int = 0) -> EngineClient:
        """Return one of the engines that tests share; those that do harm to one `give` it up."""
        while len(self._engines) <= which:
            self._engines.append(await self.begin())
        return self._engines[which]

    async def give(self) -> EngineClient:
        """Return an engine for this test alone."""
        if len(self._engines) > 1:
            return self._engines.pop()
        return await self.begin()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition that no report announces."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.02)


class EngineContract:
    """The tests."""

    def test_it_is_ready_once_and_reports_its_kv_capacity(self, bench: Bench) -> None:
        async def main() -> None:
            spec = EngineSpec(
                engine=EngineId("new"), shape=EngineShape(bench.gpu, 1), max_running=8
            )
            engine = bench.launcher.start(spec, bench.recorder)
            assert (engine.spec, engine.kv_capacity_tokens) == (spec, 0)
            assert bench.recorder.of(engine) == []
            capacity = await bench.recorder.take("ready")
            assert engine.kv_capacity_tokens == capacity > PROMPT + OUTPUT
            assert engine.sample() == (0, 0, 0, 0)
            bench._engines.append(engine)

        bench.run(main())

    def test_a_step_makes_exactly_the_requested_tokens(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            engine.start(request("exact", ids("exact", PROMPT), OUTPUT))
            end = await bench.recorder.end_of("exact")
            assert (end.tokens, end.finished, end.error) == (OUTPUT, True, "")
            assert len(end.output_ids) == (OUTPUT if bench.makes_tokens else 0)
            assert (end.cached_tokens, end.recomputes) == (0, 0)

        bench.run(main())

    def test_the_three_times_of_a_step_add_up_to_its_time_in_the_engine(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            began_s = bench.loop.time()
            engine.start(request("times", ids("times", PROMPT), OUTPUT))
            end = await bench.recorder.end_of("times")
            spent_s = bench.loop.time() - began_s
            assert min(end.queued_s, end.prefill_s, end.decode_s) >= 0
            assert end.prefill_s + end.decode_s > 0
            assert end.queued_s + end.prefill_s + end.decode_s <= spent_s + 1e-6

        bench.run(main())

    def test_steps_run_at_once_and_each_ends_once(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            names = [f"many{i}" for i in range(6)]
            for i, name in enumerate(names):
                engine.start(request(name, ids(name, PROMPT), OUTPUT + i))
            for i, name in enumerate(names):
                assert (await bench.recorder.end_of(name)).tokens == OUTPUT + i
            assert bench.recorder.of(engine) == []

        bench.run(main())

    def test_no_report_comes_from_inside_a_call(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            context = ids("inside", PROMPT)
            name, group = TrajectoryId("inside"), GroupId("inside")
            answers = []
            for call in (
                lambda: engine.start(request("inside", context, 4)),
                lambda: engine.abort(name),
                lambda: engine.export_kv(TrajectoryId("nobody"), context),
                lambda: engine.import_kv(TrajectoryId("inside too"), group, context, None),
            ):
                answers.append(call())
                assert bench.recorder.of(engine) == []
            await bench.recorder.end_of("inside")
            *_, exports, placed = answers
            if exports:
                await bench.recorder.take("exported")
            if placed is None:
                await bench.recorder.take("placed")

        bench.run(main())

    def test_a_second_step_of_a_trajectory_is_refused_while_one_runs(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            engine.start(request("twice", ids("twice", PROMPT), OUTPUT))
            with pytest.raises(EngineRefusedError, match="twice"):
                engine.start(request("twice", ids("twice", PROMPT), OUTPUT))
            assert (await bench.recorder.end_of("twice")).tokens == OUTPUT

        bench.run(main())

    def test_a_step_that_can_never_fit_is_refused_and_the_engine_goes_on(
        self, bench: Bench
    ) -> None:
        async def main() -> None:
            engine = await bench.engine()
            size = engine.kv_capacity_tokens
            with pytest.raises(EngineRefusedError):
                engine.start(request("huge", ids("huge", size), 32))
            with pytest.raises(EngineRefusedError):
                engine.start(request("huge", ids("huge", 32), size))
            engine.start(request("huge", ids("huge", 32), 4))
            assert (await bench.recorder.end_of("huge")).finished

        bench.run(main())

    def test_an_abort_ends_a_step_with_the_tokens_it_has_made(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            engine.start(request("cut", ids("cut", PROMPT), LONG_OUTPUT))
            await until(lambda: engine.sample().running > 0)
            await asyncio.sleep(0.3)
            engine.abort(TrajectoryId("cut"))
            end = await bench.recorder.end_of("cut")
            assert not end.finished
            assert 0 < end.tokens < LONG_OUTPUT
            assert len(end.output_ids) == (end.tokens if bench.makes_tokens else 0)

        bench.run(main())

    def test_an_abort_of_what_is_not_there_does_nothing(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            engine.abort(TrajectoryId("never seen"))
            engine.start(request("after", ids("after", PROMPT), 4))
            assert (await bench.recorder.end_of("after")).finished
            engine.abort(TrajectoryId("after"))
            await asyncio.sleep(0.2)
            assert bench.recorder.of(engine) == []

        bench.run(main())

    def test_two_aborts_of_a_step_have_one_end(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            engine.start(request("once", ids("once", PROMPT), LONG_OUTPUT))
            engine.abort(TrajectoryId("once"))
            engine.abort(TrajectoryId("once"))
            assert not (await bench.recorder.end_of("once")).finished
            await asyncio.sleep(0.2)
            assert bench.recorder.of(engine) == []

        bench.run(main())

    def test_an_aborted_step_goes_on_from_its_tokens_and_finds_their_kv(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            context = ids("again", PROMPT)
            engine.start(request("again", context, LONG_OUTPUT))
            await asyncio.sleep(0.3)
            engine.abort(TrajectoryId("again"))
            first = await bench.recorder.end_of("again")
            context = grown(context, first)
            engine.start(request("again", context, OUTPUT, shared=len(context)))
            second = await bench.recorder.end_of("again")
            assert (second.tokens, second.finished) == (OUTPUT, True)
            assert len(context) - 64 <= second.cached_tokens < len(context)

        bench.run(main())

    def test_the_next_step_finds_the_kv_of_its_context(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            context = ids("next", PROMPT)
            engine.start(request("next", context, OUTPUT))
            context = grown(context, await bench.recorder.end_of("next"))
            longer = [*context, *ids("a tool's answer", 100)]
            engine.start(request("next", longer, OUTPUT, shared=len(context)))
            end = await bench.recorder.end_of("next")
            assert len(context) - 64 <= end.cached_tokens <= len(context)

        bench.run(main())

    def test_samples_of_a_group_share_the_kv_of_their_prompt(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            context = ids("shared prompt", PROMPT)
            engine.start(request("one", context, OUTPUT, group="both"))
            assert (await bench.recorder.end_of("one")).cached_tokens == 0
            engine.start(request("two", context, OUTPUT, group="both"))
            assert (await bench.recorder.end_of("two")).cached_tokens >= PROMPT - 64

        bench.run(main())

    def test_counters_follow_what_runs(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            await until(lambda: engine.sample().running == 0)
            for name in ("count1", "count2"):
                engine.start(request(name, ids(name, PROMPT), LONG_OUTPUT))
            await until(lambda: engine.sample().running == 2)
            assert engine.sample().kv_used_tokens >= 2 * PROMPT
            for name in ("count1", "count2"):
                engine.abort(TrajectoryId(name))
                await bench.recorder.end_of(name)
            await until(lambda: engine.sample().running == 0)

        bench.run(main())

    def test_there_is_nothing_to_export_of_a_trajectory_it_never_saw(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            assert not engine.export_kv(TrajectoryId("stranger"), ids("stranger", PROMPT))
            await asyncio.sleep(0.2)
            assert bench.recorder.of(engine) == []

        bench.run(main())

    def test_an_answer_names_its_move(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.engine()
            context, name = ids("asked", PROMPT), TrajectoryId("asked")
            engine.start(request("asked", context, 4))
            context = grown(context, await bench.recorder.end_of("asked"))
            handle = None
            expected = []
            if engine.capabilities.export_kv:
                assert engine.export_kv(name, context, move=7)
                _, handle = await bench.recorder.take("exported")
                expected.append(7)
            if engine.import_kv(name, GroupId("asked"), context, handle, move=8) is None:
                await bench.recorder.take("placed")
                expected.append(8)
            assert not engine.export_kv(TrajectoryId("unasked"), context, move=9)
            assert bench.recorder.moves.get(name, []) == expected
            assert "unasked" not in bench.recorder.moves
            engine.forget(name)

        bench.run(main())

    def test_a_moved_context_is_found_on_the_other_engine(self, bench: Bench) -> None:
        async def main() -> None:
            source, target = await bench.engine(0), await bench.engine(1)
            context = ids("moved", PROMPT)
            source.start(request("moved", context, OUTPUT))
            context = grown(context, await bench.recorder.end_of("moved"))
            name = TrajectoryId("moved")
            handle = None
            if source.export_kv(name, context):
                _, handle = await bench.recorder.take("exported")
            placed = target.import_kv(name, GroupId("moved"), context, handle)
            if placed is None:
                _, placed = await bench.recorder.take("placed")
            assert placed.way == ("kv" if handle is not None else "prefill")
            assert len(context) - 64 <= placed.tokens <= len(context)
            longer = [*context, *ids("what the tool said", 64)]
            target.start(request("moved", longer, OUTPUT, shared=len(context)))
            end = await bench.recorder.end_of("moved")
            assert end.finished
            assert placed.tokens - 64 <= end.cached_tokens <= len(context)
            source.forget(name)
            assert bench.recorder.reports == []

        bench.run(main())

    def test_new_weights_void_all_kv_and_keep_the_tokens_of_running_steps(
        self, bench: Bench
    ) -> None:
        async def main() -> None:
            engine = await bench.engine()
            if not engine.capabilities.update_weights:
                pytest.skip("the owner of such engines updates their weights")
            context = ids("weights", PROMPT)
            engine.start(request("before", context, 4, group="w"))
            await bench.recorder.end_of("before")
            for name in (f"during{attempt}" for attempt in range(ATTEMPTS)):
                engine.start(request(name, ids(name, PROMPT), 400))
                await asyncio.sleep(0.2)
                if not bench.recorder.of(engine):
                    break
                await bench.recorder.end_of(name)  # it ended while this process did not run
            engine.update_weights(1, bench.weights)
            assert bench.recorder.of(engine) == []
            assert await bench.recorder.take("updated") == 1
            during = await bench.recorder.end_of(name)
            assert (during.tokens, during.finished) == (400, True)
            engine.start(request("late", context, 4, group="w"))
            assert (await bench.recorder.end_of("late")).cached_tokens == 0

        bench.run(main())

    def test_a_stopped_engine_reports_once_and_accepts_nothing_more(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.give()
            engine.stop()
            await bench.recorder.take("stopped")
            with pytest.raises(EngineRefusedError):
                engine.start(request("too late", ids("too late", 32), 4))
            await asyncio.sleep(0.2)
            assert bench.recorder.of(engine) == []

        bench.run(main())

    def test_a_failing_engine_hands_over_every_step_that_has_not_ended(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.give()
            engine.start(request("done", ids("done", 64), 4))
            await bench.recorder.end_of("done")
            for name in ("lost1", "lost2"):
                engine.start(request(name, ids(name, PROMPT), LONG_OUTPUT))
            for name in ("lost1", "lost2"):
                await bench.heard(engine, name)
            engine.start(request("fresh", ids("fresh", PROMPT), LONG_OUTPUT))
            bench.fail(engine)
            reason, salvaged = await bench.recorder.take("failed")
            assert reason
            assert list(salvaged) == ["lost1", "lost2", "fresh"]
            for name in ("lost1", "lost2"):
                end = salvaged[name]
                assert not end.finished
                assert 0 < end.tokens < LONG_OUTPUT
                assert len(end.output_ids) == (end.tokens if bench.makes_tokens else 0)
            engine.abort(TrajectoryId("lost1"))
            await asyncio.sleep(0.2)
            assert bench.recorder.of(engine) == []

        bench.run(main())

    def test_a_killed_engine_reports_nothing(self, bench: Bench) -> None:
        async def main() -> None:
            engine = await bench.give()
            engine.start(request("silent", ids("silent", PROMPT), LONG_OUTPUT))
            engine.kill()
            await asyncio.sleep(0.5)
            assert bench.recorder.of(engine) == []

        bench.run(main())
