"""`heddle serve`: a gateway in a process of its own, and the run that it leaves behind."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from heddle.config import PolicyConfig, RunConfig, RuntimeConfig
from heddle.runs import load_run
from heddle_core.events import (
    EngineJoined,
    EngineReady,
    StepFinished,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_trace import read_trace
from tests.app.gateways import Gateway, gateway
from tests.app.journals import ONE_RUN, Heddle
from tests.patience import PATIENCE_S

pytest.importorskip("aiohttp", reason="the gateway needs aiohttp: pip install 'heddle-rl[serve]'")

# Both import aiohttp.
from heddle.gateway.config import GatewayConfig
from heddle.gateway.serve import serve
from heddle.gateway.setup import with_tokenizer
from heddle_gateway.front import FrontSettings

FAST = ("--engine", "fake", "--set", "runtime.time_scale=0.01")


def chat(served: Gateway, session: str, steps: int, **headers: str) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": f"task {session}"}]
    for step in range(steps):
        answer = served.post(
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": 30},
            **{"X-Session-ID": session, **headers},
        )
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": f"the program printed {step}"})


@pytest.mark.parametrize("policy", ["heddle", "verl"])
def test_a_gateways_run_replays_and_becomes_a_trace_to_simulate(
    heddle: Heddle, tmp_path: Path, policy: str
):
    with gateway(tmp_path, *FAST, "--policy", policy) as served:
        for n in range(4):
            chat(served, f"g_{n}", 3)
            if n < 3:
                served.post(f"/finish_session?session_id=g_{n}")
        summary = served.end(signal.SIGINT)
    path = tmp_path / summary["run"]
    run = load_run(path)
    assert run.manifest["status"] == "finished"
    assert run.manifest["driver"] == "heddle_gateway"
    events = [entry.event for entry in run.entries()]
    assert [e.group for e in events if isinstance(e, TrajectoryArrived)] == ["g"] * 4
    ends = [e.outcome for e in events if isinstance(e, TrajectoryFinished)]
    assert ends == ["completed"] * 3 + ["cancelled"]
    assert (summary["completed"], summary["cancelled"], summary["steps"]) == (3, 1, 12)
    assert "the same" in heddle("replay", path).stdout
    trace = tmp_path / "served.jsonl"
    assert heddle("trace", "extract", path, "-o", trace).exit_code == 0
    assert len(trace.read_text().splitlines()) == 3
    done = heddle(*ONE_RUN, trace, "--gpus", 2, "--json", "--set", "missing.tool_tokens=zero")
    assert done.exit_code == 0, done.output


class FakeVllmThread:
    """A server of fake engines in an event loop of its own."""

    def __init__(self) -> None:
        from tests.runtime.fake_vllm import FakeVllm

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.vllm = FakeVllm()
        self.vllm.dev_mode, self.vllm.tp = True, 2

    def __enter__(self) -> str:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.vllm.start(), self._loop).result(PATIENCE_S)
        return self.vllm.url

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.vllm.close(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def test_engines_come_by_url_to_a_gateway_that_began_with_none(heddle: Heddle, tmp_path: Path):
    made: list[int] = []

    def post(url: str, body: object) -> dict[str, Any]:
        sent = urllib.request.Request(
            url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(sent, timeout=PATIENCE_S) as answer:
            return dict(json.load(answer))

    def drive(url: str, worker: str) -> None:
        try:
            assert post(f"{url}/workers", {"url": worker})["tp"] == 2
            body = {"token_ids": [300, 301], "sampling_params": {"max_tokens": 4}}
            made.extend(post(f"{url}/inference/v1/generate", body)["choices"][0]["token_ids"])
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threads: list[threading.Thread] = []

    def listening(url: str, path: Path) -> None:
        threads.append(threading.Thread(target=drive, args=(url, worker)))
        threads[0].start()

    config = RunConfig(
        trace="gateway",
        runtime=RuntimeConfig(engine="http"),
        policy=PolicyConfig(preset="heddle"),
    )
    front = FrontSettings(max_open=64)
    with FakeVllmThread() as worker:
        result = serve(
            config,
            GatewayConfig(port=0, front=front),
            out=tmp_path / "runs",
            on_listening=listening,
        )
        threads[0].join()
    assert len(made) == 4
    run = load_run(result.path)
    parts = "by_arrivals+balance_batches+given+keep_engines"
    assert run.config.policy.preset == f"heddle+{parts}"
    [joined] = [e.event for e in run.entries() if isinstance(e.event, EngineJoined)]
    assert (joined.engine, joined.shape.tp) == ("e0", 2)
    assert 0.0 < result.summary["gpu_hours"] < 2 * PATIENCE_S / 3600.0
    assert "the same" in heddle("replay", result.path).stdout


def test_own_engines_get_the_tokenizer_of_the_models_folder(tmp_path: Path):
    for files, found in (((), False), (("tokenizer.json",), True)):
        for name in files:
            (tmp_path / name).write_text("{}")
        runtime = RuntimeConfig(engine="vllm", model_dir=str(tmp_path))
        assert (
            with_tokenizer(RunConfig(trace="gateway", runtime=runtime)).runtime.tokenizer is found
        )
    fake = RuntimeConfig(engine="fake", model_dir=str(tmp_path))
    assert not with_tokenizer(RunConfig(trace="gateway", runtime=fake)).runtime.tokenizer


def test_a_gateway_that_was_killed_has_no_results_and_a_message_says_how_to_get_them(
    heddle: Heddle, tmp_path: Path
):
    with gateway(tmp_path, *FAST) as served:
        path = tmp_path / served.started["run"]
        body = {"token_ids": [20], "sampling_params": {"max_tokens": 8}, "session_id": "one"}
        served.post("/inference/v1/generate", body)
        served.post("/finish_session", {"session_id": "one"})
        listed = served.get("/v1/models")["data"][0]["max_model_len"]
        assert served.post("/tokenize", {"prompt": "one"})["max_model_len"] == listed
        live = tmp_path / "live.jsonl"
        deadline = time.monotonic() + PATIENCE_S  # the journal is written every second
        while heddle("trace", "extract", path, "-o", live).exit_code:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        served.process.kill()
        served.process.communicate(timeout=PATIENCE_S)
    killed = tmp_path / "killed.jsonl"
    assert heddle("trace", "extract", path, "-o", killed).exit_code == 0
    assert len(read_trace(live).records) == len(read_trace(killed).records) == 1
    done = heddle("report", path)
    assert done.exit_code == 2
    assert "a gateway has them after one Ctrl-C or SIGTERM" in done.output
    assert heddle("replay", path).exit_code == 0


def test_fake_engines_of_two_gpu_types_serve_and_the_run_has_the_shape_of_each(
    heddle: Heddle, tmp_path: Path
):
    types = 'cluster.engines=[{gpu="h100",gpus=1},{gpu="l40s",gpus=2,tp=2}]'
    with gateway(tmp_path, "--engine", "fake", "--policy", "verl", "--set", types) as served:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: chat(served, f"task-{n}_0", 2), range(8)))
        path = tmp_path / served.end()["run"]
    found = [entry.event for entry in load_run(path).entries()]
    shapes = {e.engine: (e.shape.gpu, e.shape.tp) for e in found if isinstance(e, EngineReady)}
    assert shapes == {"e0": ("h100", 1), "e1": ("l40s", 2)}
    assert {e.engine for e in found if isinstance(e, StepFinished)} == set(shapes)
    assert "the same" in heddle("replay", path).stdout


def test_a_gateway_that_nobody_called_ends_in_order(tmp_path: Path):
    with gateway(tmp_path, *FAST) as served:
        summary = served.end()
    assert summary["arrived"] == 0


def test_a_second_signal_does_not_wait_and_the_run_is_no_result(tmp_path: Path):
    with gateway(tmp_path, "--engine", "fake", "--set", "serve.fake_tokens=1000000") as served:
        body = {"token_ids": [20], "sampling_params": {"max_tokens": 20_000}}
        sent = threading.Thread(target=lambda: refused(served, body))
        sent.start()
        while not served.get("/heddle/state")["steps"]:
            pass
        for _ in range(2):
            served.process.send_signal(signal.SIGINT)
        served.process.communicate(timeout=PATIENCE_S)
        sent.join()
        assert served.process.returncode in (0, 130)
        manifest = json.loads((tmp_path / served.started["run"] / "manifest.json").read_text())
        assert manifest["status"] == ("interrupted" if served.process.returncode else "finished")


def refused(served: Gateway, body: dict[str, object]) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        served.post("/inference/v1/generate", body)


def test_keys_come_from_the_environment_too_and_are_in_no_file(tmp_path: Path):
    keys = {"HEDDLE_API_KEY": "environment-key"}
    with gateway(tmp_path, *FAST, **keys) as served:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            chat(served, "s", 1)
        chat(served, "s", 1, Authorization="Bearer environment-key")
        summary = served.end()
    for file in (tmp_path / summary["run"]).iterdir():
        data = file.read_bytes()
        assert b"environment-key" not in data


def test_the_length_of_made_up_generations_and_the_name_of_the_model_are_options(tmp_path: Path):
    args = (*FAST, "--set", "serve.fake_tokens=5", "--set", 'serve.names=["tiny","alias"]')
    with gateway(tmp_path, *args) as served:
        for model in ("tiny", "alias"):
            answer = served.post("/v1/completions", {"model": model, "prompt": "a b c"})
            assert answer["usage"]["completion_tokens"] < 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            served.post("/v1/completions", {"model": "other", "prompt": "a b c"})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("trace.jsonl",), "'trace.jsonl' is not 'check'"),
        (("--engine", "http", "--engines", "2"), "as many as there are. Leave it out"),
        (("--engine", "http", "--tp", "3"), "has TP 1, 2, 4, 8"),
        (("--engine", "http", "--tp", "0"), "--tp 0"),
        (("--worker", "http://x", "--tp", "1,2"), "give one TP degree for all, or one for each"),
        (("--set", "cluster.restarts=-1"), "restarts must be from 0"),
        (("--set", "cluster.restart_window_s=0"), "restart_window_s must be more than 0"),
        (("--engine", "fake", "--worker", "http://x"), "--worker goes with --engine http"),
        (("--policy", "verl+oracle"), "the future of clients is unknown"),
        (("--set", "serve.fake_tokens=0"), "fake_tokens must be 1 or more"),
        (("--set", "serve.max_open=999999"), "permits"),
        (("--set", "cluster.roles=prefill=1,decode=1"), "cluster.roles goes with replays only"),
        (("--engine", "vllm"), "model_dir must name the folder"),
        (("--model-dir", "model"), "--model-dir goes with --engine vllm, not with fake"),
        (
            ("--set", 'serve.render_options=["--tool-call-parser=hermes"]'),
            "serve.render_options goes with --engine vllm",
        ),
        (("--worker", "ftp://x"), "is not the URL of an engine"),
        (("--worker", "http://user:secret@x"), "--worker: 'http://...@x' is not the URL"),
        (("--set", 'serve.names=[""]', *FAST), "serve.names has an empty name"),
        (("--api-key", "secret\n", *FAST), "--api-key has a space"),
        (("--tp", "0"), "--tp 0"),
        (
            ("--worker", "http://x", "--set", f"serve.fake_replies={__file__}"),
            "goes with --engine fake",
        ),
        (
            ("--engine", "fake", "--set", f"serve.fake_replies={__file__}"),
            "test_serve.py, line 1: ",
        ),
        (("--host", "256.1.1.1", *FAST), "256.1.1.1"),
    ],
)
def test_bad_options_end_in_one_message(
    heddle: Heddle, args: tuple[str, ...], says: str, tmp_path: Path
):
    done = heddle("serve", "--port", 0, "--out", tmp_path / "runs", *args)
    assert done.exit_code in (1, 2), done.output
    assert says in done.output, done.output
    assert "Traceback" not in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize(
    ("key", "remedy"),
    [("keys", "Give each name a table"), ("fake_replies", "write one message as JSON")],
)
def test_a_file_that_is_nested_too_deeply_is_named(
    heddle: Heddle, key: str, remedy: str, tmp_path: Path
):
    path = tmp_path / "deep"
    path.write_text("a = " * (key == "keys") + "[" * 5_000)
    done = heddle("serve", "--port", 0, "--engine", "fake", "--set", f"serve.{key}={path}")
    assert done.exit_code == 2
    assert str(path) in done.output, done.output
    assert remedy in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_a_key_or_the_word_that_it_needs_none(
    heddle: Heddle, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for key in ("", "only-of-control"):
        monkeypatch.setenv("HEDDLE_ADMIN_KEY", key)
        out = tmp_path / "runs"
        done = heddle("serve", "--port", 0, "--out", out, "--host", host, *FAST)
        assert done.exit_code == 2, done.output
        for flag in (f"--host {host}", "--api-key", "HEDDLE_ADMIN_KEY", "serve.open_to_all"):
            assert flag in " ".join(done.output.split())
        assert "Traceback" not in done.output
        assert not out.exists()
    open_to_all = ("--set", "serve.open_to_all=true")
    done = heddle("serve", "--port", 0, *open_to_all, "--api-key", "k", *FAST)
    assert done.exit_code == 2
    assert "serve.open_to_all means no key" in " ".join(done.output.split())


def test_a_file_of_state_that_cannot_be_used_is_said_before_anything_is_made(
    heddle: Heddle, tmp_path: Path
):
    state, out = tmp_path / "state.db", tmp_path / "runs"
    state.write_text("no database " * 100)
    done = heddle("serve", "--port", 0, "--out", out, "--set", f"serve.state={state}", *FAST)
    assert done.exit_code == 2, done.output
    assert "state.db" in done.output
    assert "Traceback" not in done.output
    assert not out.exists()


def test_a_worker_that_is_down_at_the_start_joins_when_it_answers(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    later = FakeVllmThread()
    later.vllm.port, later.vllm.key = port, "of-the-engine"
    url = f"http://127.0.0.1:{port}"
    with gateway(tmp_path, "--worker", f"{url}/v1", HEDDLE_ENGINE_KEY="of-the-engine") as served:
        [worker] = served.get("/workers")["workers"]
        assert (worker["id"], worker["url"], worker["state"]) == (None, url, "expected")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            served.get("/health")
        with later:
            # The request waits for the engine that comes.
            body = {"token_ids": [300, 301], "sampling_params": {"max_tokens": 4}}
            answer = served.post("/inference/v1/generate", body)
            assert len(answer["choices"][0]["token_ids"]) == 4
            [worker] = served.get("/workers")["workers"]
            assert (worker["id"], worker["state"], worker["tp"]) == ("e0", "ready", 2)
            summary = served.end()
    assert summary["steps"] == 1
    for file in (tmp_path / summary["run"]).iterdir():
        assert b"of-the-engine" not in file.read_bytes()


def test_an_address_that_is_taken_is_said_before_anything_is_made(heddle: Heddle, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = heddle("serve", "--port", port, "--out", tmp_path / "runs", *FAST)
    assert done.exit_code == 2
    assert f"--port {port}: " in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "runs").exists()
