"""Keys of tenants: whose a session is, limits, priorities, and the line of each request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heddle_core.events import StepFinished, TrajectoryArrived
from tests.gateway.served import NO_AIOHTTP, run, served

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_gateway.access import AccessLog
from heddle_gateway.errors import ApiError
from heddle_gateway.tenants import Tenant, Tenants, TenantsError, read_tenants
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint
from tests.gateway.test_http import CHAT, IDS, Client, client

GENERATE = "/inference/v1/generate"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def keys(folder: Path, **limits: str) -> Path:
    """A file with a tenant for each name, whose key is its name."""
    path = folder / "keys.toml"
    tables = (f'[{name}]\nsha256 = "{digest(name)}"\n{more}' for name, more in limits.items())
    path.write_text("\n".join(tables))
    return path


@asynccontextmanager
async def tenants(folder: Path, **limits: str) -> AsyncIterator[Client]:
    async with client(settings={"api_key": "master"}, mean_tokens=10**9) as http:
        http.bench.front.tenants = Tenants(keys(folder, **limits))
        yield http


async def ask(http: Client, key: str, **fields: Any) -> tuple[int, Any]:
    return await http("POST", GENERATE, {**IDS, **fields}, Authorization=f"Bearer {key}")


def test_a_session_belongs_to_a_key_and_no_other_ends_continues_or_reads_it(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, ann="", bob="") as http:
            for key in ("ann", "bob", "ann", "master"):
                status, answer = await ask(http, key, session_id="s")
                assert status == 200, answer
            # The third asks for its own kept answer.
            arrived = [e.trajectory for e in http.bench.events(TrajectoryArrived)]
            assert arrived == ["ann:s", "bob:s", "_:s"]
            assert len(http.bench.events(StepFinished)) == 3
            ends = "/finish_session?session_id=s"
            for key, finished in (("bob", True), ("bob", False), ("ann", True)):
                _, said = await http("POST", ends, {}, Authorization=f"Bearer {key}")
                assert said["finished"] is finished
            await ask(http, "master", session_id="ann:s")
            assert http.bench.events(TrajectoryArrived)[-1].trajectory == "_:ann:s"

    run(main())


def test_a_history_of_another_tenant_is_no_continuation_of_its_trajectory(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, ann="", bob="") as http:
            messages = [{"role": "user", "content": "one two three"}]
            body = {**CHAT, "max_tokens": 20, "messages": messages}

            async def said(key: str) -> Any:
                auth = f"Bearer {key}"
                return await http.post("/v1/chat/completions", body, Authorization=auth)

            messages.append((await said("ann"))["choices"][0]["message"])
            messages.append({"role": "user", "content": "go on"})
            await said("bob")
            assert len(http.bench.events(TrajectoryArrived)) == 2
            await said("ann")
            assert len(http.bench.events(TrajectoryArrived)) == 2

    run(main())


def test_an_unknown_key_is_refused_and_anthropics_header_is_read(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, ann="") as http:
            http.bench.front.settings = type(http.bench.front.settings)()
            for key in ("", "Ann", "ann "):
                status, _ = await ask(http, key)
                assert status == (200 if key == "ann " else 401)
            assert (await http("POST", GENERATE, IDS, X_Api_Key="ann"))[0] == 200
            assert (await http("POST", GENERATE, IDS, X_Api_Key=digest("ann")))[0] == 401
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                status, refused = await http("POST", path, {}, X_Api_Key="bob")
                assert (status, refused["type"]) == (401, "error")
                assert refused["error"]["type"] == "authentication_error"

    run(main())


def test_stored_responses_are_refused_as_engines_cannot_tell_whose_they_are(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, ann="") as http:
            body, auth = {"input": "a", "previous_response_id": "resp_bob"}, "Bearer ann"
            status, said = await http("POST", "/v1/responses", body, Authorization=auth)
            assert (status, said["error"]["param"]) == (400, "previous_response_id")

    run(main())


def test_a_body_that_is_refused_takes_a_step_of_the_limit_while_an_engine_reads_it(tmp_path: Path):
    class Reading:
        """A renderer whose engine takes what the gateway refuses."""

        asked = 0

        async def refusal(self, *body: Any) -> None:
            self.asked += 1
            await asyncio.sleep(0.5)

    async def main() -> None:
        async with tenants(tmp_path, ann="concurrent = 1") as http:
            front = http.bench.front
            front.renderer = reading = Reading()
            asked = await asyncio.gather(*(ask(http, "ann", token_ids="no") for _ in range(3)))
            assert [status for status, _ in asked] == [400] * 3
            assert reading.asked == 1
            http.bench.gateway.pause()
            assert (await ask(http, "ann", token_ids="no"))[0] == 400
            http.bench.gateway.resume()
            # These are no engine's to judge.
            for session in ([1], "s" * 600):
                assert (await ask(http, "ann", session_id=session))[0] == 400
            wrong = {"Authorization": "Bearer ann", "X_Heddle_Deadline_S": "soon"}
            assert (await http("POST", GENERATE, IDS, **wrong))[0] == 400
            assert reading.asked == 1

    run(main())


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, ann="") as http:
            front = http.bench.front
            front.settings = type(front.settings)()
            (tmp_path / "keys.toml").write_text("")
            with pytest.raises(TenantsError):
                front.tenants.reload()
            front.tenants.by_name = {}
            for path, body in ((GENERATE, IDS), ("/finish_session?session_id=s", {})):
                assert (await http("POST", path, body))[0] == 401

    run(main())


def test_limits_of_one_tenant_are_said_with_when_to_come_again_and_touch_no_other(tmp_path: Path):
    limited = "requests_per_minute = 12"

    async def main() -> None:
        async with tenants(tmp_path, ann=limited, bob="concurrent = 2") as http:
            assert [(await ask(http, "ann"))[0] for _ in range(3)] == [200, 200, 429]
            assert 1 <= int(http.headers["Retry-After"]) <= 5
            assert (await ask(http, "bob"))[0] == 200
            http.bench.gateway.pause()
            held = [asyncio.create_task(ask(http, "bob")) for _ in range(2)]
            while http.bench.front.tenants.uses["bob"].steps < 2:
                await asyncio.sleep(0.01)
            status, error = await ask(http, "bob")
            assert (status, error["error"]["code"]) == (429, "rate_limit")
            assert (await http("POST", "/finish_session?session_id=x", {}, X_Api_Key="bob"))[
                0
            ] == 200
            http.bench.gateway.resume()
            assert [(await each)[0] for each in held] == [200, 200]
            sampling = {"max_tokens": 2, "n": 3}
            status, error = await ask(http, "bob", sampling_params=sampling)
            assert (status, error["error"]["param"]) == (400, "n")  # it would never be answered

    run(main())


def test_a_rate_is_earned_back_by_and_by():
    made = Tenants(None, {"a": Tenant(sha256="0" * 64, requests_per_minute=60.0)})
    for _ in range(10):
        made.count("a", 5.0)
    with pytest.raises(ApiError) as refused:
        made.count("a", 5.0)
    assert refused.value.retry_after_s == 1
    made.count("a", 6.0)
    with pytest.raises(ApiError):
        made.count("a", 6.5)


def test_steps_of_a_higher_priority_run_first(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, low="", high="priority = 3") as http:
            front = http.bench.front
            slots = sum(front.gateway.engines.values())
            front.gateway.pause()
            sampling = {"max_tokens": 60}
            sent = [
                asyncio.create_task(ask(http, key, sampling_params=sampling))
                for key in (*["low"] * (2 * slots), *["high"] * slots)
            ]
            while "high" not in front.tenants.uses or front.tenants.uses["high"].steps < slots:
                await asyncio.sleep(0.01)
            front.gateway.resume()
            await asyncio.gather(*sent)
            arrived = http.bench.events(TrajectoryArrived)
            tier = {e.trajectory: e.hints.tier if e.hints else 0 for e in arrived}
            ended = [tier[e.trajectory] for e in http.bench.events(StepFinished)]
            # As many of the low ones as there are slots had them before any high one came.
            assert ended[-slots:] == [0] * slots

    run(main())


def test_each_request_has_a_line_of_json(tmp_path: Path):
    async def main() -> None:
        async with tenants(tmp_path, ann="") as http:
            http.bench.front.access_log = log = AccessLog(tmp_path / "access.jsonl")
            await ask(http, "ann", session_id="s")
            await ask(http, "nobody")
            await http("GET", "/health")
            await http("POST", f"/sessions/a%20b{GENERATE}", IDS, Authorization="Bearer ann")
            assert (await http("GET", "/nothing"))[0] == 404
            assert (await http("DELETE", GENERATE))[0] == 405
            (tmp_path / "access.jsonl").rename(tmp_path / "access.1")
            log.reopen()
            await http("GET", "/after")
            http.bench.front.access_log = None
            log.close()
            _, text = await http("GET", "/metrics", Authorization="Bearer master")
            assert 'path="/sessions/{session}' in text
            assert "\\" not in text

    run(main())
    first, after = ((tmp_path / f"access.{name}").read_text() for name in ("1", "jsonl"))
    lines = [json.loads(line) for line in first.splitlines()]
    answered = [(line["tenant"], line["status"]) for line in lines]
    assert answered == [("ann", 200), ("", 401), ("ann", 200), ("", 404), ("", 405)]
    assert lines[2]["path"] == f"/sessions/a%20b{GENERATE}"
    assert json.loads(after)["path"] == "/after"
    assert lines[0]["path"] == GENERATE
    assert (lines[0]["trajectory"], lines[0]["output_tokens"]) == ("ann:s", 5)
    assert "ann" not in json.dumps(lines[1])


def test_a_log_that_takes_no_line_takes_no_answer_and_is_noted_once(tmp_path: Path, caplog):
    async def main() -> None:
        async with tenants(tmp_path, ann="") as http:
            http.bench.front.access_log = log = AccessLog(Path("/dev/full"))
            for path in ("ann", "ann", "nobody"):
                assert (await ask(http, path))[0] == (401 if path == "nobody" else 200)
            assert (await http("GET", "/nothing"))[0] == 404
            log.close()

    run(main())
    assert [r.getMessage().count("serve.access_log") for r in caplog.records] == [1]


def test_keys_are_read_again_and_bad_files_keep_those_of_before(tmp_path: Path):
    path = keys(tmp_path, ann="")
    made = Tenants(path)
    keys(tmp_path, bob="")
    made.reload()
    assert (made.name_of("ann"), made.name_of("bob")) == (None, "bob")
    path.write_text("[bob")
    with pytest.raises(TenantsError):
        made.reload()
    assert made.name_of("bob") == "bob"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a]", "sha256"),
        ("[a]\nsha256 = 'plain'", "sha256"),
        ('["a:b"]\nsha256 = \'' + "0" * 64 + "'", "a:b|keys"),
        ("[a]\nsha256 = '" + "0" * 64 + "'\nconcurrent = 0", "concurrent"),
        ("[a]\nsha256 = '" + "0" * 64 + "'\nlimit = 3", "limit"),
        ("[a]\nsha256 = '" + "0" * 64 + "'\n[b]\nsha256 = '" + "0" * 64 + "'", "same key"),
        ("[a", "keys.toml"),
        ("[a]\nsha256 = " + "[" * 5_000, "keys.toml: .* Give each name a table"),
        ("# nobody yet\n", "names nobody"),
        ("[a]\nsha256 = '" + digest("") + "'", "the key of a is empty"),
        ('[a]\nsha256 = """' + "0" * 64 + '\n"""', "sha256"),
    ],
)
def test_what_is_wrong_in_a_file_of_keys_is_named(tmp_path: Path, text: str, says: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(TenantsError, match=says):
        read_tenants(path)
    with pytest.raises(TenantsError, match="No such file"):
        read_tenants(tmp_path / "none.toml")


def test_no_tenant_ends_a_session_at_the_server_of_another_model(tmp_path: Path):
    class Untouched:
        async def call(self, path: str, body: Any, **_: Any) -> None:
            raise AssertionError(f"{path} was called")

    async def main() -> None:
        async with tenants(tmp_path, anna="", ben="") as http:
            http.bench.front.others = {"big": Untouched()}
            status, said = await http(
                "POST", "/finish_session?session_id=s", {}, Authorization="Bearer anna"
            )
            assert (status, said["finished"]) == (200, False)

    run(main())


def test_an_answer_of_another_gateway_is_not_passed_to_a_tenant(tmp_path: Path):
    async def main() -> None:
        async with (
            served() as other,
            tenants(tmp_path, ann="") as http,
            Connections() as connections,
        ):
            http.bench.front.others = {"big": Endpoint(other.url, connections)}
            status, said = await ask(http, "ann", model="big")
            assert status == 502
            assert "cannot tell the tenants" in said["error"]["message"]

    run(main())


def test_steps_at_the_server_of_another_model_count_too(tmp_path: Path):
    class Held:
        def __init__(self) -> None:
            self.began, self.over = asyncio.Event(), asyncio.Event()

        @asynccontextmanager
        async def open(self, *_: Any) -> AsyncIterator[Any]:
            async def some() -> bytes:
                return b""

            self.began.set()
            await self.over.wait()
            yield SimpleNamespace(status=200, headers={}, some=some)

    async def main() -> None:
        async with tenants(tmp_path, ann="concurrent = 1") as http:
            http.bench.front.others = {"big": (held := Held())}
            going = asyncio.create_task(ask(http, "ann", model="big"))
            await held.began.wait()
            assert (await ask(http, "ann"))[0] == 429
            late = asyncio.create_task(ask(http, "ann", model="big"))
            await asyncio.sleep(0.1)
            held.over.set()
            assert ((await late)[0], (await going)[0]) == (429, 200)
            assert (await ask(http, "ann"))[0] == 200

    run(main())
