"""The loop of an engine's process, on a core of which every call is seen."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from heddle_core.ids import TrajectoryId
from heddle_runtime.process import wire
from heddle_runtime.process.loop import serve
from heddle_runtime.process.running_steps import RunningSteps, split_time
from heddle_runtime.process.stepped_engine import Activity, IterationOutput
from heddle_runtime.process.wire import (
    Channel,
    ClosedError,
    Report,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from heddle_runtime.vllm.settings import VllmSettings
from tests.patience import PATIENCE_S
from tests.rollout.contract import ids
from tests.runtime.counting_process import CAPACITY, CountingCore, next_token

HERE = {"params": {"file": "/nowhere"}, "version": 0}


@dataclass(slots=True)
class SpiedCore(CountingCore):
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    crowded: bool = False
    stall_pulls: bool = False
    """Pulls begin and do not end."""

    def add(self, request: str, prompt: list[int], **how: Any) -> None:
        self.calls.append(("add", request, len(prompt), how.get("pin"), how.get("known")))
        CountingCore.add(self, request, prompt, **how)

    def abort(self, request: str) -> None:
        self.calls.append(("abort", request))
        CountingCore.abort(self, request)

    def step(self) -> Iterator[IterationOutput]:
        if self.stall_pulls:
            for running in self.requests.values():
                running.scheduled_s = running.scheduled_s or time.monotonic()
        for output in CountingCore.step(self):
            yield output._replace(logprobs=[logprob(token) for token in output.tokens])

    def counters(self) -> tuple[int, int, int]:
        return len(self.requests), int(self.crowded), 0


@dataclass(slots=True)
class LateCore(SpiedCore):
    """It still computes for some iterations what was aborted, as asynchronous scheduling does."""

    late: int = 0

    def abort(self, request: str) -> None:
        SpiedCore.abort(self, request)
        self.late = 3

    def activity(self) -> Activity:
        return "computing" if self.late else SpiedCore.activity(self)

    def step(self) -> Iterator[IterationOutput]:
        if self.late:
            self.late -= 1
        return SpiedCore.step(self)

    def load_weights(self, path: str, *, keep_kv: bool = False) -> None:
        self.calls.append(("load", self.late))
        SpiedCore.load_weights(self, path, keep_kv=keep_kv)


def logprob(token: int) -> float:
    """Of a token, exact in 32 bits."""
    return -token / 1024


class Driver:
    """The other end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel: Channel[Report] = Channel(sock, Report)
        self.reports: list[Report] = []

    def send(self, order: wire.Order) -> None:
        self.channel.send(order)

    def take(self, kind: type[Report]) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            self.channel.flush()
            for report in self.reports:
                if isinstance(report, kind):
                    self.reports.remove(report)
                    return report
            if select.select([self.channel], [], [], 0.1)[0]:
                self.reports += self.channel.receive()
        raise AssertionError(f"no {kind.__name__} came")

    def step(self, id_: int, trajectory: str, context: list[int], output: int) -> list[int]:
        """Run a step to its end; its tokens, those of progress reports included."""
        self.send(wire.Start(id_, trajectory, pack_ids(context), output, True))
        ended = self.take(wire.Ended)
        made = [m.tokens for r in self.reports if isinstance(r, wire.Progress) for m in r.made]
        self.reports.clear()
        return unpack_ids(b"".join([*made, ended.tokens]))


@contextmanager
def at_work(core: SpiedCore, **settings: Any) -> Iterator[Driver]:
    """A loop in a thread of its own, and the driver that it serves."""
    ours, theirs = socket.socketpair()
    chosen = VllmSettings(**({"model_dir": "x", "progress_s": 0.02} | settings))
    loop = threading.Thread(target=serve, args=(core, Channel(theirs, wire.Order), chosen))
    loop.start()
    driver = Driver(ours)
    try:
        yield driver
    finally:
        driver.channel.close()  # as when the driver is gone
        loop.join(PATIENCE_S)
        theirs.close()
    assert not loop.is_alive()


def until(holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


@pytest.fixture
def core(tmp_path: Path) -> SpiedCore:
    return SpiedCore(tmp_path, "weights")


def test_a_pull_that_has_not_begun_by_its_deadline_becomes_a_prefill(core):
    core.hold_pulls = True
    with at_work(core) as driver:
        driver.send(wire.Import(1, pack_ids(ids("held", 100)), HERE, 0.1))
        placed = driver.take(wire.Placed)
    assert (placed.way, placed.tokens) == ("prefill", 96)
    assert "before the pull" in placed.why
    assert [call[:2] for call in core.calls] == [("add", "1.0"), ("abort", "1.0"), ("add", "1.1")]


def test_a_pull_that_does_not_end_becomes_a_prefill_once_its_lease_is_over(core):
    core.hold_pulls = core.stall_pulls = True
    with at_work(core, kv_margin_s=0.3) as driver:
        deadline_s = time.monotonic() + 0.05
        driver.send(wire.Import(1, pack_ids(ids("stalled", 100)), HERE, 0.05))
        placed = driver.take(wire.Placed)
        assert time.monotonic() > deadline_s + 0.3
    assert placed.way == "prefill"


def test_a_handle_past_its_deadline_never_reaches_the_core(core):
    with at_work(core) as driver:
        driver.send(wire.Import(1, pack_ids(ids("past", 100)), HERE, -0.001))
        placed = driver.take(wire.Placed)
    assert (placed.way, placed.why) == ("prefill", "its lease had ended")
    assert len(core.calls) == 1


def test_a_handle_of_other_weights_is_not_pulled(core, tmp_path):
    with at_work(core) as driver:
        driver.send(wire.LoadWeights(3, str(tmp_path)))
        assert driver.take(wire.WeightsLoaded).version == 3
        driver.send(wire.Import(1, pack_ids(ids("old", 100)), HERE, 100.0))
        placed = driver.take(wire.Placed)
    assert (placed.way, placed.why) == ("prefill", "it is of other weights")


def test_a_context_that_the_core_refuses_leaves_nothing_behind(core):
    with at_work(core) as driver:
        driver.send(wire.Import(1, pack_ids(ids("large", CAPACITY)), HERE, 60.0))
        placed = driver.take(wire.Placed)
    assert (placed.way, placed.tokens, placed.why) == ("none", 0, "too long")


def test_a_context_smaller_than_a_block_leaves_nothing_behind(core):
    with at_work(core) as driver:
        driver.send(wire.Import(1, pack_ids(ids("small", 20))))
        placed = driver.take(wire.Placed)
    assert (placed.way, placed.tokens) == ("none", 0)


def test_a_prompt_that_the_core_refuses_ends_its_step_with_the_reason(core):
    with at_work(core) as driver:
        context = pack_ids(ids("long", 64_000))
        driver.send(wire.Start(1, "long", context, 1, True))
        ended = driver.take(wire.Ended)
    assert (ended.finished, ended.error, unpack_ids(ended.tokens)) == (True, "too long", [])


def test_kv_kept_for_a_pull_is_let_go_when_the_trajectory_runs_there_again(core):
    context = ids("kept", 100)
    with at_work(core) as driver:
        driver.send(wire.Export(1, "kept", pack_ids(context)))
        exported = driver.take(wire.Exported)
        assert (exported.kv_tokens, core.released) == (96, [])
        driver.step(2, "other", context, 2)
        assert core.released == []
        driver.step(3, "kept", context, 2)
    assert core.released == ["1.0"]


def test_steps_are_pinned_only_on_request(core):
    with at_work(core) as driver:
        driver.step(1, "plain", ids("plain", 50), 2)
    assert core.calls == [("add", "1.0", 50, False, 0)]


def test_a_pinned_step_goes_on_in_the_request_of_the_one_before(core):
    context = ids("pinned", 50)
    with at_work(core, pin_s=60.0) as driver:
        first = driver.step(1, "pinned", context, 3)
        longer = [*context, *first, *ids("tool", 10)]
        second = driver.step(2, "pinned", longer, 3)
    # The last token was sampled and never computed.
    assert core.calls == [("add", "1.0", 50, True, 0), ("add", "1.0", 63, True, 52)]
    assert (len(first), len(second)) == (3, 3)


@pytest.mark.parametrize("why", ["another context", "time", "space", "forget", "export", "weights"])
def test_a_pinned_step_is_let_go(core, why, tmp_path):
    context = ids("gone", 50)
    with at_work(core, pin_s=0.2 if why == "time" else 60.0) as driver:
        first = driver.step(1, "gone", context, 3)
        assert ("abort", "1.0") not in core.calls
        match why:
            case "another context":
                driver.step(2, "gone", ids("compacted", 40), 3)
            case "time":
                until(lambda: ("abort", "1.0") in core.calls)
            case "space":
                core.crowded = True
                driver.step(2, "another", ids("another", 40), 30)
                until(lambda: ("abort", "1.0") in core.calls)
            case "forget":
                driver.send(wire.Forget("gone"))
            case "export":
                driver.send(wire.Export(2, "gone", pack_ids(context)))
                driver.take(wire.Exported)
            case "weights":
                driver.send(wire.LoadWeights(1, str(tmp_path)))
                driver.take(wire.WeightsLoaded)
        longer = [*context, *first, 5]
        driver.step(9, "gone", longer, 3)
    assert ("abort", "1.0") in core.calls
    # The last step is pinned too, and for want of time or space it may be let go by now.
    assert [c for c in core.calls if c[0] == "add"][-1] == ("add", "9.0", 54, True, 0)


def test_sleep_and_wake_are_answered_with_their_seconds(core):
    with at_work(core) as driver:
        driver.send(wire.Sleep(1))
        assert driver.take(wire.Slept).seconds >= 0
        driver.send(wire.Wake())
        assert driver.take(wire.Woke).seconds >= 0


def test_a_channel_gives_whole_messages_and_then_says_that_it_is_closed():
    ours, theirs = socket.socketpair()
    channel: Channel[Report] = Channel(theirs, Report)
    assert channel.receive() == []
    sent = Channel(ours, wire.Order)
    sent.send(wire.WeightsLoaded(1))
    sent.send(wire.WeightsLoaded(2))
    whole = theirs.recv(1 << 16)
    for end in range(1, len(whole)):
        mine, other = socket.socketpair()
        one: Channel[Report] = Channel(other, Report)
        mine.sendall(whole[:end])
        early = one.receive()
        mine.sendall(whole[end:])
        mine.close()
        assert [*early, *one.receive()] == [wire.WeightsLoaded(1), wire.WeightsLoaded(2)]
        with pytest.raises(ClosedError):
            one.receive()
        other.close()
    ours.close()
    theirs.close()


def test_every_token_comes_with_its_log_prob_whole_salvaged_or_resumed(core: SpiedCore):
    """In progress reports, at the end of a step, and after new weights were loaded meanwhile."""
    with at_work(core) as driver:
        in_flight = RunningSteps()
        in_flight.begin(1, TrajectoryId("a"))
        driver.send(wire.Start(1, "a", pack_ids(ids("a", 40)), 120, True))
        in_flight.keep(driver.take(wire.Progress))
        (_, salvaged), *_ = in_flight.salvage()
        assert salvaged.tokens == len(salvaged.output_logprobs) > 0
        assert list(salvaged.output_logprobs) == [logprob(t) for t in salvaged.output_ids]

        in_flight.begin(2, TrajectoryId("b"))
        driver.send(wire.Start(2, "b", pack_ids(ids("b", 40)), 120, True))
        driver.take(wire.Progress)
        driver.send(wire.LoadWeights(1, str(core.folder)))
        driver.take(wire.WeightsLoaded)
        ended = driver.take(wire.Ended)
        while ended.id != 2:
            ended = driver.take(wire.Ended)
        assert ended.tokens
        assert unpack_floats(ended.logprobs) == [logprob(t) for t in unpack_ids(ended.tokens)]


def test_new_weights_with_the_kv_kept_disturb_no_request(core: SpiedCore):
    """The step goes on under the new weights, and its end finds the prefix that was there."""
    with at_work(core) as driver:
        context = ids("kept", 64)
        driver.send(wire.Start(1, "kept", pack_ids(context), 100, True))
        first = driver.take(wire.Progress)
        other = core.folder / "other"
        other.mkdir()
        driver.send(wire.LoadWeights(1, str(other), keep_kv=True))
        driver.take(wire.WeightsLoaded)
        ended = driver.take(wire.Ended)
        rest = [m.tokens for r in driver.reports if isinstance(r, wire.Progress) for m in r.made]
        made = unpack_ids(b"".join([*(m.tokens for m in first.made), *rest, ended.tokens]))
        assert (len(made), ended.recomputes) == (100, 0)
        assert [call for call in core.calls if call[0] == "abort"] == []
        grown = [*context, *made]
        assert made[-1] == next_token(grown[:-1], str(other))
        assert made[0] == next_token(context, "weights")
        driver.reports.clear()
        driver.send(wire.Start(2, "kept", pack_ids(grown), 5, True))
        assert driver.take(wire.Ended).cached_tokens == len(grown) // 32 * 32 - (
            32 if len(grown) % 32 == 0 else 0
        )


def test_weights_wait_for_the_iteration_that_still_runs(tmp_path: Path):
    core = LateCore(tmp_path, "weights")
    with at_work(core) as driver:
        driver.send(wire.Start(1, "late", pack_ids(ids("late", 64)), 100, True))
        driver.take(wire.Progress)
        other = core.folder / "other"
        other.mkdir()
        driver.send(wire.LoadWeights(1, str(other)))
        driver.take(wire.WeightsLoaded)
        assert ("load", 0) in core.calls
        driver.take(wire.Ended)


@pytest.mark.parametrize(("inside_s", "queued_s"), [(1.5, 2.5), (5.0, 0.0)])
def test_a_step_was_queued_while_its_engine_neither_prefilled_nor_decoded(
    monkeypatch: pytest.MonkeyPatch, inside_s: float, queued_s: float
):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    steps = RunningSteps()
    steps.begin(1, TrajectoryId("t"))
    now_s = 104.0
    ended = wire.Ended(
        id=1,
        tokens=b"",
        finished=True,
        prefill_s=inside_s - 1.0,
        decode_s=1.0,
        cached_tokens=0,
        recomputes=0,
    )
    assert steps.end(ended).queued_s == queued_s


def test_the_time_of_a_step_is_split_at_the_moments_that_it_reached():
    assert split_time(1.0, 2.0, 5.0, 11.0) == (1.0, 3.0, 6.0)
    assert split_time(1.0, 2.0, 0.0, 11.0) == (1.0, 9.0, 0.0)  # ended before its first token
    assert split_time(1.0, 0.0, 0.0, 11.0) == (10.0, 0.0, 0.0)  # never started
    assert split_time(3.0, 2.0, 5.0, 4.0) == (0.0, 2.0, 0.0)  # clocks of two processes
