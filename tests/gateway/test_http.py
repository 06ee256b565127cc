"""The gateway's endpoints: sessions, rollouts, control, keys, and input that wants to break it."""

import asyncio
import gc
import gzip
import io
import json
import resource
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import pytest

from campaigns.faults.gateway_bench import Bench, in_virtual_time, set_up
from heddle_core.events import (
    RolloutStarted,
    StepFinished,
    TrajectoryArrived,
    TrajectoryFinished,
    WeightsUpdated,
)
from tests.gateway.served import NO_AIOHTTP, Served, run, served
from tests.patience import PATIENCE_S

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)
yarl = pytest.importorskip("yarl")

from heddle_gateway.app import SPARE_FILES, FileLimitError, raise_file_limit  # noqa: E402
from heddle_gateway.front import MOST_MARKS  # noqa: E402

CHAT: Any = {"model": "fake", "messages": [{"role": "user", "content": "one two three"}]}
IDS: Any = {"token_ids": [20, 21, 22], "sampling_params": {"max_tokens": 5}}


class Client:
    """JSON over one connection pool."""

    def __init__(self, bench: Served, http: Any) -> None:
        self.bench, self.http = bench, http

    async def __call__(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None
        if body is not None:
            data = io.BytesIO(json.dumps(body).encode())
            named["Content-Type"] = "application/json"
        async with self.http.request(
            method, self.bench.url + path, data=data, headers=named
        ) as answer:
            raw = await answer.read()
            self.headers = answer.headers
            if answer.content_type != "application/json":
                return answer.status, raw.decode()
            return answer.status, json.loads(raw)

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        status, answer = await self("POST", path, body, **headers)
        assert status == 200, answer
        return answer


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        served(**options) as bench,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        yield Client(bench, http)


async def raw(bench: Served, data: bytes, limit_s: float = PATIENCE_S) -> bytes:
    """Send bytes and read until the other side closes or has answered."""
    reader, writer = await asyncio.open_connection(*bench.url[7:].split(":"))
    writer.write(data)
    await writer.drain()
    async with asyncio.timeout(limit_s):
        found = await reader.read(65_536)
    writer.close()
    return found


def test_refused_bodies_are_gone_without_a_collection():
    async def main() -> None:
        async with client() as http:
            texts = ('"x" ' * 250_000, '"x" ' * 250_000 + '"')
            sent = []
            for text in texts:
                body = f'{{"prompt": 5, "more": [{text.strip().replace(" ", ",")}]}}'.encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                sent.append(head.encode() + body)
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                for data in sent * 4:
                    assert (await raw(http.bench, data)).startswith(b"HTTP/1.1 400")
                await asyncio.sleep(0.05)
                assert tracemalloc.get_traced_memory()[0] < 1_000_000
            finally:
                tracemalloc.stop()
                gc.enable()

    run(main())


# -- what it does ------------------------------------------------------------------------------


def test_token_ids_go_in_and_out_whole_and_streamed():
    async def main() -> None:
        async with client(mean_tokens=10**9) as http:
            whole = await http.post("/inference/v1/generate", IDS, X_Session_ID="12_3")
            [choice] = whole["choices"]
            assert len(choice["token_ids"]) == 5
            assert choice["finish_reason"] == "length"
            assert http.headers["x-heddle-trajectory"] == "12_3"
            assert http.headers["x-heddle-engine"] in ("e0", "e1")
            _, text = await http(
                "POST", "/inference/v1/generate", {**IDS, "stream": True}, X_Session_ID="12_3"
            )
            events = [e.removeprefix("data: ") for e in text.strip().split("\n\n")]
            assert events[-1] == "[DONE]"
            choices = [json.loads(e)["choices"][0] for e in events[:-1]]
            assert [i for c in choices for i in c["token_ids"]] == choice["token_ids"]
            assert choices[-1]["finish_reason"] == "length"
            told = {**IDS, "stream": True, "stream_options": {"include_usage": True}}
            _, text = await http("POST", "/inference/v1/generate", told, X_Session_ID="12_3")
            *_, last, end = text.strip().split("\n\n")
            assert end == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["usage"] == whole["usage"]
            logprobs = {"token_ids": [20], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
            [choice] = (await http.post("/inference/v1/generate", logprobs))["choices"]
            found = [entry["token_id"] for entry in choice["logprobs"]["content"]]
            assert found == choice["token_ids"]
            [arrived, _] = http.bench.events(TrajectoryArrived)
            assert (arrived.trajectory, arrived.group, arrived.task) == ("12_3", "12", "fake")

    run(main())


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"X_Heddle_Session": "a", "X_Session_ID": "b"}, {}, "a"),
        ({"X_Dynamo_Session_ID": "c"}, {"session_id": "d"}, "c"),
        ({"X_SMG_Routing_Key": "k"}, {}, "k"),
        ({"X_Claude_Code_Session_Id": "e", "X_Claude_Code_Agent_Id": "f"}, {}, "e/f"),
        ({"X_Litellm_Session_Id": "g"}, {}, "g"),
        ({}, {"session_id": 17}, "17"),
        ({}, {"vllm_xargs": {"agentic_context": {"program_id": "h"}}}, "h"),
        ({}, {"metadata": {"session_id": "i"}, "prompt_cache_key": "j"}, "i"),
        ({"X_Request_Id": "r"}, {"user": "u"}, "anon~1"),
    ],
)
def test_the_session_is_found_in_the_path_headers_or_body(headers: Any, body: Any, session: str):
    async def main() -> None:
        async with client() as http:
            await http.post("/v1/chat/completions", {**CHAT, "max_tokens": 4, **body}, **headers)
            await http.post("/sessions/p/q/v1/chat/completions", CHAT, **headers)
            found = [e.trajectory for e in http.bench.events(TrajectoryArrived)]
            assert found == [session, "p/q"]

    run(main())


def test_sessions_are_finished_by_each_of_the_ways_and_any_number_of_times():
    async def main() -> None:
        ways = (
            ("POST", "/finish_session?session_id=s", None),
            ("DELETE", "/sessions/s", None),
            ("POST", "/sessions/s/complete", {}),
            ("POST", "/programs/release", {"program_id": "s"}),
        )
        async with client() as http:
            for method, path, body in ways:
                await http.post("/inference/v1/generate", IDS, X_Session_ID="s")
                for finished in (True, False):
                    assert await http(method, path, body) == (
                        200,
                        {"status": "ok", "finished": finished},
                    )
            await http.post(
                "/inference/v1/generate", IDS, X_Session_ID="t", X_Dynamo_Session_Final="true"
            )
            assert (await http.post("/finish_session?session_id=t"))["finished"] is False
            ends = [e.outcome for e in http.bench.events(TrajectoryFinished)]
            assert ends == ["completed"] * 5

    run(main())


def test_an_engine_answers_tokenize_and_render():
    async def main() -> None:
        async with client() as http:
            tokens = (await http.post("/tokenize", {"prompt": "one two"}))["tokens"]
            assert len(tokens) == 2
            assert await http.post("/detokenize", {"tokens": [20, 21]}) == {"prompt": "t20 t21"}
            rendered = await http.post("/v1/chat/completions/render", {**CHAT, "max_tokens": 7})
            assert rendered["sampling_params"] == {"max_tokens": 7}
            assert len(rendered["token_ids"]) == 6

    run(main())


def test_a_pause_holds_steps_and_the_end_of_a_weight_sync_voids_kv():
    async def main() -> None:
        async with client() as http:
            assert (await http.post("/pause?mode=wait"))["drained"]
            held = asyncio.create_task(http.post("/inference/v1/generate", IDS))
            await asyncio.sleep(0.1)
            assert not held.done()
            assert (await http("GET", "/heddle/state"))[1]["paused"]
            await http.post("/resume", {"weights_version": 4})
            assert len((await held)["choices"]) == 1
            await http.post("/weight_sync/begin")
            assert (await http.post("/weight_sync/end"))["weights_version"] == 5
            assert (await http("POST", "/pause?mode=never"))[0] == 400
            versions = [e.version for e in http.bench.events(WeightsUpdated)]
            assert versions == [4, 5]
            assert "was 5" in (await http.post("/resume", {"weights_version": 3}))["note"]
            most = {"weights_version": 2**31 - 1}
            assert await http.post("/resume", most) == {"status": "resumed"}
            assert (await http("POST", "/weight_sync/end"))[0] == 400
            assert (await http.post("/weight_sync/end", {"weights_version": 5}))["status"]

    run(main())


def test_requests_are_aborted_by_id_or_all_and_answer_with_the_tokens_so_far():
    async def main() -> None:
        async with client(speed=1.0, mean_tokens=10**9) as http:
            long = {"token_ids": [20, 21], "sampling_params": {"max_tokens": 9_000}}
            one, *others = (
                asyncio.create_task(
                    http.post("/inference/v1/generate", {**long, "request_id": f"r{n}"})
                )
                for n in range(3)
            )
            while (await http("GET", "/load"))[1]["server_load"] < 3:
                await asyncio.sleep(0.01)
            assert (await http.post("/abort_requests", {"request_ids": ["r0", "x"]}))[
                "aborted"
            ] == 1
            answer = await one
            assert answer["request_id"] == "r0"
            assert answer["choices"][0]["finish_reason"] == "abort"
            assert (await http.post("/abort_request", {"abort_all": True}))["aborted"] == 2
            for other in others:
                assert (await other)["choices"][0]["finish_reason"] == "abort"

    run(main())


def test_a_weight_sync_that_nobody_ends_is_given_up_and_a_later_pause_is_not():
    from heddle_gateway.control import WEIGHT_SYNC_S, begin_weight_sync
    from heddle_gateway.front import Front
    from heddle_gateway.openai_api import ServedModel

    async def main() -> None:
        bench = Bench()
        front = Front(gateway=bench.gateway, model=ServedModel(context_tokens=100))
        request: Any = None
        async with bench.running():
            await begin_weight_sync(front, request)
            await asyncio.sleep(WEIGHT_SYNC_S - 1.0)
            bench.gateway.resume(0)
            await begin_weight_sync(front, request)
            await asyncio.sleep(WEIGHT_SYNC_S - 1.0)
            assert bench.gateway.paused
            await asyncio.sleep(2.0)
            assert not bench.gateway.paused
        assert bench.replays()

    in_virtual_time(main())


def test_rollouts_are_opened_and_ended_by_name():
    async def main() -> None:
        async with client() as http:
            await http.post("/rollouts", {"id": "epoch 1", "weights_version": 2})
            assert (await http("POST", "/rollouts", {"id": "epoch 1"}))[0] == 409
            await http.post("/inference/v1/generate", IDS)
            await http.post("/rollouts/epoch 1/end")
            assert (await http("POST", "/rollouts/rollout/end"))[0] == 409
            await http.post("/inference/v1/generate", IDS)
            found = [e.rollout for e in http.bench.events(TrajectoryArrived)]
            assert found == ["epoch 1", "rollout"]
            assert [e.weights_version for e in http.bench.events(RolloutStarted)] == [0, 2]

    run(main())


def test_health_metrics_and_state_say_what_there_is():
    async def main() -> None:
        async with client() as http:
            assert (await http("GET", "/health"))[0] == 200
            assert b" 200 OK\r" in await raw(http.bench, b"GET /%68ealth HTTP/1.1\r\n\r\n")
            await http.post("/inference/v1/generate", IDS, X_Session_ID="s")
            _, text = await http("GET", "/metrics")
            values = dict(
                line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
            )
            assert (
                values['heddle_requests_total{path="/inference/v1/generate",status="200"}'] == "1"
            )
            assert values["heddle_trajectories_in_tool"] == "1"
            assert values["heddle_engines"] == "2"
            assert values["heddle_step_seconds_count"] == "1"
            _, state = await http("GET", "/heddle/state")
            assert [e["id"] for e in state["engines"]] == ["e0", "e1"]
            _, engines = await http("GET", "/workers")
            assert [e["id"] for e in engines["workers"]] == ["e0", "e1"]
            status, refused = await http("POST", "/workers", {"url": "http://127.0.0.1:1"})
            assert status == 409
            assert "--worker URL" in refused["error"]["message"]

    run(main())


def test_a_gateway_whose_engines_are_not_there_is_not_healthy():
    async def main() -> None:
        async with client() as http:
            await http.post("/inference/v1/generate", IDS)
            for engine in list(http.bench.gateway.engines):
                http.bench.launcher.fail(engine)
            assert (await http("GET", "/health"))[0] == 503

    run(main())


# -- who may -----------------------------------------------------------------------------------


def test_keys_of_clients_and_of_control_are_apart():
    async def main() -> None:
        async with client(settings={"api_key": "k", "admin_key": "a"}) as http:
            bearer = {"k": "Bearer k", "a": "bearer a", "wrong": "Bearer x", "none": ""}
            for path, right in (("/v1/models", "k"), ("/heddle/state", "a"), ("/metrics", "a")):
                for given, header in bearer.items():
                    status, answer = await http("GET", path, Authorization=header)
                    assert status == (200 if given == right else 401), (path, given)
                    if status == 401:
                        assert answer["error"]["code"] == "invalid_api_key"
                        assert right not in str(answer["error"]["message"]).split()
            assert (await http("POST", "/pause", Authorization="Bearer k"))[0] == 401
            assert (await http("GET", "/health"))[0] == 200

    run(main())


def test_without_an_admin_key_control_is_for_calls_of_this_machine_and_of_no_proxy_on_it():
    proxied = (
        {"X_Forwarded_For": "10.0.0.1"},
        {"X_Forwarded_For": "127.0.0.1"},
        {"Forwarded": "for=10.0.0.1"},
        {"Via": "1.1 proxy"},
    )

    async def main() -> None:
        async with client() as http:
            assert (await http("GET", "/workers"))[0] == 200
            for headers in proxied:
                for method, path in (("GET", "/workers"), ("POST", "/pause"), ("GET", "/metrics")):
                    status, answer = await http(method, path, **headers)
                    assert (status, answer["error"]["type"]) == (403, "permission_error")
                    assert "HEDDLE_ADMIN_KEY" in answer["error"]["message"]
                assert (await http("GET", "/health", **headers))[0] == 200
                assert (await http.post("/inference/v1/generate", IDS, **headers))["choices"]
            assert not http.bench.gateway.paused
        async with client(settings={"admin_key": "a"}) as http:
            for headers in proxied:
                given = {"Authorization": "Bearer a", **headers}
                assert (await http("GET", "/workers", **given))[0] == 200
                assert (await http("GET", "/workers", **headers))[0] == 401
        async with client(settings={"open_to_all": True}) as http:
            assert (await http("GET", "/workers", **proxied[0]))[0] == 200

    run(main())


# -- input that wants to break it ----------------------------------------------------------------

BAD: Any = [
    (b"", 400, "messages"),
    (b"{", 400, "not JSON"),
    (b'"text"', 400, "JSON object"),
    (b"[" * 200_000, 400, "not JSON"),
    (b'{"a":' * 200_000, 400, "not JSON"),
    (b'{"messages": "\xff\xfe"}', 400, "not JSON"),
    (b'{"messages": [1, null, []]}', 400, "role"),
    (b'{"messages": {"a": 1}}', 400, "messages"),
    (b'{"messages": [{"role": "user", "content": {"a": 1}}]}', 400, "content"),
    (b'{"max_tokens": ' + b"9" * 100_000 + b', "messages": []}', 400, "not JSON"),
    (b'{"max_tokens": 1e999, "messages": []}', 400, "not JSON"),
    (b'{"max_tokens": NaN, "messages": []}', 400, "not JSON"),
    (b"{" + b",".join(b'"k%d":{}' % n for n in range(50_000)) + b"}", 400, "messages"),
    (b'{"model": "other", "messages": []}', 404, "not served"),
    (b'{"model": ["fake"], "messages": []}', 400, "valid string"),
    (b'{"n": 2000, "messages": []}', 400, "1,024 at most"),
    (b'{"n": "2", "messages": []}', 400, "messages"),
    (b'{"stream": "yes", "messages": []}', 400, "stream"),
    (b'{"session_id": {"a": 1}, "messages": []}', 400, "session_id"),
    (b'{"session_id": "' + b"x" * 600 + b'", "messages": []}', 400, "512 at most"),
    (b'{"cache_salt": 3, "messages": [{"role": "user", "content": "a"}]}', 400, "cache_salt"),
    (b'{"messages": [{"role": [], "content": "a"}]}', 400, "role"),
    (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', 400, "tool_calls"),
    *(
        (b'{%b, "messages": [{"role": "user", "content": "a"}]}' % field, 400, says)
        for field, says in (
            (b'"stop": 5, "stream": true', "stop"),
            (b'"stop": ["a", 5]', "stop"),
            (b'"n": 0', "n must be at least 1"),
            (b'"n": -3', "n must be at least 1"),
            (b'"n": 2.5', "n must be"),
            (b'"n": "x"', "n must be"),
            (b'"max_completion_tokens": 0', "max_tokens"),
        )
    ),
]


@pytest.mark.parametrize(("body", "status", "says"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_a_bad_body_is_refused_and_nothing_else_disturbed(body: bytes, status: int, says: str):
    async def main() -> None:
        async with client() as http:
            going = asyncio.create_task(http.post("/inference/v1/generate", IDS))
            async with http.http.post(
                http.bench.url + "/v1/chat/completions",
                data=body,
                headers={"Content-Type": "application/json"},
            ) as answer:
                error = (await answer.json())["error"]
                assert answer.status == status, error
                assert says in error["message"]
                assert set(error) == {"message", "type", "param", "code"}
            assert (await going)["choices"]
            assert len(http.bench.events(TrajectoryArrived)) == 1

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": [99_999_999_999]}, "prompt"),
        ("/detokenize", {"tokens": 5}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": [1]}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": "x"}, "sampling_params"),
    ],
)
def test_fields_of_a_wrong_type_are_refused(path: str, body: Any, says: str):
    async def main() -> None:
        async with client() as http:
            status, answer = await http("POST", path, body)
            assert (status, says in answer["error"]["message"]) == (400, True), answer

    run(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [2**40]},
        {"token_ids": [1.5]},
        {"token_ids": ["a"]},
        {"token_ids": "abc"},
        {"token_ids": None},
        {"sampling_params": None},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"max_tokens": "9"}},
        {"sampling_params": {"max_tokens": True}},
        {"sampling_params": {"n": 2000}},
        {"sampling_params": {"logits_processors": ["x"]}},
        {"output_mode": "text"},
        {"features": {"mm_hashes": {}}},
        {"token_ids": [5] * 40_000},
    ],
)
def test_bad_token_requests_are_refused_by_field(changes: Any):
    async def main() -> None:
        async with client() as http:
            status, answer = await http("POST", "/inference/v1/generate", {**IDS, **changes})
            assert status == 400
            assert answer["error"]["param"]
            assert not http.bench.events(TrajectoryArrived)

    run(main())


def test_sessions_with_any_characters_are_only_labels():
    names = (
        "../../x",
        "a\\b",
        "a b",
        "a\r\n",
        "%2e%2e",
        "é",
        "..%2F..%2Fetc",
        "'; drop table",
        "a//b",
    )

    async def main() -> None:
        async with client() as http:
            for name in names:
                body = {**IDS, "session_id": name}
                await http.post("/inference/v1/generate", body)
                url = yarl.URL(f"{http.bench.url}/sessions/{quote(name)}/complete", encoded=True)
                async with http.http.post(url) as answer:
                    assert (await answer.json())["finished"], name
            assert len(http.bench.events(TrajectoryArrived)) == len(names)
            for path in ("/sessions//v1/models", "/sessions/..", "/../../etc/passwd", "/v1/x"):
                assert (await http("GET", path))[0] in (200, 404, 405)

    run(main())


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n c: d\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Content-Length: 6\r\n\r\nhello",
        b"POST /finish_session?session_id=x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        b"POST /pause HTTP/1.1\r\nHost: localhost\r\n\r\n",
        pytest.param(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            b"application/json\r\nContent-Length: " + b"0" * 5_000 + b"2\r\n\r\n{}",
            id="zeros",
        ),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding : chunked\r\n\r\n"
        b"POST /pause HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_requests_that_are_no_http_or_two_at_once_are_refused(request_head: bytes):
    async def main() -> None:
        async with client() as http:
            answer = await raw(http.bench, request_head)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
            assert not http.bench.gateway.paused
            assert (await http("GET", "/health"))[0] == 200

    run(main())


def test_a_body_of_numbers_counts_with_what_they_take_once_they_are_read(monkeypatch):
    from heddle_gateway import http_server

    monkeypatch.setattr(http_server, "RECEIVED_BYTES", 0)

    async def main() -> None:
        async with client(settings={"body_bytes": 1 << 18}) as http:
            for value, count in ((257, 40_000), ("ab", 40_000), ([], 40_000), ({"a": 1}, 20_000)):
                for path in ("/v1/chat/completions", "/tokenize", "/inference/v1/generate"):
                    much = {**IDS, "x": [value] * count}
                    status, said = await http("POST", path, much)
                    assert (status, "send less" in said["error"]["message"]) == (413, True)
            for text in ("many words, ", "[{()}],", "\u4e00"):
                body = {"messages": [{"role": "user", "content": text * 20_000}]}
                assert (await http("POST", "/v1/chat/completions", body))[0] != 413

    run(main())


def test_honest_lists_of_ids_wait_together(monkeypatch):
    from heddle_gateway import http_server

    monkeypatch.setattr(http_server, "RECEIVED_BYTES", 0)

    async def main() -> None:
        async with client(settings={"body_bytes": 1 << 20}) as http:
            ids = [40_000] * 32_000
            http.bench.gateway.pause()
            tracemalloc.start()
            many = [
                asyncio.create_task(http("POST", path, {**body, "max_tokens": 1}))
                for path, body in (
                    ("/v1/completions", {"prompt": ids}),
                    ("/v1/completions", {"prompt": [ids] * 2}),
                    ("/inference/v1/generate", {**IDS, "token_ids": ids}),
                )
                for _ in range(4)
            ]
            async with asyncio.timeout(PATIENCE_S):
                while (await http("GET", "/load"))[1]["server_load"] < 16:
                    await asyncio.sleep(0.01)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held < 16 * 800_000
            http.bench.gateway.resume()
            assert {status for status, _ in await asyncio.gather(*many)} == {200}

    run(main())


def test_what_is_small_is_answered_between_two_long_bodies(monkeypatch):
    from heddle_gateway.prompt_ids import split_body

    read = list[int]()

    def split_slowly(raw: bytes, *, has_ids: bool = False) -> dict[str, Any]:
        read.append(len(raw))
        time.sleep(0.02)
        return split_body(raw, has_ids=has_ids)

    monkeypatch.setattr("heddle_gateway.front.split_body", split_slowly)

    async def main() -> None:
        async with client() as http:
            long = {"prompt": "a", "user": "b" * 100_000}
            many = [asyncio.create_task(http("POST", "/tokenize", long)) for _ in range(40)]
            while not read:
                await asyncio.sleep(0.001)
            assert (await http("GET", "/livez"))[0] == 200
            assert len(read) < 20
            assert [status for status, _ in await asyncio.gather(*many)] == [200] * 40

    run(main())


def test_headers_cannot_be_smuggled_into_an_answer():
    async def main() -> None:
        async with client() as http:
            body = {**IDS, "session_id": "a\r\nX-Evil: 1", "request_id": "b\r\nX-Evil: 1"}
            await http.post("/inference/v1/generate", body)
            assert "X-Evil" not in http.headers
            assert http.headers["x-heddle-trajectory"] == "a%0D%0AX-Evil:%201".replace("%20", " ")

    run(main())


def test_a_body_that_is_too_large_or_never_comes_is_refused():
    async def main() -> None:
        settings = {"body_bytes": 50_000, "body_s": 2.0}
        async with client(settings=settings) as http:
            status, answer = await http("POST", "/v1/chat/completions", {"x": "y" * 60_000})
            assert status == 413
            assert answer["error"]["message"]
            head = b"POST /resume HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n"
            announced = await raw(http.bench, head + b"Content-Type: application/json\r\n\r\n")
            assert announced.startswith(b"HTTP/1.1 413")
            head = (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n"
            )
            slow = await raw(http.bench, head + b"Content-Type: application/json\r\n\r\n{")
            assert slow.startswith(b"HTTP/1.1 408")

    run(main())


def test_a_small_body_that_unpacks_to_a_large_one_is_refused():
    async def main() -> None:
        async with client(settings={"body_bytes": 1 << 20}) as http:
            packed = gzip.compress(b'{"x": "' + b"y" * (64 << 20) + b'"}')
            head = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            url = http.bench.url + "/v1/chat/completions"
            async with http.http.post(url, data=packed, headers=head) as answer:
                assert answer.status == 413
            assert (await http.post("/inference/v1/generate", IDS))["choices"]

    run(main())


def test_a_body_that_is_not_encoded_as_it_says_is_refused(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with client() as http:
            head = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            url = http.bench.url + "/inference/v1/generate"
            async with http.http.post(url, data=json.dumps(IDS), headers=head) as answer:
                assert answer.status == 400
                assert "cannot be read" in (await answer.json())["error"]["message"]
            assert (await raw(http.bench, b"no http\r\n\r\n")).startswith(b"HTTP/1.0 400")
            sent = json.dumps(IDS).encode()
            head = b"POST /inference/v1/generate HTTP/1.1\r\nContent-Type: application/json\r\n"
            head += b"X-Request-Id: \xff\r\nX-Session-Id: \xff\r\nContent-Length: %d\r\n\r\n"
            assert b" 200 OK\r" in await raw(http.bench, head % len(sent) + sent)
            assert (await http.post("/inference/v1/generate", IDS))["choices"]

    run(main())
    assert not caplog.records


def test_pages_of_other_sites_cannot_call_it():
    async def main() -> None:
        async with client() as http:
            async with http.http.post(http.bench.url + "/pause", data="{}") as answer:
                assert answer.status == 400
                error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("Bad Request", 400)
            assert error["message"].endswith("Only 'application/json' is allowed")
            assert (await http("POST", "/pause", Sec_Fetch_Site="cross-site"))[0] == 403
            assert not http.bench.gateway.paused

    run(main())


@pytest.mark.parametrize(
    ("host", "mine"),
    [
        ("evil.example:8400", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8400", False),
        ("evil.example@127.0.0.1.nip.io", False),
        ("[::1", False),
        ("[::1]:8400", True),
        ("192.0.2.7", True),
        ("LocalHost:8400", True),
        ("localhost.", True),
        ("Node7:80", True),
        ("", True),
    ],
)
def test_without_a_key_a_name_that_resolves_to_it_is_refused(host: str, mine: bool):
    async def main() -> None:
        async with client(settings={"host": "node7"}) as http:
            for method, path, key in (
                ("POST", "/pause", "HEDDLE_ADMIN_KEY"),
                ("GET", "/heddle/state", "HEDDLE_ADMIN_KEY"),
                ("POST", "/v1/chat/completions", "HEDDLE_API_KEY"),
            ):
                status, answer = await http(method, path, {**CHAT, "max_tokens": 1}, Host=host)
                if mine or status != 403:
                    assert (status, mine) == (200, True), answer
                    await http.post("/resume")
                    continue
                error = answer["error"]
                assert (error["type"], key in error["message"]) == ("permission_error", True)
            assert not http.bench.gateway.paused
            assert (await http("GET", "/livez", Host=host))[0] == 200  # probes may name it at will

    run(main())


def test_with_a_key_or_open_to_all_it_may_have_any_name():
    async def main() -> None:
        named = {"Host": "heddle.svc:8400"}
        async with client(settings={"api_key": "k", "admin_key": "a"}) as http:
            for path, key in (("/v1/models", "k"), ("/heddle/state", "a")):
                assert (await http("GET", path, **named))[0] == 401
                assert (await http("GET", path, **named, Authorization=f"Bearer {key}"))[0] == 200
        async with client(settings={"api_key": "k"}) as http:
            key = "Bearer k"
            assert (await http("GET", "/heddle/state", **named, Authorization=key))[0] == 200
        async with client(settings={"open_to_all": True}) as http:
            assert (await http("GET", "/heddle/state", **named))[0] == 200

    run(main())


@pytest.mark.parametrize("part", [b"[],", b'{"a":1},', b'"ab",', b"[[[]]],"])
def test_a_body_of_very_many_parts_is_refused_before_it_is_read(part: bytes):
    text = b'{"model":"fake","messages":[{"role":"user","content":"one"}],"max_tokens":1,"x":[%b0]}'
    most = MOST_MARKS // sum(map(part.count, (b"[", b"{", b'"')))

    async def main() -> None:
        async with client() as http:
            url, kind = http.bench.url + "/v1/chat/completions", "application/json"
            head = {"Content-Type": kind, "Content-Encoding": "gzip"}
            for count, due in ((most // 10, 200), (most + 1, 413)):
                sent = gzip.compress(text % (part * count))
                async with http.http.post(url, data=sent, headers=head) as answer:
                    assert answer.status == due
                    if due == 413:
                        assert "2,097,152" in (await answer.json())["error"]["message"]

    run(main())


def test_a_megabyte_of_prompt_is_answered_or_refused_by_its_length():
    async def main() -> None:
        async with client() as http:
            long = [{"role": "user", "content": "ab " * 350_000}]
            status, answer = await http("POST", "/v1/chat/completions", {**CHAT, "messages": long})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            one = [{"role": "user", "content": "a" * 2**20}]
            body = {**CHAT, "messages": one, "max_tokens": 3}
            assert (await http.post("/v1/chat/completions", body))["usage"]["prompt_tokens"] == 4

    run(main())


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to"),
    [
        (100, 9000, 100 + SPARE_FILES),
        (100, 100 + SPARE_FILES, 100 + SPARE_FILES),
        (99 + SPARE_FILES, resource.RLIM_INFINITY, 100 + SPARE_FILES),
        (100 + SPARE_FILES, 9000, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised_where_it_is_too_low(monkeypatch, soft, hard, raised_to):
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    raise_file_limit(100)
    raised = [] if raised_to is None else [(resource.RLIMIT_NOFILE, (raised_to, hard))]
    assert limits == raised


def test_a_limit_of_open_files_that_cannot_be_raised_is_said(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 99 + SPARE_FILES))
    with pytest.raises(FileLimitError, match=r"or give max_open = 99$"):
        raise_file_limit(100)


def test_a_prompt_may_be_a_list_of_token_ids_from_0_on_and_no_mixed_list_or_object():
    async def main() -> None:
        async with client() as http:
            for prompt in ([0, 5], [[0, 5]]):
                body = {"model": CHAT["model"], "prompt": prompt, "max_tokens": 3}
                assert (await http.post("/v1/completions", body))["usage"]["prompt_tokens"] == 2
            for prompt in ([-1, 5], [[5], "a"], {}):
                body = {"model": CHAT["model"], "prompt": prompt, "max_tokens": 3}
                status, answer = await http("POST", "/v1/completions", body)
                assert (status, answer["error"]["param"]) == (400, "prompt")

    run(main())


def test_above_the_most_open_requests_there_is_status_429_and_below_none():
    async def main() -> None:
        async with client(settings={"max_open": 40}) as http:
            http.bench.gateway.pause()  # all that are taken stay open
            sent = [
                asyncio.create_task(http("POST", "/inference/v1/generate", IDS)) for _ in range(60)
            ]
            while sum(task.done() for task in sent) < 20:
                await asyncio.sleep(0.01)
            assert http.bench.front.metrics.open == 40
            http.bench.gateway.resume()
            statuses = [status for status, _ in await asyncio.gather(*sent)]
            assert statuses.count(200) == 40
            assert statuses.count(429) == 20

    run(main())


@pytest.mark.slow
def test_ten_thousand_idle_sessions_disturb_nobody():
    async def main() -> None:
        async with client(setup=set_up(slots=200), mean_tokens=10**9) as http:
            bench = http.bench
            await asyncio.gather(
                *(bench.step(f"s{n}", [20 + n % 1000] * 40, 2) for n in range(10_000))
            )
            assert bench.gateway.sessions.idle == 10_000
            assert (await http.post("/inference/v1/generate", IDS))["choices"]
            assert "heddle_sessions 10001" in (await http("GET", "/metrics"))[1]
            assert (await http.post("/finish_session?session_id=s77"))["finished"]
            assert len(bench.events(StepFinished)) == 10_001

    run(main())


def test_slow_clients_hold_nobody_up():
    async def main() -> None:
        async with client() as http:
            bench = http.bench
            host, port = bench.url[7:].split(":")
            halves = [await asyncio.open_connection(host, port) for _ in range(200)]
            for _, writer in halves:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A")
            assert (await http.post("/inference/v1/generate", IDS))["choices"]
            for _, writer in halves:
                writer.close()

    run(main())


def test_connections_that_never_send_a_request_are_closed_and_others_stay():
    async def main() -> None:
        async with client(settings={"body_s": 0.2}) as http:
            address = http.bench.url[7:].split(":")
            halves = [await asyncio.open_connection(*address) for _ in range(20)]
            for _, writer in halves[10:]:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A")
            going = asyncio.create_task(
                http.post("/inference/v1/generate", {**IDS, "sampling_params": {"max_tokens": 900}})
            )
            async with asyncio.timeout(PATIENCE_S):
                for reader, writer in halves:
                    assert await reader.read() == b""
                    writer.close()
            assert (await going)["choices"]
            assert (await http("GET", "/health"))[0] == 200

    run(main())


def test_a_client_that_never_reads_its_stream_holds_nobody_up():
    async def main() -> None:
        async with client(mean_tokens=10**9) as http:
            body = {**IDS, "stream": True, "sampling_params": {"max_tokens": 20_000}}
            sent = json.dumps(body).encode()
            _, writer = await asyncio.open_connection(*http.bench.url[7:].split(":"), limit=1)
            writer.write(
                b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent
            )
            async with asyncio.timeout(PATIENCE_S):
                while not http.bench.events(StepFinished):
                    await asyncio.sleep(0.01)
            assert (await http.post("/inference/v1/generate", IDS))["choices"]
            writer.close()

    run(main())


def test_a_path_or_method_that_is_not_there_is_answered_as_vllm_does():
    async def main() -> None:
        async with client() as http:
            for method, path, status in (
                ("GET", "/nothing", 404),
                ("GET", "/v1/chat/completions", 405),
                ("POST", "/v1/embeddings", 404),
            ):
                found, answer = await http(method, path)
                says = {404: "Not Found", 405: "Method Not Allowed"}[status]
                assert (found, answer) == (status, {"detail": says})

    run(main())
