"""Where a step runs while engines are busy or fail at it, and when one gets steps again."""

import itertools
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from aiohttp import web

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import StepRequest
from heddle_runtime.generation import Generation, Refusal
from heddle_runtime.vllm_http.circuit import FAULTS, LONGEST_WAIT_S, Circuit, waits_s
from heddle_runtime.vllm_http.engine import HttpEngine
from tests.rollout.contract import LONG_OUTPUT, grown, ids, request, until
from tests.runtime.fake_vllm import FakeVllm
from tests.runtime.test_engine_life import streamed, two
from tests.runtime.test_http_engine import (
    OUTPUT,
    PROMPT,
    SETTINGS,
    Setup,
    alone,
    one,
    run,
    setup,
)


def step(name: str, output: int = OUTPUT) -> StepRequest:
    payload = Generation(sampling={"temperature": 0.0})
    return msgspec.structs.replace(request(name, ids(name, PROMPT), output), payload=payload)


# -- the circuit ----------------------------------------------------------------------------------


def test_it_opens_by_faults_in_a_row_and_says_so_once():
    circuit = Circuit()
    assert [circuit.failed() for _ in range(FAULTS + 2)] == [False, True, False, False]
    assert not circuit.allows(1e9)
    circuit.succeeded()
    assert circuit.allows(0.0)
    assert not circuit.failed()


def test_a_step_that_succeeds_between_two_faults_keeps_it_closed():
    circuit = Circuit()
    for _ in range(10):
        assert not circuit.failed()
        circuit.succeeded()
    assert circuit.allows(0.0)


@pytest.mark.parametrize(
    ("said_s", "shut_s"), [(None, 1.0), (0.0, 0.25), (2.0, 2.0), (60.0, LONGEST_WAIT_S)]
)
def test_one_that_is_busy_is_left_for_as_long_as_it_says_within_limits(said_s, shut_s):
    circuit = Circuit()
    circuit.busy(100.0, said_s)
    assert not circuit.allows(100.0 + shut_s - 0.01)
    assert circuit.allows(100.0 + shut_s)
    assert circuit.closed


def test_it_is_tried_at_once_and_then_ever_more_seldom_up_to_a_limit():
    waits = list(itertools.islice(waits_s(), 8))
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


# -- busy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_steps_of_an_engine_that_is_busy_run_at_another(status: int):
    async def main() -> None:
        async with setup() as made:
            engine, busy, _, other = await two(made)
            busy.generate_status = status
            names = [f"s{n}" for n in range(6)]
            for name in names:
                engine.start(step(name))
            for name in names:
                end = await made.recorder.end_of(name)
                assert (end.finished, end.error) == (True, "")
                assert list(end.output_ids) == alone(ids(name, PROMPT))
            assert streamed(other) == len(names)
            assert made.recorder.reports == []

    run(main)


@pytest.mark.parametrize("status", [429, 503])
def test_a_step_waits_while_every_engine_is_busy(status: int):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.generate_status = status
            engine.start(step("waits"))
            await until(lambda: streamed(server) == 2)
            assert not made.recorder.reports
            server.generate_status = 200
            end = await made.recorder.end_of("waits")
            assert list(end.output_ids) == alone(ids("waits", PROMPT))
            assert made.recorder.reports == []

    run(main)


def test_a_step_that_no_engine_takes_in_time_ends_with_the_last_answer():
    async def main() -> None:
        limit = msgspec.structs.replace(SETTINGS, place_limit_s=0.5)
        async with one(limit) as (made, server):
            engine = await made.begin()
            server.generate_status = 429
            engine.start(step("full"))
            end = await made.recorder.end_of("full")
            assert (end.finished, end.tokens, end.error) == (True, 0, "temperature of 429")
            assert isinstance(end.extras, Refusal)
            assert end.extras.status == 429
            assert made.recorder.reports == []

    run(main)


def test_a_step_that_waits_for_an_engine_can_be_aborted():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.generate_status = 503
            engine.start(step("waits"))
            await until(lambda: streamed(server) == 1)
            engine.abort(TrajectoryId("waits"))
            end = await made.recorder.end_of("waits")
            assert (end.finished, end.tokens, end.extras.finish_reason) == (False, 0, "abort")

    run(main)


# -- faults of steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 404, 408])
def test_a_step_at_which_an_engine_fails_runs_at_a_second_one(status: int):
    async def main() -> None:
        async with setup() as made:
            engine, faulty, _, other = await two(made)
            faulty.generate_status = status
            asked = step("hit")
            engine.start(asked)
            end = await made.recorder.end_of("hit")
            assert (end.finished, end.error) == (True, "")
            assert list(end.output_ids) == alone(ids("hit", PROMPT))
            assert (streamed(faulty), streamed(other)) == (1, 1)
            assert asked.payload.attempts.failed_at == [faulty.url]
            assert made.recorder.reports == []

    run(main)


@pytest.mark.parametrize("status", [500, 404])
def test_a_step_at_which_two_engines_fail_never_runs_at_a_third(status: int):
    async def main() -> None:
        async with setup() as made:
            servers = [await made.serve() for _ in range(3)]
            for server in servers:
                await made.launcher.add(server.url)
            engine, *_ = [await made.begin() for _ in range(3)]
            for server in servers:
                server.generate_status = status
            asked = step("kills")
            engine.start(asked)
            end = await made.recorder.end_of("kills")
            assert (end.finished, end.error) == (True, f"temperature of {status}")
            assert isinstance(end.extras, Refusal)
            assert end.extras.status == status
            assert sorted(streamed(server) for server in servers) == [0, 1, 1]
            assert len(set(asked.payload.attempts.failed_at)) == 2
            assert made.recorder.reports == []

    run(main)


def test_two_dispatches_of_a_step_share_their_faults():
    async def main() -> None:
        async with setup() as made:
            engine, faulty, _, other = await two(made)
            faulty.error_after, other.error_after = 10, 10
            asked = step("mid")
            engine.start(asked)
            first = await made.recorder.end_of("mid")
            assert not first.finished
            assert first.tokens > 0
            left = request("mid", grown(asked.prompt_ids, first), OUTPUT - first.tokens)
            engine.start(msgspec.structs.replace(left, payload=asked.payload))
            second = await made.recorder.end_of("mid")
            assert (second.finished, second.error) == (True, "the core died")
            assert asked.payload.attempts.failed_at == [faulty.url, other.url]
            assert second.extras.in_stream
            assert made.recorder.reports == []

    run(main)


def test_after_faults_in_a_row_an_engine_gets_no_step_until_it_makes_a_token():
    async def main() -> None:
        async with setup() as made:
            engine, faulty, _, other = await two(made)
            faulty.generate_status = 500
            for n in range(FAULTS):
                engine.start(step(f"s{n}"))
                assert (await made.recorder.end_of(f"s{n}")).finished
            assert not engine.takes_steps
            seen = streamed(faulty)
            for n in range(5):
                engine.start(step(f"late {n}"))
                assert (await made.recorder.end_of(f"late {n}")).finished
            assert streamed(faulty) == seen
            faulty.generate_status = 200
            await until(lambda: engine.takes_steps)
            before = streamed(other)
            engine.start(step("back"))
            assert (await made.recorder.end_of("back")).finished
            assert (streamed(faulty), streamed(other)) == (seen + 1, before)
            assert made.recorder.reports == []

    run(main)


class Refuses(FakeVllm):
    """Sends an error as the first event of each stream."""

    code = 400

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return await self._one_token(body)
        self.seen.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        error = {"message": "no such thing", "type": "BadRequestError", "param": None}
        data = msgspec.json.encode({"error": {**error, "code": self.code}})
        await response.write(b"data: " + data + b"\n\ndata: [DONE]\n\n")
        return response


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_refusal_as_an_event_of_a_stream_is_the_clients_and_tried_nowhere_else(code: int):
    async def main() -> None:
        async with setup() as made:
            refuses = Refuses()
            refuses.code = code
            await refuses.start()
            made.servers.append(refuses)
            await made.launcher.add(refuses.url)
            engine = await made.begin()
            other = await made.serve()
            await made.launcher.add(other.url)
            await made.begin()
            for n in range(4):
                engine.start(step(f"bad {n}"))
                end = await made.recorder.end_of(f"bad {n}")
                assert (end.finished, end.tokens, end.error) == (True, 0, "no such thing")
                assert isinstance(end.extras, Refusal)
                assert (end.extras.status, end.extras.in_stream) == (code, True)
                assert end.extras.body["error"]["type"] == "BadRequestError"
            assert engine.takes_steps
            assert (streamed(refuses), streamed(other)) == (4, 0)
            assert made.recorder.reports == []

    run(main)


# -- guests ---------------------------------------------------------------------------------------


class Listens(FakeVllm):
    """Keeps the ids of the aborts that it gets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.aborts: list[str] = []

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts += (await request.json())["request_ids"]
        return await super()._abort(request)


async def with_guest(made: Setup) -> tuple[HttpEngine, Listens, HttpEngine, Listens]:
    """A step of the first engine runs at the second: its own is busy."""
    servers = [Listens(), Listens()]
    for server in servers:
        made.servers.append(await server.start())
        await made.launcher.add(server.url)
    host, guest = await made.begin(), await made.begin()
    by_url = {server.url: server for server in servers}
    assert host.facts is not None
    assert guest.facts is not None
    own, place = by_url[host.facts.url], by_url[guest.facts.url]
    own.generate_status = 429
    host.start(step("guest", LONG_OUTPUT))
    await until(lambda: place.generated > 30)
    assert (host.load, guest.load) == (0, 1)
    return host, own, guest, place


def test_a_step_is_cut_with_its_tokens_when_the_engine_that_it_is_a_guest_of_fails():
    async def main() -> None:
        async with setup() as made:
            host, own, guest, place = await with_guest(made)
            place.die()
            end = await made.recorder.end_of("guest")
            assert (end.finished, end.error) == (False, "")
            assert end.tokens > 0
            assert list(end.output_ids) == alone(ids("guest", PROMPT), end.tokens)
            _, salvaged = await made.recorder.take("failed")
            assert salvaged == {}  # it is not an engine's own
            assert guest.load == 0
            own.generate_status = 200
            left = request("guest", grown(ids("guest", PROMPT), end), OUTPUT)
            host.start(left)
            rest = await made.recorder.end_of("guest")
            assert [*end.output_ids, *rest.output_ids] == alone(
                ids("guest", PROMPT), end.tokens + OUTPUT
            )

    run(main)


def test_an_abort_of_a_guest_goes_to_where_it_runs_under_the_id_that_it_has_there():
    async def main() -> None:
        async with setup() as made:
            host, own, _, place = await with_guest(made)
            host.abort(TrajectoryId("guest"))
            end = await made.recorder.end_of("guest")
            assert (end.finished, end.extras.finish_reason) == (False, "abort")
            assert list(end.output_ids) == alone(ids("guest", PROMPT), end.tokens)
            assert set(place.aborts) == {"generate-tokens-" + place.seen[-1]["request_id"]}
            assert own.aborts == []
            await until(lambda: place.running == 0)

    run(main)


def test_a_killed_engine_leaves_no_guest_and_the_steps_of_its_host_go_on():
    async def main() -> None:
        async with setup() as made:
            host, _, guest, place = await with_guest(made)
            guest.start(step("own", LONG_OUTPUT))
            await until(lambda: place.running == 2)
            host.kill()
            await until(lambda: place.running == 1)
            guest.abort(TrajectoryId("own"))
            end = await made.recorder.end_of("own")
            assert list(end.output_ids) == alone(ids("own", PROMPT), end.tokens)
            assert made.recorder.reports == []

    run(main)
