"""`heddle diagnose` and `heddle verify` on recordings of real engines and real agents.

    python -m experiments.real_cpu.recorded WORK --clients .venv-clients/bin/python [--runs 3]

Two `vllm serve` on CPU write spans (OTLP) and metrics; mini-swe-agent works through `heddle serve`
(docs/examples/coding_agents.py). Each recording is a file of spans, as a collector's file exporter
writes them, and a file of metrics an engine, scraped each second. A sweep of one engine comes
first. Finished parts in WORK are kept.

vLLM needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click

from experiments.real_cpu.run import heddle
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.command import PARENT

RESULTS = Path(__file__).with_name("recorded.json")
PROFILE = Path(__file__).with_name("recorded.profile.json")
AGENTS = Path(__file__).parents[2] / "docs/examples/coding_agents.py"
ENGINES, SLOTS = 2, 8
TASKS, SAMPLES, STEPS = 6, 4, 8
CONTEXT, KV_MIB = 8192, 512
SEED, START_LIMIT_S = 7, 300.0
SAMPLED = (
    *("num_requests_running", "num_requests_waiting"),
    *(f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")),
)
"""Of `/metrics`; the rest is left out, so that recordings are small."""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def collector(path: Path) -> Iterator[str]:
    """Write the spans of requests that come by OTLP over HTTP, an object a line; yield its URL."""
    of_json = import_module("google.protobuf.json_format")
    service = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            sent = service.ExportTraceServiceRequest.FromString(data)
            found = of_json.MessageToDict(sent)
            for resource, shown in zip(sent.resource_spans, found["resourceSpans"], strict=True):
                kept = shown["resource"]["attributes"]
                kept[:] = [each for each in kept if each["key"].startswith("service.")]
                for scope, own in zip(resource.scope_spans, shown["scopeSpans"], strict=True):
                    for span, plain in zip(scope.spans, own["spans"], strict=True):
                        # Ids are hex in OTLP's JSON. A parent is the client's span.
                        plain["traceId"], plain["spanId"] = span.trace_id.hex(), span.span_id.hex()
                        plain.pop("parentSpanId", None)
                    own["spans"] = [each for each in own["spans"] if each["name"] == "llm_request"]
            with lock, path.open("a") as out:
                out.write(json.dumps(found, separators=(",", ":")) + "\n")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()


@contextmanager
def engine(model: Path, name: str, traces: str, folder: Path) -> Iterator[str]:
    """One `vllm serve`; yield its URL, which answers later."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    core = sorted(os.sched_getaffinity(0))[int(name[-1]) % len(os.sched_getaffinity(0))]
    command = [sys.executable, "-m", "heddle_runtime.vllm.command", PARENT, str(os.getpid())]
    command += ["serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
    command += ["--kv-cache-memory-bytes", str(KV_MIB << 20), "--block-size", "32"]
    command += ["--enable-scale-out", "--enable-prompt-tokens-details"]
    command += ["--generation-config", "vllm", "--otlp-traces-endpoint", traces]
    own = {
        "OTEL_SERVICE_NAME": name,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True
        )
    try:
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def until_ready(url: str) -> None:
    """Wait until an engine answers; exit where it does not."""
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        with suppress(OSError), urlopen(f"{url}/health", timeout=5.0):
            return
        time.sleep(0.5)
    sys.exit(f"{url} did not start: see its log")


@contextmanager
def scraped(url: str, path: Path) -> Iterator[None]:
    """Write the metrics of an engine each second."""
    ended = threading.Event()

    def scrape() -> None:
        with path.open("a") as out:
            while True:
                last = ended.is_set()
                with suppress(OSError), urlopen(f"{url}/metrics", timeout=5.0) as answer:
                    now_s = time.time()
                    lines = [
                        line
                        for line in answer.read().decode().splitlines()
                        if line.partition("{")[0].removeprefix("vllm:") in SAMPLED
                    ]
                    out.write("\n".join([f"# TIME {now_s:.3f}", *lines, ""]))
                if last:
                    return
                ended.wait(1.0)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def record(model: Path, folder: Path, clients: str) -> dict[str, Any]:
    """Record all agents once; return the load of the machine before and after."""
    folder.mkdir(parents=True)
    before = os.getloadavg()[0]
    with ExitStack() as stack:
        traces = stack.enter_context(collector(folder / "spans.jsonl"))
        names = [f"engine-{number}" for number in range(ENGINES)]
        urls = [stack.enter_context(engine(model, name, traces, folder)) for name in names]
        for url in urls:
            until_ready(url)
        for name, url in zip(names, urls, strict=True):
            stack.enter_context(scraped(url, folder / f"{name}.prom"))
        workers = [word for url in urls for word in ("--worker", url)]
        agents = [clients, str(AGENTS), str(folder / "agents"), "--tasks", str(TASKS)]
        agents += ["--samples", str(SAMPLES), "--steps", str(STEPS), "--seed", str(SEED), "--"]
        agents += [sys.executable, "-m", "heddle.cli", "serve", *workers, "--policy", "verl"]
        done = subprocess.run(agents, stdout=subprocess.PIPE, text=True, check=False)
        (folder / "agents.log").write_text(done.stdout)
        time.sleep(6.0)  # spans are exported every five seconds
    return {"load": [before, os.getloadavg()[0]], "agents_failed": done.returncode}


def sweep(model: Path, path: Path) -> None:
    """Measure one engine."""
    heddle(
        *("profile", "measure", "--engine", "vllm", "--model-dir", model, "--max-running", SLOTS),
        *("--set", "profile.sweep=quick", "--set", "profile.max_context=4096"),
        *("--set", f"runtime.max_context={CONTEXT}", "--set", "runtime.dtype=float32"),
        *("-o", path),
    )


def judged(folder: Path, profile: Path) -> dict[str, Any]:
    """What diagnose and verify say of a recording: of its files alone."""
    logs = [folder / "spans.jsonl", *sorted(folder.glob("*.prom"))]
    stated = (f"cluster.model={profile}", "cluster.gpu=cpu", "cluster.tp=1", "policy.preset=verl")
    options = [word for key in stated for word in ("--set", key)]
    whole = json.loads(heddle("diagnose", *logs, "--json", "--set", "diagnose.budget_s=0"))
    again = json.loads(heddle("verify", *logs, *options, "--fit", "--json"))
    summed_s = sum(part["seconds"] for part in whole["parts"])
    return {
        "measured_s": whole["measured_s"],
        "parts_over_measured": summed_s / whole["measured_s"],
        "unaccounted": next(p["share"] for p in whole["parts"] if p["part"] == "unaccounted"),
        "diagnose": whole["verdict"],
        "verify": again["verdict"],
        **{key: again[key] for key in ("error_pct", "parts", "figures", "cause", "kernel", "fit")},
        "by_profile": {
            key: (again["by_profile"] or again)[key] for key in ("error_pct", "verdict")
        },
        **json.loads((folder / "load.json").read_text()),
    }


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--clients", default=sys.executable, help="Python with mini-swe-agent")
@click.option("--runs", default=3, show_default=True)
def main(work: Path, clients: str, runs: int) -> None:
    """Record, then diagnose and verify what was recorded."""
    work.mkdir(parents=True, exist_ok=True)
    model, profile = work / "model", work / "profile.json"
    if not model.exists():
        make_tiny_model(model, size="medium", seed=SEED)
    swept = work / "sweep.json"
    if not swept.exists():
        sweep(model, swept)
    folders = [work / f"run-{number}" for number in range(runs)]
    for folder in folders:
        if not (folder / "load.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            found = record(model, folder, clients)
            (folder / "load.json").write_text(json.dumps(found))
        print(folder.name, (folder / "load.json").read_text(), flush=True)
    heddle("profile", "fit", swept, "-o", profile, "--force")
    PROFILE.write_text(profile.read_text().replace(f"{work}/", ""))
    results = {folder.name: judged(folder, profile) for folder in folders}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name, row in results.items():
        print(f"{name}: {row['diagnose']}\n  {row['verify']}")


if __name__ == "__main__":
    main()
