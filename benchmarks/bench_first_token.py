"""Time to the first token, and to a new request while an engine is stopped, on real vLLM engines.

    python benchmarks/bench_first_token.py [--requests 40] [--stops 3]

Starts two `vllm serve` on CPU with a small model of random weights and `heddle serve` in front.
Streams are asked of an engine directly and through the gateway in turn; the difference of their
times to the first text is the gateway's. Then one engine is stopped (SIGSTOP) while 16 streams run,
new requests are sent every half second, and the engine goes on again (SIGCONT).
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heddle_runtime.process.child import group_members
from tests.app.gateways import gateway
from tests.gateway.corpus.groups import GROUPS
from tests.gateway.corpus.serving import Engine, engines

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "count to ten"}],
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
COMPLETION: dict[str, Any] = {
    **{key: value for key, value in CHAT.items() if key != "messages"},
    "prompt": "count to ten",
}
STOPPED_S, AFTER_S = 20.0, 10.0
STREAMS = 16


def first_token_s(url: str, path: str, body: dict[str, Any]) -> float:
    """Seconds from the request to the first event with text."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began_s, first_s = time.perf_counter(), 0.0
    with urllib.request.urlopen(request, timeout=600.0) as answer:
        for line in answer:
            if first_s or not line.startswith(b"data: {"):
                continue
            [choice] = json.loads(line[6:])["choices"] or [{}]
            if choice.get("text") or choice.get("delta", {}).get("content"):
                first_s = time.perf_counter() - began_s
    return first_s


def whole_s(url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds that a whole answer takes, and its status."""
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600.0) as answer:
        answer.read()
        return time.perf_counter() - began_s, answer.status


def spread(values: Sequence[float]) -> str:
    """Median and spread of seconds, as text."""
    ordered = sorted(values)
    tenth = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    middle = 1e3 * statistics.median(values)
    return f"median {middle:.1f} ms, 10 to 90 % {1e3 * tenth[0]:.1f} to {1e3 * tenth[1]:.1f}"


def first_tokens(direct: str, through: str, requests: int) -> None:
    """Print the times to the first token, in pairs of one direct and one through."""
    for name, path, body in (
        ("chat", "/v1/chat/completions", CHAT),
        ("completion", "/v1/completions", COMPLETION),
    ):
        first_token_s(direct, path, body), first_token_s(through, path, body)
        pairs = [
            (first_token_s(direct, path, body), first_token_s(through, path, body))
            for _ in range(requests)
        ]
        print(f"{name}: direct {spread([a for a, _ in pairs])}")
        print(f"{name}: through {spread([b for _, b in pairs])}")
        print(f"{name}: difference of pairs {spread([b - a for a, b in pairs])}")


class Asked:
    """Requests that are sent while an engine stops and goes on."""

    def __init__(self, url: str) -> None:
        self._url, self._threads = url, list[threading.Thread]()
        self.took: list[tuple[float, float]] = []
        """When each was sent, and how long it took; -1: it failed."""

    def send(self, tokens: int, at_s: float) -> None:
        """Send a request from a thread of its own."""

        def ask() -> None:
            body = {**COMPLETION, "stream": False, "max_tokens": tokens}
            try:
                took_s, _ = whole_s(self._url, body)
            except OSError:
                took_s = -1.0
            self.took.append((at_s, took_s))

        thread = threading.Thread(target=ask)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all are answered."""
        for thread in self._threads:
            thread.join()


def signal_all(engine: Engine, number: int) -> None:
    """Send a signal to every process of an engine."""
    for member in group_members(engine.pid):
        os.kill(member, number)


def stops(each: Sequence[Engine], url: str, times: int) -> None:
    """Stop the engines in turn, and print what requests meanwhile had to wait."""
    for n in range(times):
        usual_s = statistics.median(whole_s(url, {**COMPLETION, "stream": False})[0] for _ in "ab")
        asked, began_s = Asked(url), time.perf_counter()
        for _ in range(STREAMS):
            asked.send(400, -1.0)
        time.sleep(1.0)
        stopped = each[n % len(each)]
        signal_all(stopped, signal.SIGSTOP)
        stopped_s = time.perf_counter()
        try:
            while time.perf_counter() - stopped_s < STOPPED_S:
                asked.send(16, time.perf_counter() - stopped_s)
                time.sleep(0.5)
        finally:
            signal_all(stopped, signal.SIGCONT)
        went_on_s = time.perf_counter() - stopped_s
        back_s = None
        while time.perf_counter() - stopped_s - went_on_s < AFTER_S and back_s is None:
            time.sleep(0.2)
            with urllib.request.urlopen(url + "/workers", timeout=60.0) as answer:
                states = {w["url"]: w["state"] for w in json.load(answer)["workers"]}
            if states.get(stopped.url) == "ready":
                back_s = time.perf_counter() - stopped_s - went_on_s
        asked.wait()
        new = [(at_s, took_s) for at_s, took_s in asked.took if at_s >= 0]
        slow = [(at_s, took_s) for at_s, took_s in new if took_s > usual_s + 1.0]
        lost = sum(took_s < 0 for _, took_s in asked.took)
        last = max((at_s for at_s, _ in slow), default=0.0)
        longest = max(took_s for _, took_s in asked.took)
        print(
            f"stop {n + 1}: {len(asked.took)} requests, {lost} lost, the longest took {longest:.1f}"
            f" s; {len(slow)} of {len(new)} new ones took over a second longer than the usual "
            f"{usual_s:.2f} s, the last of these sent {last:.1f} s after the stop; "
            f"ready again {'never' if back_s is None else f'{back_s:.1f} s'} after it went on; "
            f"{time.perf_counter() - began_s:.0f} s in all"
        )


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--stops", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, engines(GROUPS["main"], Path(folder)) as each:
        workers = [word for engine in each for word in ("--worker", engine.url)]
        with gateway(Path(folder), *workers) as served:
            first_tokens(each[0].url, served.url, given.requests)
            stops(each, served.url, given.stops)


if __name__ == "__main__":
    main()
