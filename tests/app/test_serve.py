"""`heddle serve`: a gateway in a process of its own, and the run that it leaves behind."""

import json
import signal
import threading
import urllib.error
from pathlib import Path

import pytest

from heddle.runs import load_run
from heddle_core.events import TrajectoryArrived, TrajectoryFinished
from tests.app.gateways import Gateway, gateway
from tests.app.journals import Heddle
from tests.patience import PATIENCE_S

pytest.importorskip("aiohttp", reason="the gateway needs aiohttp: pip install 'heddle[serve]'")

FAST = ("--engine", "fake", "--time-scale", "0.01")


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
    done = heddle("simulate", trace, "--gpus", 2, "--json", "--missing-tool-tokens", "zero")
    assert done.exit_code == 0, done.output


def test_a_gateway_that_nobody_called_ends_in_order(tmp_path: Path):
    with gateway(tmp_path, *FAST) as served:
        summary = served.end()
    assert summary["arrived"] == 0


def test_a_second_signal_does_not_wait_and_the_run_is_no_result(tmp_path: Path):
    with gateway(tmp_path, "--engine", "fake", "--fake-tokens", "1000000") as served:
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
    with gateway(tmp_path, *FAST, "--admin-key", "option-key", **keys) as served:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            chat(served, "s", 1)
        chat(served, "s", 1, Authorization="Bearer environment-key")
        summary = served.end()
    for file in (tmp_path / summary["run"]).iterdir():
        data = file.read_bytes()
        assert b"environment-key" not in data
        assert b"option-key" not in data


def test_the_length_of_made_up_generations_and_the_name_of_the_model_are_options(tmp_path: Path):
    args = (*FAST, "--fake-tokens", "5", "--name", "tiny", "--name", "alias")
    with gateway(tmp_path, *args) as served:
        for model in ("tiny", "alias"):
            answer = served.post("/v1/completions", {"model": model, "prompt": "a b c"})
            assert answer["usage"]["completion_tokens"] < 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            served.post("/v1/completions", {"model": "other", "prompt": "a b c"})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("trace.jsonl",), "its clients are the trace"),
        (("--engine", "http"), "give --worker URL"),
        (("--engine", "fake", "--worker", "http://x"), "--worker goes with --engine http"),
        (("--worker", "http://x", "--worker", "http://y", "--engines", "1"), "give no fewer"),
        (("--policy", "verl+oracle"), "the future of clients is unknown"),
        (("--fake-tokens", "0"), "give 1 or more"),
        (("--max-open", "999999"), "permits"),
        (("--set", "cluster.roles=prefill=1,decode=1"), "--roles goes with replays only"),
        (("--engine", "vllm"), "model_dir must name the folder"),
        (("--worker", "ftp://x"), "is not the URL of an engine"),
        (("--worker", "http://127.0.0.1:9/v1"), "127.0.0.1:9"),
        (("--tp", "0"), "--tp 0"),
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
