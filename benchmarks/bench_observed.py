"""Readers of measured steps: damaged inputs by the hundred thousand, and one log of a gigabyte.

Usage: python -m benchmarks.bench_observed damage [COUNT] [SEED]
       python -m benchmarks.bench_observed large (observed|rl-insight|prime-rl) MEGABYTES FOLDER

`damage` changes the samples of `tests/trace/observed_logs` as the campaign `fuzz` does, and reads
each in this process: all that may come of it is measured steps, or a TraceError. `large` writes a
log, reads it, and removes it.
"""

import argparse
import json
import resource
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from campaigns.fuzz.edits import any_edit, edited
from heddle.cli.errors import exit_with_user_errors
from heddle.diagnosis.verdict import diagnosed
from heddle_trace.errors import TraceError
from heddle_trace.observed.reading import read_observed

LOGS: Final = Path(__file__).resolve().parents[1] / "tests" / "trace" / "observed_logs"
SLOW_S: Final = 2.0
LAST: Final = Path(tempfile.gettempdir())
"""Folder for the inputs of faults."""
HEADER: Final = (
    '{"type":"observed","schema":"heddle.observed/1","source":"large","clock":"shared"}\n'
)
OTHERS: Final = (
    '{"type":"phase","phase":"training","start_s":700.0,"end_s":750.0,"rl_step":1}\n'
    '{"type":"phase","phase":"step","start_s":0.0,"end_s":760.0,"rl_step":1}\n'
    '{"type":"engine","engine":"e0","time_s":1.0,"running":3,"waiting":1,"queue_s":2.5}\n'
    '{"type":"engine","engine":"e0","time_s":90.0,"running":0,"waiting":0,"queue_s":0.5}\n'
)
Row: TypeAlias = dict[str, Any]
ROUND: Final = 32
"""Turns of a trajectory of a large log."""


def peak_mib() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def damage(count: int, seed: int) -> None:
    """Read damaged samples, and print what came of them."""
    rng, outcomes, faults = Random(seed), Counter[str](), Counter[str]()
    samples = [(path.name, path.read_bytes()) for path in sorted(LOGS.iterdir())]
    samples.append(("own.jsonl", f"{HEADER}{_rows(_observed)(0, Random(0))}{OTHERS}".encode()))
    begun_s, slowest_s = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            name, data = rng.choice(samples)
            changed: bytes | None = data
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                changed = edited(changed or b"", any_edit(rng, name, len(changed or b"")))
            path = Path(folder) / name
            path.write_bytes(changed or b"")
            at_s = time.monotonic()
            try:
                read = read_observed([path], skip_bad=rng.random() < 0.5)
                json.dumps(diagnosed(read.steps, read.format).plain([], ""), allow_nan=False)
                outcomes["read"] += 1
            except TraceError:
                outcomes["refused"] += 1
            except Exception as error:
                outcomes["failed"] += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                faults[f"{type(error).__name__} {frame.filename}:{frame.lineno} {name}"] += 1
                (LAST / f"{len(faults)}-{name}").write_bytes(changed or b"")
            took_s = time.monotonic() - at_s
            slowest_s = max(slowest_s, took_s)
            outcomes["slow"] += took_s > SLOW_S
            path.unlink(missing_ok=True)
    print(f"{count:,} inputs in {time.monotonic() - begun_s:.0f} s: {dict(outcomes)}")
    print(f"slowest {slowest_s:.2f} s, peak {peak_mib():,} MiB, faults {dict(faults)}")


def large(kind: str, megabytes: int, folder: Path) -> None:
    """Write a log, read it, and print seconds and peak memory."""
    path = folder / f"large-{kind}.jsonl"
    rng, number = Random(1), 0
    try:
        with path.open("w") as stream:
            if kind == "observed":
                stream.write(HEADER)
            while stream.tell() < megabytes << 20:
                stream.write(LARGE[kind](number, rng))
                number += 1
        begun_s, cpu_s = time.monotonic(), time.process_time()
        read = read_observed([path])
        took_s = time.monotonic() - begun_s
        found = diagnosed(read.steps, read.format)
        print(
            f"{kind}: {path.stat().st_size / 1e6:,.0f} MB, {read.steps.count:,} requests of "
            f"{number:,} trajectories: read in {took_s:.1f} s, diagnosed in "
            f"{time.monotonic() - begun_s - took_s:.1f} s, of which CPU "
            f"{time.process_time() - cpu_s:.1f} s; peak {peak_mib():,} MiB; "
            f"{found.total_s:.0f} s measured"
        )
    finally:
        path.unlink(missing_ok=True)


def _turns(rng: Random) -> list[tuple[float, float, int, int]]:
    """Start and end, and input and output tokens, of each."""
    at_s, given, found = rng.uniform(0.0, 600.0), 1000, []
    for _ in range(ROUND):
        took_s, made = rng.uniform(0.5, 6.0), rng.randrange(20, 400)
        found.append((at_s, at_s + took_s, given, made))
        at_s, given = at_s + took_s + rng.uniform(0.1, 3.0), given + made + 200
    return found


def _rows(kind: Callable[..., Row]) -> Callable[[int, Random], str]:
    """A writer of the rows of a trajectory, a turn each."""

    def lines(number: int, rng: Random) -> str:
        rows = (kind(number, step, *turn) for step, turn in enumerate(_turns(rng)))
        return "".join(json.dumps(row) + "\n" for row in rows)

    return lines


def _observed(number: int, step: int, start_s: float, end_s: float, given: int, made: int) -> Row:
    return {
        "type": "request",
        "trajectory_id": f"trajectory-{number}",
        "group_id": f"group-{number // 8}",
        "step": step,
        "start_s": start_s,
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": end_s - start_s - 0.3,
        "tool": "bash",
        "tool_s": 0.1,
        "engine": f"e{number % 16}",
        "input_tokens": given,
        "output_tokens": made,
    }


def _rl_insight(number: int, step: int, start_s: float, end_s: float, given: int, made: int) -> Row:
    return {
        "name": "gateway_generation",
        "start_time_ns": round((1.76e9 + start_s) * 1e9),
        "end_time_ns": round((1.76e9 + end_s) * 1e9),
        "attributes": {
            "project": "p",
            "experiment_name": "e",
            "state_lane_id": f"experiment=e/sample={number}/session=0/traj=0",
            "uid": f"task-{number // 8}",
            "global_steps": 1,
            "monitor.trace_source": "gateway",
            "turn": step,
            "tools": '["search"]',
            "prompt_tokens": given,
            "completion_tokens": made,
        },
    }


def _prime_rl(number: int, rng: Random) -> str:
    calls = [
        {
            "time": {"start": 1.76e9 + start_s, "end": 1.76e9 + end_s},
            "usage": {"prompt_tokens": given, "completion_tokens": made},
        }
        for start_s, end_s, given, made in _turns(rng)
    ]
    nodes = [{"message": {"role": "tool", "content": "x" * 400}, "token_ids": [7] * 100}] * ROUND
    timing = {"start": calls[0]["time"]["start"]}
    return json.dumps({"id": f"t{number}", "nodes": nodes, "calls": calls, "timing": timing}) + "\n"


LARGE: Final = {
    "observed": _rows(_observed),
    "rl-insight": _rows(_rl_insight),
    "prime-rl": _prime_rl,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    damaged = commands.add_parser("damage")
    damaged.add_argument("count", type=int, nargs="?", default=100_000)
    damaged.add_argument("seed", type=int, nargs="?", default=1)
    log = commands.add_parser("large")
    log.add_argument("kind", choices=LARGE)
    log.add_argument("megabytes", type=int)
    log.add_argument("folder", type=Path)
    args = parser.parse_args()
    with exit_with_user_errors():
        if args.command == "damage":
            damage(args.count, args.seed)
        else:
            large(args.kind, args.megabytes, args.folder)
