"""`heddle serve` and other routers on one machine, in turn, over engines that answer at once.

    python benchmarks/bench_gateway.py [--peer-venv DIR]... [--rounds 3] [--markdown FILE]

DIR is a virtual environment with `vllm-router`, `sglang-router` or `litellm[proxy]`; a peer that is
in none of them is left out, and said to be. Each router runs alone on one core (--router-core). The
load and two mock engines share another (--load-core), so that wall figures need two idle cores; the
CPU time of the router's processes for each request is the steadier figure.

In each round every router is started anew, and takes: chat bodies of 2 KiB from 64 clients; bodies
of 16,384 token ids from 64 clients; both at 200 requests a second, beside the same at a mock engine
itself; 6,400 requests at once, to engines that hold them; and 4,096 open streams, each with an
event of 8 tokens every 0.4 s. Requests are steps of sessions with eight steps, whose prompts grow.

`heddle serve` asks an engine twice for a chat step (its render, and the chat), once for a step of
token ids. "The same calls alone" makes them with its HTTP code, and nothing else: what can be
reached with both. Other routers pass the body on. They take ids as OpenAI's completions or SGLang's
/generate, and streams as chat.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gateway.load import (
    Address,
    Latencies,
    LoadError,
    burst,
    call,
    closed_loop,
    open_loop,
    open_streams,
)
from gateway.processes import Process, StartError, free_port, mock_engines
from gateway.routers import VERSIONS, Router, bare, direct, find_peers, heddle

from heddle_compiled import installed_version

ENGINES, CONCURRENCY, PER_S = 2, 64, 200.0
BURST, STREAMS = 6_400, 4_096
EVENT_S = 0.4
LIMIT_S = 15.0
"""Until all of a burst or of the streams must be there."""
POLICIES = ("verl", "heddle")
SEED = 16
Figures = dict[str, float]

COLUMNS: dict[str, tuple[str, int]] = {
    "chat_per_s": ("chat requests/s", 0),
    "chat_per_cpu_s": ("per CPU s", 0),
    "ids_per_s": ("16,384 ids requests/s", 0),
    "ids_per_cpu_s": ("per CPU s", 0),
    "chat_p50_ms": ("chat added p50, ms", 2),
    "chat_p99_ms": ("p99, ms", 1),
    "ids_p50_ms": ("ids added p50, ms", 2),
    "ids_p99_ms": ("p99, ms", 1),
    "admitted": ("of 6,400 taken in", 0),
    "admitted_s": ("in s", 1),
    "refused": ("refused", 0),
    "answered_s": ("answered in s", 1),
    "streams": ("of 4,096 streams open", 0),
    "stream_core": ("share of a core", 2),
    "stream_events": ("of events delivered", 2),
    "peak_mb": ("peak memory, MB", 0),
}
SPLIT = ("chat_per_s", "chat_p50_ms", "admitted", "peak_mb")
"""Columns at which a table begins, and after the last one ends."""


# -- measuring -------------------------------------------------------------------------------------


class Measured:
    """One router in one round."""

    def __init__(self, router: Router, engines: Sequence[int], seconds: float) -> None:
        self.router, self.engines, self.seconds = router, engines, seconds
        self.process: Process | None = None
        self.port = 0
        self.figures: Figures = {}
        self.faults: list[str] = []

    @contextmanager
    def started(self, core: int, folder: Path) -> Iterator[None]:
        """Run the router; the mock engine alone runs already."""
        self.port = self.engines[0]
        if not self.router.version:
            yield
            return
        self.port = free_port()
        command = self.router.command(self.port, self.engines, folder)
        log = folder / f"router-{self.port}.log"
        environment = self.router.environment
        self.process = Process(command, core=core, log=log, environment=environment)
        try:
            self.process.wait_until_answers(f"http://127.0.0.1:{self.port}{self.router.health}")
            yield
        finally:
            self.process.end()

    async def all(self) -> None:
        """Measure everything; what a router cannot do is a fault, and its figures are not there."""
        chat, ids = self.router.chat(self.port), self.router.ids(self.port)
        parts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("chat", partial(self.closed, "chat", chat)),
            ("ids", partial(self.closed, "ids", ids)),
            ("chat at 200/s", partial(self.open, "chat", chat)),
            ("ids at 200/s", partial(self.open, "ids", ids)),
            ("all at once", self.burst),
            ("streams", self.streams),
        ]
        for name, part in parts:
            try:
                await part()
            except (LoadError, OSError, TimeoutError) as error:
                self.faults.append(f"{name}: {type(error).__name__} {error}".strip())
        if self.process is not None:
            self.figures["peak_mb"] = self.process.peak_mb()

    def _cpu_s(self) -> float:
        return self.process.cpu_s() if self.process is not None else 0.0

    async def closed(self, name: str, to: Address) -> None:
        """Requests per second, and per CPU second."""
        await closed_loop(to, concurrency=CONCURRENCY, for_s=0.3 * self.seconds)
        before_s = self._cpu_s()
        found: Latencies = await closed_loop(to, concurrency=CONCURRENCY, for_s=self.seconds)
        self.figures[f"{name}_per_s"] = found.per_s
        if used_s := self._cpu_s() - before_s:
            self.figures[f"{name}_per_cpu_s"] = len(found.seconds) / used_s

    async def open(self, name: str, to: Address) -> None:
        """Latency at 200 requests a second."""
        found = await open_loop(to, per_s=PER_S, for_s=2 * self.seconds, seed=SEED)
        self.figures[f"{name}_p50_ms"] = 1e3 * found.at(0.5)
        self.figures[f"{name}_p99_ms"] = 1e3 * found.at(0.99)

    async def _engines(self, order: str) -> list[bytes]:
        answers = [await call(port, "POST", f"/mock/{order}") for port in self.engines]
        return [body for _, body in answers]

    async def _taken_in(self) -> int:
        """Requests that the router has taken in: by its own count, or that engines hold."""
        if self.router.load:
            _, body = await call(self.port, "GET", self.router.load)
            return int(json.loads(body)["server_load"])
        return sum(map(int, await self._engines("held")))

    async def burst(self) -> None:
        """Send 6,400 requests at once, when nothing of before is left."""
        until_s = time.monotonic() + LIMIT_S
        while await self._taken_in():
            if time.monotonic() > until_s:
                raise LoadError("steps of before are still under way")
            await asyncio.sleep(0.1)
        await self._engines("hold")
        try:
            found = await burst(
                self.router.chat(self.port),
                requests=BURST,
                count_admitted=self._taken_in,
                release=lambda: self._engines("now"),
                limit_s=LIMIT_S,
            )
        finally:
            await self._engines("now")
        self.figures["admitted"], self.figures["admitted_s"] = found.admitted, found.admitted_s
        self.figures["refused"], self.figures["answered_s"] = found.refused, found.answered_s

    async def streams(self) -> None:
        """Keep 4,096 streams open."""
        await self._engines(f"paced?interval_s={EVENT_S}&events=1000")
        used: list[float] = []
        try:
            found = await open_streams(
                self.router.streams(self.port),
                streams=STREAMS,
                watch_s=self.seconds,
                on_watch=lambda: used.append(self._cpu_s()),
                limit_s=LIMIT_S,
            )
            used.append(self._cpu_s())
        finally:
            await self._engines("now")
        self.figures["streams"] = found.open
        self.figures["stream_core"] = (used[1] - used[0]) / found.watched_s
        self.figures["stream_events"] = found.events_per_s / (STREAMS / EVENT_S)
        await asyncio.sleep(EVENT_S)


def added(figures: Figures, alone: Figures) -> Figures:
    """Return figures with latencies as what they are above those of the mock engine."""
    return {
        name: value - alone.get(name, 0.0) if name.endswith("_ms") else value
        for name, value in figures.items()
    }


# -- reporting -------------------------------------------------------------------------------------


def shown(values: Sequence[float], digits: int) -> str:
    """A median, and the least and largest."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def tables(found: dict[str, list[Figures]]) -> Iterator[str]:
    """Markdown tables, a row for each router."""
    names = list(COLUMNS)
    starts = [names.index(name) for name in SPLIT]
    for start, end in zip(starts, [*starts[1:-1], len(names)], strict=False):
        part = names[start:end]
        yield "| router | " + " | ".join(COLUMNS[name][0] for name in part) + " |"
        yield "|---|" + "---|" * len(part)
        for router, rounds in found.items():
            cells = (
                shown([each[name] for each in rounds if name in each], COLUMNS[name][1])
                for name in part
            )
            yield f"| {router} | " + " | ".join(cells) + " |"
        yield ""


def label(router: Router) -> str:
    """Name and version."""
    return f"{router.name} ({router.version})" if router.version else router.name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-venv", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each part [1.5]")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--router-core", type=int, default=cores[0], help="[first]")
    parser.add_argument("--load-core", type=int, default=cores[-1], help="[last]")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of heddle serve")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if not 0.1 <= args.seconds <= 60:
        parser.error("--seconds must be from 0.1 to 60")
    for name in ("router_core", "load_core"):
        if getattr(args, name) not in cores:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {getattr(args, name)}: choose one of {cores}")
    for folder in args.peer_venv:
        if not (folder / "bin" / "python").exists():
            parser.error(f"--peer-venv {folder}: it has no bin/python")
    return args


def main() -> None:
    """Take the rounds, and print them and their tables."""
    args = _arguments()
    if importlib.util.find_spec("httptools") is None:
        print("heddle serve needs httptools: pip install 'heddle-rl[serve]'. Skipped.")
        return
    peers, missing = find_peers([folder.absolute() for folder in args.peer_venv])
    mine = [heddle(policy, installed_version()) for policy in args.policies.split(",")]
    routers = [direct(), bare(), *mine, *peers]
    for name in missing:
        print(f"{name} is in no --peer-venv: left out (pip install {name}=={VERSIONS[name]})")
    os.sched_setaffinity(0, {args.load_core})
    found: dict[str, list[Figures]] = defaultdict(list)
    loop = "asyncio" if importlib.util.find_spec("uvloop") is None else "uvloop"
    about = (
        f"{platform.machine()}, {os.cpu_count()} cores, one of them for the router; Python "
        f"{platform.python_version()}, {loop}; {args.rounds} rounds in turn, {args.seconds:g} s a "
        f"part, seed {SEED}; median (least to most)"
    )
    print(about, flush=True)
    began_s = time.monotonic()
    for number in range(1, args.rounds + 1):
        alone: Figures = {}
        for router in routers:
            figures = _one(router, args)
            alone = alone or figures
            found[label(router)].append(added(figures, alone) if router.version else figures)
            said = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"round {number}: {label(router)}: {said}", flush=True)
    lines = [*tables(found)]
    took = f"{time.monotonic() - began_s:.0f} s in all"
    print(f"\n{took}\n", *lines, sep="\n")
    if args.markdown:
        args.markdown.write_text("\n".join([f"{about}; {took}.", "", *lines]))


def _one(router: Router, args: argparse.Namespace) -> Figures:
    """Start engines and a router anew, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        with mock_engines(ENGINES, core=args.load_core, logs=logs) as ports:
            measured = Measured(router, ports, args.seconds)
            try:
                with measured.started(args.router_core, logs):
                    _run(measured.all())
            except StartError as error:
                sys.exit(f"{label(router)}: {error}")
            for fault in measured.faults:
                print(f"{label(router)}: {fault}"[:500], flush=True)
    return measured.figures


def _run(work: Awaitable[None]) -> None:
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
