"""`heddle serve` under load for long: whether its memory stays what it is after the first tenth.

    PYTHONPATH=.:benchmarks python -m gateway.soak [--requests 1000000] [--policy heddle]

64 clients send token ids, sessions of eight steps, which end; two mock engines answer at once. Each
tenth prints the gateway's resident memory, when no answer is kept any more: how many are kept goes
with the rate of requests, and that with what else the machine does. The status is 1 if the last is
more than 5 % above the first.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gateway.load import STEPS, Address, closed_loop_of, connect
from gateway.processes import Process, free_port, mock_engines
from gateway.prompts import token_ids_body
from gateway.routers import GENERATE, heddle

CLIENTS, ENGINES, PROMPT_IDS, TENTHS = 64, 2, 64, 10
MOST_GROWTH = 0.05
KEPT_S = 0.25
"""For which answers are kept: few, since a heap does not give back all that its peak had."""


def resident_mb(process: Process) -> float:
    """Memory of a process and of those that it started, in MB."""
    kib = 0
    for pid in process.pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    kib += int(line.split()[1])
    return kib * 1024 / 1e6


async def _soaked(port: int, requests: int, sample: Callable[[int], None]) -> None:
    to = Address(port, GENERATE, partial(token_ids_body, tokens=PROMPT_IDS))
    connections = await asyncio.gather(*(connect(port) for _ in range(CLIENTS)))
    for tenth in range(1, TENTHS + 1):
        await closed_loop_of(to, connections, requests // TENTHS)
        await asyncio.sleep(3 * KEPT_S)
        sample(tenth)
    for each in connections:
        if each.transport is not None:
            each.transport.close()
    await asyncio.sleep(0.05)


def soak(
    requests: int, *, policy: str, core: int, load_core: int, on_line: Callable[[str], None]
) -> list[float]:
    """Return the memory after each tenth of the requests, in MB."""
    found: list[float] = []

    def sample(tenth: int) -> None:
        found.append(resident_mb(process))
        done = requests * tenth // TENTHS
        on_line(f"{done:>9,} requests, {done // STEPS:>7,} sessions: {found[-1]:7.1f} MB")

    with (
        tempfile.TemporaryDirectory() as folder,
        mock_engines(ENGINES, core=load_core, logs=Path(folder)) as engines,
    ):
        port = free_port()
        command = heddle(policy, "").command(port, engines, Path(folder))
        kept = ("--set", f"serve.keep_answer_s={KEPT_S}")
        log = Path(folder) / "gateway.log"
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = Process((*command, *kept), core=core, log=log, environment=environment)
        try:
            process.wait_until_answers(f"http://127.0.0.1:{port}/health")
            asyncio.run(_soaked(port, requests, sample))
        finally:
            process.end()
    return found


def growth(memory: Sequence[float]) -> float:
    """By what share the last is above the first."""
    return memory[-1] / memory[0] - 1.0


def main() -> int:
    """Return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=1_000_000)
    options.add_argument("--policy", default="heddle")
    options.add_argument("--router-core", type=int, default=0)
    options.add_argument("--load-core", type=int, default=1)
    given = options.parse_args()
    memory = soak(
        given.requests,
        policy=given.policy,
        core=given.router_core,
        load_core=given.load_core,
        on_line=partial(print, flush=True),
    )
    print(f"growth after the first tenth: {growth(memory):+.1%}, at most {MOST_GROWTH:.0%}")
    return int(growth(memory) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
