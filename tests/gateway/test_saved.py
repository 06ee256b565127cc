"""What a gateway that is killed and started again still knows."""

import json
import random
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from heddle.runs import load_run
from heddle.runs.replay import replay
from heddle_core.events import TrajectoryArrived
from tests.app.gateways import Gateway, gateway
from tests.gateway.served import NO_AIOHTTP, run
from tests.patience import PATIENCE_S

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_gateway.saved import SavedState, SavedStateError
from tests.app.test_serve import FakeVllmThread
from tests.gateway.test_engine_urls import expected
from tests.gateway.test_http import IDS, client

GENERATE = "/inference/v1/generate"
CLIENTS = 4


def test_a_file_of_state_has_one_gateway_and_others_are_refused(tmp_path: Path):
    path = tmp_path / "state.db"
    first = SavedState(path, idle_s=1.0, keep_answer_s=1.0)
    with pytest.raises(SavedStateError, match="another gateway uses it"):
        SavedState(path, idle_s=1.0, keep_answer_s=1.0)
    first.close()
    SavedState(path, idle_s=1.0, keep_answer_s=1.0).close()
    path.write_bytes(b"no database" * 100)
    with pytest.raises(SavedStateError, match=r"state\.db"):
        SavedState(path, idle_s=1.0, keep_answer_s=1.0)
    with pytest.raises(SavedStateError, match="No such file"):
        SavedState(tmp_path / "none" / "state.db", idle_s=1.0, keep_answer_s=1.0)


def test_kept_answers_and_ends_of_sessions_are_known_to_the_next_gateway(tmp_path: Path):
    async def once(number: int, new: int) -> list[Any]:
        saved = SavedState(tmp_path / "state.db", idle_s=60.0, keep_answer_s=60.0)
        async with client(mean_tokens=10**9, saved=saved) as http:
            for stream in (False, True):
                status, answer = await http(
                    "POST", GENERATE, {**IDS, "stream": stream}, X_Session_ID="s"
                )
                assert status == 200
            other = {**IDS, "sampling_params": {"max_tokens": 7}}
            await http.post(GENERATE, other, X_Session_ID=f"t{number}")
            assert http.bench.gateway.dispatches == new
            found = [await http.post(GENERATE, IDS, X_Session_ID="s"), answer]
            if number == 1:
                ends = [await http.post("/finish_session?session_id=s") for _ in range(2)]
                assert [end["finished"] for end in ends] == [True, False]
        saved.close()
        return [found[0]["choices"], found[1].count("token_ids")]

    first, second, third = (run(once(*each)) for each in ((0, 2), (1, 1), (2, 2)))
    assert first[0] == second[0]
    assert third[1] > 0


class Killed:
    """A gateway that may be killed and started again, at one address."""

    def __init__(self, folder: Path, *workers: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self._args = ("--port", str(port), *(w for url in workers for w in ("--worker", url)))
        self._args += ("--set", "serve.state=state.db")
        self._folder = folder
        self.gateway: Gateway | None = None
        self.url = f"http://127.0.0.1:{port}"

    @contextmanager
    def running(self) -> Iterator[Gateway]:
        with gateway(self._folder, *self._args) as self.gateway:
            yield self.gateway

    def ask(self, session: str, body: Any) -> tuple[Any, str]:
        """Answer and engine of a step, however often it has to be sent."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            sent = urllib.request.Request(
                self.url + GENERATE,
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json", "X-Session-ID": session},
            )
            try:
                with urllib.request.urlopen(sent, timeout=PATIENCE_S) as answer:
                    return json.load(answer), answer.headers["x-heddle-engine"]
            except (OSError, ValueError) as error:
                if getattr(error, "code", 503) != 503 or time.monotonic() > until_s:
                    raise
                time.sleep(0.05)


def servers(stack: ExitStack) -> list[FakeVllmThread]:
    found = [FakeVllmThread() for _ in range(2)]
    for each in found:
        each.vllm.tp = 1
        stack.enter_context(each)
    return found


def test_sessions_go_on_where_they_ran(tmp_path: Path):
    with ExitStack() as stack:
        engines = servers(stack)
        killed = Killed(tmp_path, *(each.vllm.url for each in engines))
        bodies = {
            f"s{n}": {"token_ids": [300 + n], "sampling_params": {"max_tokens": 4}}
            for n in range(6)
        }
        with killed.running() as first:
            before = {name: killed.ask(name, body) for name, body in bodies.items()}
            first.process.kill()
            first.process.wait()
        with killed.running() as second:
            for name, body in bodies.items():
                answer, _ = killed.ask(name, body)
                assert answer["choices"] == before[name][0]["choices"]
            # Those that do not stream bring KV to an engine.
            seen = [b for e in engines for b in e.vllm.seen if b.get("stream")]
            prompts = [b["token_ids"] for b in seen]
            for body in bodies.values():
                assert prompts.count(body["token_ids"]) == 1
            for name, body in bodies.items():
                ids = [*body["token_ids"], *before[name][0]["choices"][0]["token_ids"], 301]
                assert killed.ask(name, {**body, "token_ids": ids})[1] == before[name][1]
            summary = second.end()
    recorded = load_run(tmp_path / summary["run"])
    arrived = [e.event for e in recorded.entries() if isinstance(e.event, TrajectoryArrived)]
    assert {e.hints.home for e in arrived if e.hints} == {found[1] for found in before.values()}
    assert replay(recorded).divergence is None


@pytest.mark.parametrize(
    "kills", [pytest.param(10, id="10"), pytest.param(50, marks=pytest.mark.soak, id="50")]
)
def test_a_gateway_that_is_killed_under_load_loses_no_session_and_no_token(
    tmp_path: Path, kills: int
):
    with ExitStack() as stack:
        engines = servers(stack)
        killed = Killed(tmp_path, *(each.vllm.url for each in engines))
        over, faults = threading.Event(), list[BaseException]()
        steps = [0] * CLIENTS

        def times(prompt: list[int]) -> int:
            # Those that do not stream bring KV to an engine.
            seen = [b for e in engines for b in list(e.vllm.seen) if b.get("stream")]
            return sum(body["token_ids"] == prompt for body in seen)

        def play(n: int) -> None:
            context, rng = [300 + n], random.Random(n)
            try:
                while not over.is_set():
                    tokens = rng.randint(1, 40)
                    body = {"token_ids": context, "sampling_params": {"max_tokens": tokens}}
                    answer, _ = killed.ask(f"s{n}", body)
                    made = answer["choices"][0]["token_ids"]
                    assert made == expected(context, tokens)
                    begun = times(context)
                    assert begun > 0
                    if rng.random() < 0.3:
                        again, _ = killed.ask(f"s{n}", body)
                        assert again["choices"] == answer["choices"]
                        assert times(context) == begun
                    steps[n] += 1
                    context = [*context, *made, 301] if len(context) < 400 else [300 + n, steps[n]]
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=play, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for round_ in range(kills + 1):
            with killed.running() as current:
                began = list(steps)
                while any(now < before + 2 for now, before in zip(steps, began, strict=True)):
                    assert not faults, faults
                    time.sleep(0.01)
                if round_ < kills:
                    current.process.kill()
                    current.process.wait()
                else:
                    over.set()
                    for thread in threads:
                        thread.join()
                    current.end()
        assert not faults


def test_an_answer_of_another_version_is_made_again(tmp_path: Path):
    path = tmp_path / "state.db"
    saved = SavedState(path, 60.0, 60.0)
    with sqlite3.connect(path) as db:
        row = ("s", b"key", time.time() + 60.0, msgspec.msgpack.encode(["an", "older", "form"]))
        db.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", row)
    assert saved.restore("s", SimpleNamespace(key=b"key")) is False
    saved.close()


def test_a_file_that_is_locked_or_broken_ends_nothing_and_is_logged_once(tmp_path: Path, caplog):
    path = tmp_path / "state.db"
    saved = SavedState(path, 60.0, 60.0)

    async def main() -> None:
        async with client(mean_tokens=10**9, saved=saved) as http:
            await http.post(GENERATE, IDS, X_Session_ID="s")
            with sqlite3.connect(path) as other:
                other.execute("BEGIN EXCLUSIVE")
                saved.sweep()
                await http.post(GENERATE, IDS, X_Session_ID="t")
                assert (await http.post("/finish_session?session_id=u"))["finished"] is False
            assert [r.message.count("locked") for r in caplog.records] == [1]
            await http.post(GENERATE, IDS, X_Session_ID="kept again")
            saved._db.execute("DROP TABLE answers")
            saved._db.execute("DROP TABLE sessions")
            for call in (saved.sweep, lambda: saved.url_of("s"), lambda: saved.finish("s")):
                call()
            await http.post(GENERATE, IDS, X_Session_ID="v")
            assert len(caplog.records) == 2

    run(main())
    saved.close()


def test_a_file_with_a_damaged_page_is_refused_at_the_start(tmp_path: Path):
    path = tmp_path / "state.db"
    SavedState(path, 1.0, 1.0).close()
    with sqlite3.connect(path) as db:
        rows = ((f"s{n}", "u" * 200, 1.0) for n in range(500))
        db.executemany("INSERT INTO sessions VALUES (?, ?, ?)", rows)
    content = bytearray(path.read_bytes())
    content[-8192:-4096] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises(SavedStateError, match=r"state\.db"):
        SavedState(path, 1.0, 1.0)


def test_a_file_has_one_lock_by_whatever_name_and_is_its_owners_alone(tmp_path: Path):
    path, link = tmp_path / "state.db", tmp_path / "link.db"
    link.symlink_to(path)
    saved = SavedState(path, 1.0, 1.0)
    with pytest.raises(SavedStateError, match="another gateway uses it"):
        SavedState(link, 1.0, 1.0)
    assert not path.stat().st_mode & 0o077
    saved.close()
