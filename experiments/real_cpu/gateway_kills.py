"""Random kill -9 of engines, and restarts of the gateway, while clients send steps.

    python -m experiments.real_cpu.gateway_kills [--kills 100] [--restarts 6] [--seed 16]

`heddle serve` runs over three engine processes without a model, whose tokens are a function of
their context. 24 clients send one trajectory after another: six steps of token ids each, with
pauses in between. At random moments an engine is killed and started again; now and then the
gateway is too, by SIGTERM and by SIGKILL in turn. A client whose step is not answered sends the
same again. Then all is checked:

- every step of every trajectory was answered, with exactly the tokens of its context;
- in every journal the tokens of each step (finished, preempted, salvaged from a dead engine) are
  as many as its client got: none lost, none twice. A gateway that is killed leaves a journal that
  ends up to seconds earlier; what it has must agree;
- every journal replays, that of a killed gateway as far as it goes.

The page that it writes also has what engines sent twice: after a restart of the gateway, which does
not have the step any more, and tokens that were on their way when an engine died.
"""

import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

import aiohttp
import click

from experiments.real_cpu.gateway_clients import (
    Client,
    GatewayProcess,
    LostStepError,
    kill,
)
from experiments.real_cpu.token_engine import next_token
from heddle.runs import Run, load_run
from heddle.runs.replay import replay
from heddle_core.events import EngineFailed, StepFinished, StepPreempted

ENGINES, CLIENTS, STEPS = 3, 24, 6
PROMPT_TOKENS, TOKENS = (40, 400), (30, 150)
TOOL_TOKENS, TOOL_S = (5, 50), (0.0, 0.15)
BETWEEN_STEPS = 20
"""Most steps that are answered between two kills: half of it on average."""
START_ATTEMPTS = 5
UP_S = 30.0
DOWN_S = 0.3
"""Until a killed engine is started again."""


@dataclass(slots=True)
class Answered:
    """What clients got."""

    tokens: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of the steps of each trajectory, by run and trajectory, in their order."""
    steps: int = 0
    trajectories: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Engines:
    """Engine processes, each on its port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = [_free_port() for _ in range(ENGINES)]
        self.records = [folder / f"sent-{port}.txt" for port in self.ports]
        self._running = [self._start(number) for number in range(ENGINES)]
        self.kills = 0

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        program = "experiments.real_cpu.token_engine"
        command = (sys.executable, "-m", program, str(self.ports[number]))
        with (self._folder / "engines.log").open("ab") as log:
            return subprocess.Popen((*command, str(self.records[number])), stderr=log)

    def wait_until_up(self) -> None:
        """Wait until every engine answers."""
        for port in self.ports:
            until_s = time.monotonic() + UP_S
            while time.monotonic() < until_s:
                with (
                    suppress(urllib.error.URLError, OSError),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
                ):
                    break
                time.sleep(0.05)

    async def kill_one(self, number: int) -> None:
        """Kill -9, and start it again after `DOWN_S`."""
        engine = self._running[number]
        kill([engine.pid])
        engine.wait()
        self.kills += 1
        await asyncio.sleep(DOWN_S)
        self._running[number] = self._start(number)

    def close(self) -> None:
        for engine in self._running:
            engine.kill()
            engine.wait()


class Trial:
    """One gateway after another on one port, and what clients saw of them."""

    def __init__(self, folder: Path, engines: Engines, policy: str, seed: int) -> None:
        self.folder, self.engines, self.policy = folder, engines, policy
        self.draw = random.Random(seed)
        self.answered = Answered()
        self.runs: list[Path] = []
        self.killed: set[Path] = set()
        """Runs whose gateway was ended by SIGKILL."""
        self.ends: Counter[str] = Counter()
        self.gateway = self._serve(0)
        self.over = False

    def _serve(self, port: int) -> GatewayProcess:
        """Start a gateway; it refuses to start while an engine does not answer."""
        urls = [w for p in self.engines.ports for w in ("--worker", f"http://127.0.0.1:{p}")]
        # Engines die far more often here than those that are to be given up.
        often = ("--set", "cluster.restarts=1000")
        options = ("--policy", self.policy, *urls, *often, "--out", self.folder / "runs")
        for left in reversed(range(START_ATTEMPTS)):
            self.engines.wait_until_up()
            try:
                found = GatewayProcess(*options, port=port, log=self.folder / "gateway.log")
            except RuntimeError:
                if not left:
                    raise
            else:
                break
        self.runs.append(found.run)
        return found

    def gateway_down(self) -> None:
        """End the gateway, if it still runs."""
        if self.gateway.process.poll() is None:
            self.gateway.end(signal.SIGKILL)

    async def restart_gateway(self, number: int) -> None:
        """End the gateway and start another on its port."""
        if number == signal.SIGKILL:
            self.killed.add(self.gateway.run)
        await asyncio.to_thread(self.gateway.end, number)
        self.ends[signal.Signals(number).name] += 1
        self.gateway = await asyncio.to_thread(self._serve, self.gateway.port)

    async def client(self, number: int, client: Client) -> None:
        """Send one trajectory after another until the trial is over."""
        draw, count = random.Random(f"{number} {self.draw.random()}"), 0
        while not self.over:
            count += 1
            first = 1 + number * 10_000 + count
            try:
                await self._trajectory(client, draw, first)
            except LostStepError as error:
                self.answered.lost.append(str(error))
            self.answered.trajectories += 1

    async def _trajectory(self, client: Client, draw: random.Random, first: int) -> None:
        session = f"t{first}"
        context = array("I", [first, *range(1, draw.randint(*PROMPT_TOKENS))])
        for _ in range(STEPS):
            tokens = draw.randint(*TOKENS)
            ids, trajectory = await client.step(session, context, tokens)
            if ids != [next_token(first, len(context) + n) for n in range(tokens)]:
                self.answered.wrong.append(f"{session}: step of {len(context)} tokens")
            self.answered.tokens[str(self.gateway.run), trajectory].append(len(ids))
            self.answered.steps += 1
            tool = range(1, draw.randint(*TOOL_TOKENS))
            context += array("I", ids) + array("I", tool)
            await asyncio.sleep(draw.uniform(*TOOL_S))
        with suppress(aiohttp.ClientError):  # a gateway that has ended has no session to end
            async with client.http.post(f"{client.url}/finish_session?session_id={session}"):
                pass

    async def run(self, kills: int, restarts: int) -> Counter[str]:
        """Kill and restart while clients work; return how attempts of clients ended."""
        limits = aiohttp.ClientTimeout(total=60)
        at = set(self.draw.sample(range(kills), restarts))
        async with aiohttp.ClientSession(timeout=limits) as http:
            client = Client(http, self.gateway.url)
            work = [asyncio.create_task(self.client(n, client)) for n in range(CLIENTS)]
            busy: dict[int, asyncio.Task[None]] = {}
            for number in range(kills):
                until = self.answered.steps + self.draw.randint(1, BETWEEN_STEPS)
                while self.answered.steps < until:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self.draw.uniform(0.0, 0.1))
                engine = self.draw.randrange(ENGINES)
                if engine in busy:
                    await busy[engine]
                busy[engine] = asyncio.create_task(self.engines.kill_one(engine))
                if number in at:
                    await asyncio.gather(*busy.values())
                    order = signal.SIGKILL if self.ends.total() % 2 else signal.SIGTERM
                    await self.restart_gateway(order)
                print(f"\r{number + 1}/{kills} kills", end="", file=sys.stderr, flush=True)
            await asyncio.gather(*busy.values())
            self.over = True
            await asyncio.gather(*work)
        print(file=sys.stderr)
        await asyncio.to_thread(self.gateway.end)
        return client.attempts


@dataclass(slots=True)
class Journals:
    """What the journals of a trial say."""

    events: int = 0
    engine_failures: int = 0
    salvaged: int = 0
    """Tokens of steps that were running on engines that died."""
    undelivered: int = 0
    """Steps that were finished and whose gateway was ended before its client had the answer."""
    unwritten: int = 0
    """Steps that clients had, and that a gateway had not written when it was killed."""
    wrong: list[str] = field(default_factory=list)


def step_tokens(run: Run, found: Journals) -> dict[str, list[int]]:
    """Return the tokens of each finished step of each trajectory, by all events that bring any."""
    steps: dict[str, list[int]] = defaultdict(list)
    open_: Counter[str] = Counter()
    for entry in run.entries():
        found.events += 1
        match entry.event:
            case StepPreempted() as event:
                open_[event.trajectory] += event.output_tokens
            case EngineFailed() as event:
                found.engine_failures += 1
                for trajectory, tokens in event.salvaged:
                    open_[trajectory] += tokens
                    found.salvaged += tokens
            case StepFinished() as event:
                made = open_.pop(event.trajectory, 0) + event.output_tokens
                steps[event.trajectory].append(made)
    return steps


def check_journals(
    runs: Sequence[Path], answered: Answered, killed: Collection[Path] = ()
) -> Journals:
    """Compare every journal with what clients got, and replay it.

    The journals of `killed` runs may end earlier than their clients' answers.
    """
    found = Journals()
    for path in runs:
        run = load_run(path, unfinished=True)
        steps = step_tokens(run, found)
        mine = {t: n for (of, t), n in answered.tokens.items() if of == str(path)}
        for trajectory in steps.keys() | mine.keys():
            made, got = steps.get(trajectory, []), mine.get(trajectory, [])
            least = min(len(made), len(got))
            found.undelivered += len(made) - least
            if path in killed:  # its journal ends where it was written last
                found.unwritten += len(got) - least
                got = got[:least]
            if made[: len(got)] != got or len(made) - len(got) not in (0, 1):
                found.wrong.append(f"{path.name} {trajectory}: made {made}, clients got {got}")
        divergence = replay(run).divergence
        if divergence is not None:
            found.wrong.append(f"{path.name} does not replay: {divergence}")
    return found


def sent_twice(records: list[Path]) -> tuple[int, int]:
    """Return how many tokens engines sent, and how many of them another time."""
    times: Counter[tuple[int, int]] = Counter()
    for path in records:
        for line in path.read_text().splitlines():
            first, start, count = map(int, line.split())
            times.update((first, start + n) for n in range(count))
    return times.total(), times.total() - len(times)


def table(trial: Trial, attempts: Counter[str], found: Journals) -> list[str]:
    sent, again = sent_twice(trial.engines.records)
    ends = ", ".join(f"{count} by {name}" for name, count in sorted(trial.ends.items()))
    rows = {
        "kill -9 of engines": trial.engines.kills,
        "restarts of the gateway": ends or 0,
        "trajectories": trial.answered.trajectories,
        "of these lost": len(trial.answered.lost),
        "steps answered": trial.answered.steps,
        "of these with other tokens than undisturbed": len(trial.answered.wrong),
        "attempts of clients": ", ".join(f"{n:,} {how}" for how, n in sorted(attempts.items())),
        "tokens that clients got": sum(map(sum, trial.answered.tokens.values())),
        "deaths of engines in the journals": found.engine_failures,
        "tokens kept from steps on engines that died": found.salvaged,
        "steps with fewer or more tokens in a journal than clients got": len(found.wrong),
        "steps finished while the gateway was ended, and generated again": found.undelivered,
        "steps answered, and not yet written by a gateway that was killed": found.unwritten,
        "tokens that engines sent": sent,
        "of these sent twice": again,
    }
    return two_columns(rows)


def two_columns(rows: Mapping[str, int | str]) -> list[str]:
    """A table of names and figures in Markdown."""
    cells = ((name, f"{v:,}" if isinstance(v, int) else v) for name, v in rows.items())
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]


def _free_port() -> int:
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@click.command()
@click.option("--kills", type=click.IntRange(1), default=100, show_default=True)
@click.option("--restarts", type=click.IntRange(0), default=6, show_default=True)
@click.option("--policy", default="heddle", show_default=True)
@click.option("--seed", type=int, default=16, show_default=True)
@click.option("--markdown", type=click.Path(path_type=Path), help="File for the table")
def main(kills: int, restarts: int, policy: str, seed: int, markdown: Path | None) -> None:
    """Kill, restart, check; exit status 1 if anything is lost or wrong."""
    if restarts > kills:
        raise click.UsageError(f"--restarts {restarts}: give --kills {kills} at most")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as rest:
        engines = Engines(Path(folder))
        rest.callback(engines.close)
        trial = Trial(Path(folder), engines, policy, seed)
        rest.callback(trial.gateway_down)
        attempts = asyncio.run(trial.run(kills, restarts))
        found = check_journals(trial.runs, trial.answered, trial.killed)
        lines = [f"Policy {policy}, seed {seed}.", "", *table(trial, attempts, found)]
    print(*lines, sep="\n")
    if markdown is not None:
        markdown.write_text("\n".join([*lines, ""]))
    wrong = [*trial.answered.lost, *trial.answered.wrong, *found.wrong]
    if wrong:
        sys.exit("\n".join(["", *wrong[:20]]))


if __name__ == "__main__":
    main()
