"""`heddle run` merges two real engines of TP 1 into one of TP 2 in the middle of a rollout.

The cost estimate says that TP 2 is a thousand times as fast, and the start is said to take no time.
So both engines are merged when the first trajectory has ended, whatever the machine does.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import heddle.engine_stack
import heddle.engines
import heddle.running
from campaigns.faults.books import Books
from campaigns.processes import descendants
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig, RuntimeConfig
from heddle.runs import Run, load_run
from heddle.runs.replay import replay
from heddle_core.commands import Dispatch, SolvePlan, StartEngine
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    StepFinished,
    StepPreempted,
)
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineListener
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import ServiceListener
from heddle_runtime.process.child import group_members
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.launcher import VllmLauncher
from tests.rollout.contract import until
from tests.runtime.dying_vllm_process import DIES
from tests.runtime.vllm_bench import needs_vllm

pytestmark = needs_vllm

PROFILE = Path(__file__).resolve().parents[2] / "experiments" / "real_cpu" / "profile.json"
STEPS = {"first": [20], "in_tool": [4, 40], "long0": [500, 30], "long1": [500, 30]}
"""Output tokens of each step. When `first` ends, `in_tool` is in its tool or has just left
it, and the others are in their first step on the other engine."""
PROMPT, OBSERVED, TOOL_S = 320, 40, 2.0


class PausingLauncher(VllmLauncher):
    """Pauses the engine of the long steps once they have made tokens, until the merge.

    However slow the other engine is, they have not ended then.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pausing: list[asyncio.Task[None]] = []
        self.paused: list[int] = []
        self.wide: list[VllmEngine] = []
        SolvedAtOnce.resume = self.resume

    def start(self, spec: EngineSpec, listener: EngineListener) -> VllmEngine:
        engine = super().start(spec, listener)
        if spec.shape.tp == 1:
            self.pausing.append(asyncio.get_running_loop().create_task(self.pause(engine)))
        else:
            self.wide.append(engine)
        return engine

    async def pause(self, engine: VllmEngine) -> None:
        await until(lambda: "long0" in made_of(engine) and "first" not in engine._running)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        self.paused.append(engine.pid)

    def resume(self) -> None:
        for task in self.pausing:
            task.cancel()
        while self.paused:
            os.kill(self.paused.pop(), signal.SIGCONT)


class SolvedAtOnce:
    """In the place of `ProcessSolver`, whose process takes longer than the steps."""

    resume: Callable[[], None] = staticmethod(lambda: None)

    def solve(self, command: SolvePlan, listener: ServiceListener) -> None:
        type(self).resume()
        listener.plan_solved(command, command.problem.solve())

    def close(self) -> None: ...


class KillingLauncher(PausingLauncher):
    """Kills the first wide engine while it starts; the second one ends in its first steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, module="tests.runtime.dying_vllm_process")

    def start(self, spec: EngineSpec, listener: EngineListener) -> VllmEngine:
        engine = super().start(spec, listener)
        if self.wide == [engine]:
            self.killing = asyncio.get_running_loop().create_task(kill_while_it_starts(engine))
        elif len(self.wide) == 2:
            Path(os.environ[DIES]).touch()
        return engine


def made_of(engine: VllmEngine) -> list[str]:
    """Trajectories of which tokens have been reported."""
    return [step.trajectory for step in engine._running._by_id.values() if step.made]


async def kill_while_it_starts(engine: VllmEngine) -> None:
    """Kill it as soon as the processes of its ranks are there."""
    await until(lambda: engine.pid is not None and len(group_members(engine.pid)) > 2)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


class Rollouts:
    """Runs of one trace on one model."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        make_tiny_model(folder / "model", seed=1)
        (folder / "trace.jsonl").write_text("\n".join(records()))
        profile = json.loads(PROFILE.read_text())
        wide = profile["tables"]["2"] = deepcopy(profile["tables"]["1"])
        for term in ("t0_s", "t1_s", "t2_s", "prefill_s"):
            wide["belief"][term] /= 1000
        (folder / "profile.json").write_text(json.dumps(profile))
        patch.setattr(heddle.engine_stack, "ProcessSolver", SolvedAtOnce)

    def run(
        self, policy: str, *, engines: int, launcher: type[VllmLauncher] = VllmLauncher
    ) -> tuple[Run, dict[str, list[int]]]:
        """The run, and the context in which each trajectory ended."""
        agents: list[ScriptedAgent] = []

        class Kept(ScriptedAgent):
            def __init__(self, *args: object, **options: object) -> None:
                super().__init__(*args, **options)
                agents.append(self)

        self._patch.setattr(heddle.running, "ScriptedAgent", Kept)
        self._patch.setattr(heddle.engines, "VllmLauncher", launcher)
        config = RunConfig(
            trace=str(self._folder / "trace.jsonl"),
            history="none",
            cluster=ClusterConfig(
                model=str(self._folder / "profile.json"),
                gpus=engines,
                max_running=8,
                engine_start_s=0.0,
            ),
            policy=PolicyConfig(preset=policy),
            runtime=RuntimeConfig(
                engine="vllm",
                model_dir=str(self._folder / "model"),
                dtype="float32",
                max_context=2048,
                kv_mib=64,
            ),
        )
        before = descendants()
        done = heddle.running.run(config, out=self._folder / "runs")
        assert [process for process in descendants() if process not in before] == []
        return load_run(done.path), {agent.id: list(agent.context_ids) for agent in agents}


def records() -> Iterator[str]:
    tool = {"tool": "wait", "tool_s": TOOL_S, "tool_tokens": OBSERVED, "tool_ok": True}
    for name, (*before, last) in STEPS.items():
        steps = [{"output_tokens": tokens, **tool} for tokens in before]
        yield json.dumps(
            {
                "trajectory_id": name,
                "group_id": name,
                "workload": "other",
                "prompt_tokens": PROMPT,
                "steps": [*steps, {"output_tokens": last}],
            }
        )


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Rollouts:
    return Rollouts(tmp_path_factory.mktemp("widening"), patch)


@pytest.fixture(scope="module")
def undisturbed(rollouts: Rollouts) -> dict[str, list[int]]:
    """Contexts after a run on one engine that nothing happens to."""
    _, contexts = rollouts.run("verl", engines=1)
    return contexts


def check_books(run: Run) -> None:
    """Every trajectory has ended with the tokens of its script, none made twice; and the journal
    replays."""
    books = Books(gpus=2)
    for entry in run.entries():
        books.took_place(entry.event)
        for command in entry.commands:
            books.opened(command)
    books.closed()
    assert books.finished == dict.fromkeys(STEPS, "completed")
    assert books.made == Counter({name: sum(steps) for name, steps in STEPS.items()})
    assert replay(run).divergence is None


@pytest.mark.soak
def test_two_engines_become_one_of_tp_2_in_mid_rollout(
    rollouts: Rollouts, undisturbed: dict[str, list[int]]
) -> None:
    run, contexts = rollouts.run("heddle+fixed", engines=2, launcher=PausingLauncher)
    assert contexts == undisturbed
    check_books(run)
    events = [entry.event for entry in run.entries()]
    ready = {e.engine: e.shape.tp for e in events if isinstance(e, EngineReady)}
    assert list(ready.values()) == [1, 1, 2]
    # Steps under way were preempted, and their contexts were prefilled anew on the wide engine.
    preempted = [e.trajectory for e in events if isinstance(e, StepPreempted)]
    assert sorted(preempted) == ["long0", "long1"]
    on_wide = [e for e in events if isinstance(e, StepFinished) and ready[e.engine] == 2]
    again = {e.trajectory: e for e in reversed(on_wide)}
    assert set(again) == {"in_tool", "long0", "long1"}
    assert [e.cached_tokens for e in again.values()] == [0, 0, 0]


@pytest.mark.soak
def test_a_wide_engine_that_is_killed_loses_no_trajectory(
    rollouts: Rollouts,
    undisturbed: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(DIES, str(tmp_path / "dies"))
    run, contexts = rollouts.run("heddle+fixed", engines=2, launcher=KillingLauncher)
    assert contexts == undisturbed
    check_books(run)
    entries = list(run.entries())
    starts = [c for e in entries for c in e.commands if isinstance(c, StartEngine)]
    wide = [c.engine for c in starts if c.shape.tp == 2]
    failed = [e.event for e in entries if isinstance(e.event, EngineFailed)]
    assert [e.reason for e in failed] == ["killed by SIGKILL"] * 2
    assert [e.engine for e in failed] == wide[:2]
    assert failed[0].salvaged == ()
    assert sum(tokens for _, tokens in failed[1].salvaged) > 0
    dispatched = {c.engine for e in entries for c in e.commands if isinstance(c, Dispatch)}
    assert dispatched == {"e0", "e1", *wide[1:]}
