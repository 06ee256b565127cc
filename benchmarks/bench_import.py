"""Memory and speed of imports: `python benchmarks/bench_import.py [MEGABYTES [FORMAT...]]`.

Each file is made here, imported in a process of its own, and removed. The default is small, for
`make bench`; docs/importing.md has the figures for 2,000. Seconds are of processor time.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

MEASURE = """
import sys
from heddle_trace.importers import import_trace
report = import_trace(sys.argv[1:2], sys.argv[2])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(report.format, report.read, report.trajectories, report.steps, int(peak.split()[1]) // 1024)
"""

WORDS = "It was said that the river had two names, one for each bank, and none for the middle. "
TEXT = WORDS * 60


def mooncake(n: int) -> str:
    """One request, which continues none."""
    blocks = 4 + n % 40
    row = {"timestamp": 3 * n, "input_length": 512 * blocks + 7, "output_length": 1 + n % 900}
    return json.dumps({**row, "hash_ids": [0, *range(50 * n, 50 * n + blocks)]}) + "\n"


def dynamo(n: int) -> str:
    """Twenty thousand sessions at once."""
    began_ms = 1_777_312_800_000 + 10 * n
    request = {
        "request_id": f"r{n}",
        "input_tokens": 50 + 100 * (n // 20_000),
        "output_tokens": 20,
        "request_received_ms": began_ms,
        "total_time_ms": 100,
        "finish_reason_metadata": {"finish_reason": "tool_calls", "tool_calls": [{"name": "grep"}]},
    }
    row = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": began_ms + 100,
        "agent_context": {"session_id": f"s{n % 20_000}"},
        "request": request,
    }
    return json.dumps(row) + "\n"


def openai_chat(n: int) -> str:
    """One conversation of one to nine generations."""
    call = {"function": {"name": "run", "arguments": "{}"}}
    messages: list[dict[str, object]] = [{"role": "user", "content": TEXT}]
    for _ in range(n % 9):
        messages.append({"role": "assistant", "content": TEXT[:300], "tool_calls": [call]})
        messages.append({"role": "tool", "content": TEXT[:3_000]})
    messages.append({"role": "assistant", "content": TEXT[:200]})
    return json.dumps({"id": f"c{n}", "messages": messages}) + "\n"


def claude_code(n: int) -> str:
    """A thousand sessions at once."""
    session, minute, at = f"S{n // 60_000}-{n % 1_000}", n // 1_000 % 60, n % 1_000 / 50
    stamp = f"2026-02-04T22:{minute:02d}:{at:06.3f}Z"
    usage = {"input_tokens": 3, "cache_read_input_tokens": 900 * minute, "output_tokens": 40}
    call = {"type": "tool_use", "id": f"t{n}", "name": "Read", "input": {"path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": f"t{n}", "content": TEXT[:2_000]}
    said = {"id": f"m{n}", "role": "assistant", "usage": usage, "stop_reason": "tool_use"}
    line = {"sessionId": session, "timestamp": stamp, "cwd": "/repo"}
    answer = {"role": "user", "content": [result]}
    return (
        json.dumps(
            {**line, "type": "assistant", "uuid": f"a{n}", "message": {**said, "content": [call]}}
        )
        + "\n"
        + json.dumps({**line, "type": "user", "uuid": f"u{n}", "message": answer})
        + "\n"
    )


def openai_chat_array(n: int) -> str:
    """One conversation of one JSON array."""
    messages = [
        {"role": "system", "content": TEXT},
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": WORDS},
        {"role": "user", "content": TEXT},
    ]
    run = {"id": f"c{n}", "task_id": f"{n}", "reward": 1.0, "messages": messages}
    return ("[" if n == 0 else ",\n") + json.dumps(run)


KINDS: Mapping[str, tuple[Callable[[int], str], str]] = {
    "mooncake": (mooncake, ""),
    "dynamo": (dynamo, ""),
    "openai-chat": (openai_chat, ""),
    "claude-code": (claude_code, ""),
    "openai-chat in an array": (openai_chat_array, "]"),
}


def processor_s() -> float:
    """Processor time of the processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a table row for each kind of file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("megabytes", type=int, nargs="?", default=40)
    parser.add_argument("formats", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    args = parser.parse_args()
    if args.megabytes < 1:
        parser.error("MEGABYTES must be 1 or more")
    if unknown := set(args.formats) - set(KINDS):
        parser.error(f"no such format: {', '.join(sorted(unknown))}")
    megabytes, chosen = args.megabytes, args.formats
    print("| format | file MB | records | trajectories | steps | s | MB a second | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for made, end in (KINDS[name] for name in chosen):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log"
            written = n = 0
            with path.open("w") as stream:
                while written < megabytes * 10**6:
                    written += stream.write(made(n))
                    n += 1
                stream.write(end)
            before_s = processor_s()
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, str(path), str(Path(folder) / "t.jsonl.gz")],
                capture_output=True,
                text=True,
                check=True,
            )
            took_s = processor_s() - before_s
        name, read, trajectories, steps, peak = done.stdout.split()
        counts = f"{int(read):,} | {int(trajectories):,} | {int(steps):,}"
        speed = f"{took_s:.1f} | {megabytes / took_s:.1f}"
        print(f"| `{name}` | {megabytes:,} | {counts} | {speed} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
