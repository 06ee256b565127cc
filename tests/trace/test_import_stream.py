"""Memory of an import does not grow with its file. Measured in a process of its own."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trace.imported_logs import FIXTURES

SMALL, LARGE = 4_000_000, 24_000_000
"""Bytes of the two files."""

CACHES = 8_000_000
"""Bytes by which memory may differ: what caches fill up with until they reach their limits."""

MEASURE = """
import sys
from heddle_trace.importers import import_trace, joining
# Requests that can be continued are held up to a limit: here one that both files reach.
joining.PrefixJoin.__init__.__defaults__ = (1_000,)
report = import_trace(sys.argv[1:2], sys.argv[2])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(report.trajectories, int(peak.split()[1]) * 1024)
"""

TEXT = "The quick brown fox jumps over the lazy dog. " * 200


def chats(n: int) -> str:
    call = {"function": {"name": "run", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": TEXT[:400], "tool_calls": [call]},
        {"role": "tool", "content": TEXT},
        {"role": "assistant", "content": TEXT[:100]},
    ]
    return json.dumps({"id": f"c{n}", "messages": messages}) + "\n"


def interleaved(n: int) -> str:
    """Sessions of eight requests each, all of them open for most of the file."""
    began_ms = 1_777_312_800_000 + 10 * n
    row = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": began_ms + 1,
        "agent_context": {"session_id": f"s{n % 300}"},
        "request": {
            "request_id": f"r{n}",
            "input_tokens": 50 + 100 * (n // 300),
            "output_tokens": 20,
            "request_received_ms": began_ms,
            "total_time_ms": 1,
        },
    }
    return json.dumps(row) + " " * 9_000 + "\n"


def requests(n: int) -> str:
    """Prompts of two full blocks, none of them seen before."""
    row = {"timestamp": n, "input_length": 1_100, "output_length": 9, "hash_ids": [0, n, n + 1]}
    return json.dumps(row) + " " * 2_000 + "\n"


def runs(n: int) -> str:
    (run, *_) = json.loads((FIXTURES / "openai_chat_tasks.json").read_text())
    run["id"] = run["task_id"] = f"{n}"
    run["messages"][3]["content"] = TEXT
    return ("[" if n == 0 else ",") + json.dumps(run)


def samples(n: int) -> str:
    document = json.loads((FIXTURES / "inspect.json").read_text())
    (sample, *_) = document.pop("samples")
    sample["id"] = n
    sample["attachments"] = {"x": TEXT}
    head = json.dumps(document)[:-1] + ', "samples": ['
    return (head if n == 0 else ",") + json.dumps(sample)


KINDS: dict[str, tuple[Callable[[int], str], str]] = {
    "chats, one a line": (chats, ""),
    "interleaved sessions": (interleaved, ""),
    "requests to be joined": (requests, ""),
    "one JSON array": (runs, "]"),
    "one JSON object": (samples, "]}"),
}


def peak(path: Path, out: Path) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    trajectories, memory = done.stdout.split()
    return int(trajectories), int(memory)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    made, end = KINDS[kind]
    measured = []
    for size in (SMALL, LARGE):
        path = tmp_path / f"{size}.log.gz"
        written = n = 0
        with gzip.open(path, "wt", compresslevel=1) as stream:
            while written < size:
                written += stream.write(made(n))
                n += 1
            stream.write(end)
        measured.append(peak(path, tmp_path / "t.jsonl.gz"))
    (few, small), (many, large) = measured
    assert many >= few
    assert large - small < CACHES
    assert large < 150_000_000
