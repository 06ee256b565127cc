"""Spans of OpenTelemetry: one a request, one a step below it, and engines' below that."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.served import NO_AIOHTTP, run

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_runtime.generation import TraceContext, trace_context
from heddle_runtime.vllm_http.probe import CHAT, MESSAGES
from heddle_runtime.vllm_http.step import trace_of
from tests.app.gateways import gateway
from tests.gateway.test_forwarded import asked as forwarded
from tests.gateway.test_http import IDS
from tests.gateway.test_streams import asked, talking

NO_SDK = "the spans need OpenTelemetry's SDK: pip install 'heddle-rl[traces]'"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
GENERATE = "/inference/v1/generate"


async def post(at: Any, path: str, body: Any, headers: dict[str, str]) -> int:
    async with at.http.post(at.url + path, json=body, headers=headers) as answer:
        await answer.read()
        return int(answer.status)


def told(at: Any, since: int = 0) -> list[list[str]]:
    """Trace, span and flags of each call that engines got of a step."""
    found = [header.split("-")[1:] for server in at.servers for header in server.traces]
    return found[since:]


def test_without_an_exporter_a_clients_trace_reaches_engines_and_a_trajectory_is_one():
    async def main() -> None:
        async with talking(servers=1) as at:
            assert at.front.traces is None
            for path, body in ((CHAT, asked(CHAT, "a", 4)), (MESSAGES, forwarded(MESSAGES, "b"))):
                assert await post(at, path, body, GIVEN) == 200
            assert told(at) == [[TRACE, SPAN, "01"]] * 2
            for tokens in (1, 2):
                body = {**IDS, "token_ids": [20] * tokens, "session_id": "c"}
                assert await post(at, GENERATE, body, {"traceparent": "junk"}) == 200
            first, second = told(at, since=2)
            assert first[0] == second[0] == trace_of("c")
            assert first[1] != second[1]

    run(main())


def exported(at: Any) -> Any:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=NO_SDK
    )
    from heddle_gateway.traces import Traces

    exporter = memory.InMemorySpanExporter()
    at.front.traces = Traces(exporter)
    return exporter


def test_a_request_and_each_of_its_steps_have_a_span_in_the_clients_trace():
    async def main() -> None:
        async with talking(servers=1) as at:
            exporter = exported(at)
            body = asked(CHAT, "a", 4, n=2)
            assert await post(at, CHAT, body, GIVEN) == 200
            assert await post(at, CHAT, {"messages": 3}, GIVEN) == 400
            at.front.traces.close()
            spans = exporter.get_finished_spans()
            request, refused = (s for s in spans if s.name == f"POST {CHAT}")
            steps = [s for s in spans if s.name == "step"]
            assert request.context.trace_id == int(TRACE, 16)
            assert request.parent.span_id == int(SPAN, 16)
            assert request.resource.attributes["service.name"] == "heddle"
            assert refused.attributes["http.response.status_code"] == 400
            assert len(steps) == 2
            assert len(spans) == 4
            engines, ids = told(at), [f"{s.context.span_id:016x}" for s in steps]
            assert sorted(e[1] for e in engines) == sorted(ids)
            assert {e[0] for e in engines} == {TRACE}
            for step in steps:
                assert step.parent.span_id == request.context.span_id
                assert step.attributes["gen_ai.usage.output_tokens"] == 4
                assert step.attributes["heddle.engine"] == "e0"
                assert [e.name for e in step.events] == ["dispatched", "first token"]
                times = (step.start_time, *(e.timestamp for e in step.events), step.end_time)
                assert list(times) == sorted(times)
                assert request.start_time <= step.start_time <= step.end_time <= request.end_time

    run(main())


def test_requests_of_a_trajectory_are_one_trace_where_clients_name_none():
    async def main() -> None:
        async with talking(servers=1) as at:
            exporter = exported(at)
            for tokens in (1, 2):
                body = {**IDS, "token_ids": [20] * tokens, "session_id": "c"}
                assert await post(at, GENERATE, body, {}) == 200
            unsampled = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
            await post(at, GENERATE, {**IDS, "session_id": "d"}, unsampled)
            at.front.traces.close()
            spans = exporter.get_finished_spans()
            assert {s.context.trace_id for s in spans} == {int(trace_of("c"), 16)}
            assert [s.name for s in spans] == ["step", f"POST {GENERATE}"] * 2
            assert told(at)[-1][::2] == [TRACE, "00"]  # not sampled, and engines are told so

    run(main())


def test_a_request_that_is_sent_again_makes_no_second_span_of_its_step():
    async def main() -> None:
        async with talking(servers=1) as at:
            exporter = exported(at)
            body = {**IDS, "sampling_params": {"max_tokens": 40}, "session_id": "c"}
            await asyncio.gather(*(post(at, GENERATE, body, GIVEN) for _ in range(2)))
            at.front.traces.close()
            names = sorted(s.name for s in exporter.get_finished_spans())
            assert names == [f"POST {GENERATE}"] * 2 + ["step"]

    run(main())


NO_CONTEXT = (
    *("", "00", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"),
    *(f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01\n"),
)


@pytest.mark.parametrize("header", NO_CONTEXT)
def test_a_header_that_is_no_trace_context_says_nothing(header: str):
    assert trace_context(header) == TraceContext()
    assert trace_context(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, "01")


def test_the_environment_says_where_spans_go(tmp_path: Path):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NO_SDK)
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": where, "OTEL_SERVICE_NAME": "fleet"}
        environment["OTEL_EXPORTER_OTLP_COMPRESSION"] = "none"
        with gateway(tmp_path, "--engine", "fake", **environment) as served:
            served.post(GENERATE, {**IDS, "sampling_params": {"max_tokens": 2}})
            served.end()
        server.shutdown()
    assert [path for path, _ in got] == ["/v1/traces"]
    assert re.search(rb"fleet", got[0][1])
    assert re.search(rb"heddle\.trajectory", got[0][1])
