"""Agents of a recorded trace on two real vLLM engines on CPU: routed by policies, and direct.

    python benchmarks/bench_real_routing.py [--rounds 3] [--copies 2] [--markdown FILE]

The trace is the recording in traces/cpu-agents: lengths of prompts and answers and times of tools
of mini-swe-agent. Each trajectory is an agent (`--copies` of each) that sends token ids, and waits
as long as its tools took. All begin together. The engines are two `vllm serve` with a tiny model,
which run through all rounds; prompts of each run are others, so that no cache helps the next.

Through the gateway go `heddle`, each step to the engine with the fewest (`slime`), each in turn
(`round robin`), and those that stay where they began (`sticky_least_loaded`). Direct, agents call
the engines themselves, each step in turn, or each agent always the same. Policies are in turn in
each round. The makespan is from the first request to the last answer; beside the geometric mean
stands the 95 % interval of Student's t over rounds of its ratio to the makespan of `heddle`.
"""

import argparse
import asyncio
import itertools
import math
import os
import statistics
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments.real_cpu.gateway_agents import makespan_s
from experiments.real_cpu.gateway_clients import Client, GatewayProcess
from experiments.real_cpu.run import heddle
from heddle.comparison.estimates import t_quantile
from heddle_core.ids import EngineId
from heddle_core.parts.placement.load_and_pin import OneByOne
from heddle_core.policy import Placement, PolicyContext, TrajectoryView, View
from heddle_rollout.scripted_agent import TokenSource
from heddle_runtime.tiny_model import SIZES
from heddle_trace.complete import MissingRules, complete
from heddle_trace.files import read_trace
from heddle_trace.schema import Trace, TrajectoryScript
from tests.runtime.vllm_serve import two_servers

ENGINES = 2
OWN = Path(__file__).stem
VOCABULARY = SIZES["small"].vocabulary


class InTurn(OneByOne):
    """Placement: each step goes to the next engine."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the next engine."""
        return view.engines[next(self._next) % len(view.engines)].id


def in_turn(context: PolicyContext) -> Placement:
    """A part for the gateway: verl+bench_real_routing:in_turn."""
    return InTurn()


@dataclass(slots=True)
class Direct(Client):
    """Calls engines without a gateway."""

    choose: Callable[[str], str] = str

    async def post(self, path: str, body: object) -> object:
        """Engines know neither rollouts nor ends of sessions."""
        return {}

    async def step(
        self, session: str, prompt: "array[int]", tokens: int, **headers: str
    ) -> tuple[list[int], str]:
        """Return the output of a step."""
        sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
        body = {"token_ids": prompt.tolist(), "sampling_params": sampling}
        url = f"{self.choose(session)}/inference/v1/generate"
        async with self.http.post(url, json=body) as answer:
            answer.raise_for_status()
            return (await answer.json())["choices"][0]["token_ids"], session


async def measured_s(
    scripts: Sequence[TrajectoryScript],
    client_of: Callable[[aiohttp.ClientSession], Client],
    seed: int,
) -> float:
    """The makespan with a client of its own."""
    limits, connector = (
        aiohttp.ClientTimeout(total=None),
        aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0),
    )
    tokens = TokenSource(VOCABULARY, seed=seed)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as http:
        return await makespan_s(scripts, client_of(http), tokens)


class Bench:
    """The engines, the agents, and ways between them."""

    def __init__(self, urls: Sequence[str], scripts: Sequence[TrajectoryScript], folder: Path):
        self.urls, self.scripts, self.folder = urls, scripts, folder

    def through(self, policy: str, seed: int) -> float:
        """The makespan through a gateway."""
        workers = [word for url in self.urls for word in ("--worker", url)]
        options = ("--policy", policy, "--out", self.folder / "runs")
        gateway = GatewayProcess(*workers, *options, log=self.folder / "gateway.log")
        try:
            return asyncio.run(
                measured_s(self.scripts, lambda http: Client(http, gateway.url), seed)
            )
        finally:
            gateway.end()

    def direct(self, choose: Callable[[str], str], seed: int) -> float:
        """The makespan of agents that choose their engine themselves."""
        return asyncio.run(
            measured_s(self.scripts, lambda http: Direct(http, "", choose=choose), seed)
        )

    def ways(self) -> Mapping[str, Callable[[int], float]]:
        """Ways to measure, by name."""
        turn, names = itertools.cycle(self.urls), [each.id for each in self.scripts]
        own = {name: self.urls[n % len(self.urls)] for n, name in enumerate(names)}
        return {
            "`heddle`": lambda seed: self.through("heddle", seed),
            "least loaded, `slime`": lambda seed: self.through("slime", seed),
            "round robin": lambda seed: self.through(f"verl+{OWN}:in_turn", seed),
            "`sticky_least_loaded`": lambda seed: self.through("sticky_least_loaded", seed),
            "direct, steps in turn": lambda seed: self.direct(lambda _: next(turn), seed),
            "direct, agents in turn": lambda seed: self.direct(own.__getitem__, seed),
        }


def recorded(folder: Path, copies: int) -> Sequence[TrajectoryScript]:
    """The agents of the recording, each so often, all at once; calls by themselves are left out."""
    spans = Path(__file__).parents[1] / "traces/cpu-agents/spans.jsonl.gz"
    heddle("trace", "import", spans, "-o", folder / "agents.jsonl")
    read = read_trace(folder / "agents.jsonl").records
    records = tuple(
        msgspec.structs.replace(each, trajectory_id=f"{each.trajectory_id}-{n}", arrival_s=0.0)
        for each in read
        for n in range(copies)
        if len(each.steps) > 1
    )
    scripts, _ = complete(Trace("cpu-agents", records, ""), rules=MissingRules(), seed=0)
    return tuple(scripts)


def table(measured: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Makespans, and their ratios to the first's in the same round."""
    yield "| | makespan s (least to most) | over `heddle` | 95 % |"
    yield "|---|---|---|---|"
    first = next(iter(measured.values()))
    for name, each in measured.items():
        logs = [math.log(took / base) for took, base in zip(each, first, strict=True)]
        middle, ratio = statistics.geometric_mean(each), math.exp(statistics.mean(logs))
        between = ""
        if len(logs) > 1 and each is not first:
            half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
            between = f"{ratio * math.exp(-half):.2f} to {ratio * math.exp(half):.2f}"
        spread = f"{middle:.1f} ({min(each):.1f} to {max(each):.1f})"
        yield f"| {name} | {spread} | {ratio:.2f} | {between} |"


def main() -> None:
    """Measure in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=2, help="of each recorded agent")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    given = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory() as name, two_servers(Path(name)) as urls:
        scripts = recorded(Path(name), given.copies)
        ways = Bench(urls, scripts, Path(name)).ways()
        measured: dict[str, list[float]] = {way: [] for way in ways}
        for number, (way, measure) in itertools.product(range(given.rounds), ways.items()):
            measured[way].append(measure(sum(map(len, measured.values()))))
            print(f"{number + 1}/{given.rounds} {way}: {measured[way][-1]:.1f} s", flush=True)
    steps = sum(len(each.steps) for each in scripts)
    lines = [f"{len(scripts)} agents, {steps} steps, {ENGINES} engines.", "", *table(measured)]
    print("", *lines, sep="\n")
    if given.markdown is not None:
        given.markdown.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
