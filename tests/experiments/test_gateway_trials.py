"""Agents and kills behind the gateway: what the checks notice, and what agents get."""

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from heddle_core.events import EngineFailed, Event, StepFinished, StepPreempted
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.journal import Entry
from heddle_rollout.scripted_agent import TokenSource
from heddle_trace.schema import StepScript, TrajectoryScript
from tests.gateway.served import NO_AIOHTTP, run, served

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from experiments.real_cpu import engine_kills, gateway_agents, gateway_kills, token_engine  # noqa: E402
from experiments.real_cpu.gateway_clients import Client, LostStepError  # noqa: E402
from heddle_runtime.clock import RunClock  # noqa: E402

WHO = {"trajectory": TrajectoryId("t1"), "engine": EngineId("e0"), "time_s": 0.0}


def finished(tokens: int, step: int = 0) -> StepFinished:
    return StepFinished(**WHO, step=step, output_tokens=tokens, reason="tool_call")


def preempted(tokens: int) -> StepPreempted:
    return StepPreempted(**WHO, step=0, output_tokens=tokens)


def failed(tokens: int) -> EngineFailed:
    salvaged = ((TrajectoryId("t1"), tokens),)
    return EngineFailed(time_s=0.0, engine=EngineId("e0"), reason="killed", salvaged=salvaged)


def checked(
    events: list[Event], got: list[int], monkeypatch: pytest.MonkeyPatch, *, killed: bool = False
) -> gateway_kills.Journals:
    """What the check finds in a journal of these events, when clients got so many tokens."""
    loaded = SimpleNamespace(entries=lambda: (Entry(event, ()) for event in events))
    same = SimpleNamespace(divergence=None)
    monkeypatch.setattr(gateway_kills, "load_run", lambda path, unfinished: loaded)
    monkeypatch.setattr(gateway_kills, "replay", lambda loaded_run: same)
    answered = gateway_kills.Answered()
    answered.tokens["run", "t1"] = got
    path = Path("run")
    ended = {path} if killed else set()
    return gateway_kills.check_journals([path], answered, ended)


def test_tokens_of_all_parts_of_a_step_are_those_of_its_answer(monkeypatch: pytest.MonkeyPatch):
    events = [preempted(3), failed(4), finished(5), finished(6, step=1)]
    found = checked(events, [12, 6], monkeypatch)
    assert (found.wrong, found.salvaged, found.undelivered) == ([], 4, 0)
    assert checked(events, [12], monkeypatch).undelivered == 1


@pytest.mark.parametrize("got", [[11], [13], [12, 1], [12, 6, 6], []])
def test_a_token_that_is_lost_or_there_twice_is_noticed(
    got: list[int], monkeypatch: pytest.MonkeyPatch
):
    events = [preempted(3), failed(4), finished(5), finished(6, step=1)]
    assert len(checked(events, got, monkeypatch).wrong) == 1


def test_a_journal_of_a_killed_gateway_may_end_early_but_not_differ(
    monkeypatch: pytest.MonkeyPatch,
):
    events = [finished(12), finished(6, step=1)]
    found = checked(events, [12, 6, 8], monkeypatch, killed=True)
    assert (found.wrong, found.unwritten) == ([], 1)
    assert checked(events, [12, 7, 8], monkeypatch, killed=True).wrong
    assert checked(events, [12, 6, 8], monkeypatch).wrong


def test_tokens_that_engines_sent_twice_are_counted(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("7 100 8\n7 108 8\n")
    other.write_text("7 104 8\n9 100 3\n")
    assert gateway_kills.sent_twice([one, other]) == (27, 8)


def test_ratios_are_compared_by_medians():
    measured = {"heddle": [9.0, 10.0, 30.0], "slime": [20.0, 20.0, 21.0]}
    lines = [*gateway_agents.table(measured, {"heddle": 10.0, "slime": 25.0})]
    assert lines[2] == "| `heddle` | 10.0 (9.0 to 30.0) | 10.0 | +0.0 % |"
    assert lines[-1] == "| `heddle` / `slime` | 0.500 | 0.400 | +25.0 % |"


def test_agents_of_the_trial_follow_their_scripts_through_the_gateway():
    steps = (
        StepScript(40, 0, 20, "bash", 0.01, True, 5),
        StepScript(65, 60, 10, None, 0.0, None, 0),
    )
    scripts = [
        TrajectoryScript(f"t{n}", "g", "coding", 0.0, steps, truncated=False) for n in range(4)
    ]

    async def main() -> None:
        async with served(mean_tokens=1_000_000_000) as bench, aiohttp.ClientSession() as http:
            client = Client(http, bench.url)
            await client.post("/rollouts", {"id": "agents", "trajectories": 4})
            clock = RunClock(asyncio.get_running_loop())
            clock.thaw()
            tokens = TokenSource(gateway_agents.VOCABULARY)
            await asyncio.gather(
                *(gateway_agents.act(script, client, clock, tokens) for script in scripts)
            )
            made = [event.output_tokens for event in bench.events(StepFinished)]
            assert sorted(made) == [10] * 4 + [20] * 4
            assert client.attempts == {"status 200": 8}

    run(main())


def test_a_client_sends_a_step_again_until_it_is_answered_and_not_after_a_refusal():
    async def main() -> None:
        async with served() as bench, aiohttp.ClientSession() as http:
            nobody = Client(http, "http://127.0.0.1:9")
            waiting = asyncio.create_task(nobody.step("s", array("I", [20, 21]), 4))
            while not nobody.attempts["connection lost"]:
                await asyncio.sleep(0.01)
            nobody.url = bench.url
            ids, trajectory = await waiting
            assert (len(ids) <= 4, trajectory) == (True, "s")
            with pytest.raises(LostStepError, match="400"):
                await Client(http, bench.url).step("t", array("I", []), 4)

    run(main())


def test_tokens_of_an_engine_process_depend_on_their_context_alone():
    first = [token_engine.next_token(5, position) for position in range(100)]
    assert first == [token_engine.next_token(5, position) for position in range(100)]
    assert first != [token_engine.next_token(6, position) for position in range(100)]
    assert all(16 <= token < 1 << 31 for token in first)


def test_a_step_with_other_tokens_than_undisturbed_is_noticed(monkeypatch: pytest.MonkeyPatch):
    class Engine:
        def __init__(self, http: object, url: str) -> None:
            pass

        async def step(
            self, session: str, context: "array[int]", tokens: int
        ) -> tuple[list[int], str]:
            return [context[0] + n for n in range(tokens)], session

        async def post(self, path: str, body: object) -> None:
            pass

    monkeypatch.setattr(engine_kills, "Client", Engine)
    trial: Any = SimpleNamespace(sent=[(array("I", [5]), [5, 6]), (array("I", [7]), [7, 9, 9])])
    wrong = asyncio.run(engine_kills.undisturbed(trial, ""))
    assert len(wrong) == 1
    assert "[7, 9, 9], not [7, 8, 9]" in wrong[0]


def test_signals_go_to_engine_processes_that_run():
    def start(*words: str) -> subprocess.Popen[bytes]:
        program = "import time; print(flush=True); time.sleep(600)"
        command = [sys.executable, "-c", program, *words]
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # for a moment a new process has no command line
        return process

    other, engine, stopped = start(), start(engine_kills.MODULE), start(engine_kills.MODULE)
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        gateway: Any = SimpleNamespace(children=[other.pid, engine.pid, stopped.pid, 1 << 22])
        assert engine_kills._engines(gateway) == [engine.pid]
    finally:
        for each in (other, engine, stopped):
            each.kill()
            each.communicate()


def test_shrunk_trajectories_keep_their_steps():
    short = gateway_agents.records(3, shrink=8.0)
    whole = gateway_agents.records(3, shrink=1.0)
    assert [len(r.steps) for r in short] == [len(r.steps) for r in whole]
    assert sum(s.output_tokens or 0 for r in short for s in r.steps) < 0.2 * sum(
        s.output_tokens or 0 for r in whole for s in r.steps
    )
    assert msgspec.to_builtins(short[0].group_id) == whole[0].group_id
