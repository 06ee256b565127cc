"""What operators use: health, drain, reload, metrics and their dashboard, ids of requests."""

import asyncio
import json
import re
import signal
import threading
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.app.gateways import Gateway, gateway
from tests.gateway.served import NO_AIOHTTP, run
from tests.patience import PATIENCE_S

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_gateway.saved import SavedState
from heddle_runtime.vllm_http.probe import CHAT, MESSAGES
from tests.app.test_serve import FakeVllmThread
from tests.gateway.test_forwarded import asked as forwarded
from tests.gateway.test_http import IDS, client
from tests.gateway.test_streams import asked, talking

DASHBOARD = Path(__file__).parents[2] / "docs" / "examples" / "gateway-dashboard.json"
GENERATE = "/inference/v1/generate"


def test_a_gateway_that_drains_is_alive_and_not_ready_and_ends_what_has_begun():
    async def main() -> None:
        async with client(speed=1.0, mean_tokens=10**9) as http:
            for path in ("/livez", "/readyz", "/health"):
                assert (await http("GET", path))[0] == 200
            body = {**IDS, "sampling_params": {"max_tokens": 60}}
            going = asyncio.create_task(http.post(GENERATE, body, X_Session_ID="old"))
            while (await http("GET", "/load"))[1]["server_load"] < 1:
                await asyncio.sleep(0.01)
            draining = asyncio.create_task(http.bench.gateway.drain(PATIENCE_S))
            await asyncio.sleep(0)
            assert (await http("GET", "/livez"))[0] == 200
            assert (await http("GET", "/readyz"))[0] == 503
            status, error = await http("POST", GENERATE, IDS, X_Session_ID="new")
            assert (status, "Retry-After" in http.headers) == (503, True), error
            again = asyncio.create_task(http.post(GENERATE, body, X_Session_ID="old"))
            assert len((await going)["choices"][0]["token_ids"]) == 60
            assert (await again)["choices"] == (await going)["choices"]
            await draining
            # A next step would hold the end up: the gateway that comes then takes it.
            later = {**IDS, "token_ids": [20] * 90}
            assert (await http("POST", GENERATE, later, X_Session_ID="old"))[0] == 503

    run(main())


def ask(served: Gateway, session: str, tokens: int, found: list[Any]) -> None:
    body = {"token_ids": [20], "sampling_params": {"max_tokens": tokens}}
    found.append(served.post(GENERATE, body, **{"X-Session-ID": session}))


@pytest.mark.parametrize("way", ["SIGTERM", "POST"])
def test_at_its_end_steps_under_way_are_answered(tmp_path: Path, way: str):
    slow = ("--engine", "fake", "--set", "serve.fake_tokens=1000000")
    with gateway(tmp_path, *slow) as served:
        found: list[Any] = []
        sent = threading.Thread(target=ask, args=(served, "s", 60, found))
        sent.start()
        while not served.get("/heddle/state")["steps"]:
            pass
        if way == "POST":
            assert served.post("/drain")["status"] == "draining"
        else:
            served.process.send_signal(signal.SIGTERM)
        sent.join()
        served.process.communicate(timeout=PATIENCE_S)
        assert served.process.returncode == 0
    assert len(found[0]["choices"][0]["token_ids"]) == 60


def listed(served: Gateway) -> list[str]:
    return [each["url"] for each in served.get("/workers")["workers"]]


def test_engines_and_keys_are_read_again_at_a_hangup_or_a_call(tmp_path: Path):
    config = tmp_path / "heddle.toml"
    with FakeVllmThread() as first, FakeVllmThread() as second:
        config.write_text(f'[serve]\nworkers = ["{first}"]\n')
        with gateway(tmp_path, "--engine", "http") as served:
            assert listed(served) == [first]
            config.write_text(f'[serve]\nworkers = ["{second}"]\n')
            served.process.send_signal(signal.SIGHUP)
            while listed(served) != [second]:
                pass
            config.write_text("[serve]\nworkers = 3\n")
            with pytest.raises(urllib.error.HTTPError) as refused:
                served.post("/reload")
            said = json.load(refused.value)
            assert (refused.value.code, said["status"]) == (500, "failed")
            assert "workers" in said["notes"][0]
            assert listed(served) == [second]
            config.write_text(f'[serve]\nworkers = ["{second}"]\n')
            assert served.post("/reload") == {"status": "ok", "notes": []}
            served.end()


def test_ids_of_requests_reach_engines():
    async def main() -> None:
        async with talking() as at:
            named = {"X-Request-Id": "order 7/é"}
            for path, body in ((CHAT, asked(CHAT, "a", 4)), (MESSAGES, forwarded(MESSAGES, "b"))):
                async with at.http.post(at.url + path, json=body, headers=named) as answer:
                    assert answer.status == 200
            ids = [b["request_id"] for s in at.servers for b in s.seen if "request_id" in b]
            headers = [name for server in at.servers for name in server.named]
            assert [name.partition("-")[0] for name in (*ids, *headers)] == ["order_7__"] * 2

    run(main())


def names_in(text: str) -> set[str]:
    return set(re.findall(r"^(heddle_[a-z_]+)", text, re.MULTILINE))


def test_metrics_have_the_times_of_steps_by_engine_and_the_dashboard_asks_for_no_other():
    async def main() -> str:
        async with talking() as at:
            for n in range(3):
                assert (await at("POST", CHAT, asked(CHAT, f"{n}", 6)))[0] == 200
            async with at.http.get(at.url + "/metrics") as answer:
                return str(await answer.text())

    text = run(main())
    parser = pytest.importorskip("prometheus_client.parser")
    samples = [s for family in parser.text_string_to_metric_families(text) for s in family.samples]
    count = {s.name: 0.0 for s in samples}
    for sample in samples:
        count[sample.name] += sample.value
    assert count["heddle_time_to_first_token_seconds_count"] == 3
    assert count["heddle_request_time_per_output_token_seconds_count"] == 3
    assert count["heddle_request_queue_time_seconds_count"] == 3
    assert count["heddle_prefix_cache_queries_total"] == count["heddle_prompt_tokens_total"] > 0
    assert count["heddle_decision_seconds_count"] > 6
    engines = {s.labels["engine"] for s in samples if s.name.endswith("first_token_seconds_sum")}
    assert engines <= {"e0", "e1"}

    page = (DASHBOARD.parents[1] / "serve.md").read_text()
    _, found, rest = page.partition("## Run book\n")
    assert found
    of_metrics = {name.removeprefix("heddle_") for name in names_in(text)}
    for name in re.findall(r"`([a-z_]{5,}[a-z])`", rest.partition("\n## ")[0]):
        assert {name, f"{name}_sum"} & of_metrics or name == "rate_limit", name

    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert {"type", "title", "gridPos", "fieldConfig", "datasource"} <= panel.keys()
        for target in panel["targets"]:
            asked_for = set(re.findall(r"heddle_[a-z_]+", target["expr"]))
            assert asked_for <= names_in(text), target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")


def test_a_step_counts_once_and_one_without_tokens_has_no_first(tmp_path: Path):
    async def value(http: Any, name: str) -> float:
        text = (await http("GET", "/metrics"))[1]
        return float(re.search(rf"^heddle_{name} (\S+)", text, re.MULTILINE).group(1))

    async def main() -> None:
        for _ in range(2):
            saved = SavedState(tmp_path / "state.db", 60.0, 60.0)
            async with client(mean_tokens=10**9, saved=saved) as http:
                asked = (http.post(GENERATE, IDS, X_Session_ID="s") for _ in range(3))
                await asyncio.gather(*asked)
                await http.post(GENERATE, IDS, X_Session_ID="s")
                steps = http.bench.gateway.dispatches
                assert await value(http, "output_tokens_total") == 5 * steps
                assert await value(http, "prompt_tokens_total") == 3 * steps
                assert await value(http, "step_seconds_count") == steps
                if steps:
                    http.bench.gateway.pause()
                    held = asyncio.create_task(http.post(GENERATE, IDS, X_Session_ID="t"))
                    while (await http("GET", "/load"))[1]["server_load"] < 1:
                        await asyncio.sleep(0.01)
                    await http.post("/abort_requests")
                    assert (await held)["choices"][0]["finish_reason"] == "abort"
                    assert "first_token_seconds_count{" in (await http("GET", "/metrics"))[1]
                    counts = re.findall(
                        r"first_token_seconds_count\{.*\} (\d+)", (await http("GET", "/metrics"))[1]
                    )
                    assert sum(map(int, counts)) == 1
            saved.close()

    run(main())
