"""Output tokens per second of the simulated engines alone.

64 engines of 100 slots, 6,400 trajectories in groups of 16, about 46,000 steps and 20 million
output tokens: the size of the paper's rollouts, with dispatch in arrival order and no journal. Run
with ``python benchmarks/bench_engine.py``; ``--profile`` prints where the time goes.
"""

import argparse
import cProfile
import pstats
import resource
import time
from random import Random

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_sim.calendar import Calendar
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable

ENGINES, TRAJECTORIES_PER_ENGINE, SAMPLES_PER_GROUP = 64, 100, 16


def table() -> LatencyTable:
    """Roughly a 14-billion-parameter model on one 80 GB GPU; what counts is the code's speed."""
    return LatencyTable(
        model="bench",
        gpu="bench",
        tp=1,
        base_s=[0.010 + 0.00006 * batch for batch in range(129)],
        per_context_s=[0.0] + [6e-8] * 128,
        prefill_tokens=[0.0, 512.0, 2048.0, 8192.0],
        prefill_knots_s=[0.0, 0.02, 0.085, 0.36],
        prefill_pair_s=1e-9,
        host_per_prefill_s=0.0002,
        kv_capacity_tokens=250_000,
        kv_bytes_per_token=163_840,
    )


Step = tuple[int, int, int, float]
"""prompt_tokens, shared_tokens, output_tokens, tool_s"""


def workload(seed: int) -> list[list[Step]]:
    """Long-tailed trajectories: 2 to 14 steps, tool calls of 0.4 s on average."""
    random = Random(seed)
    trajectories = []
    for _ in range(ENGINES * TRAJECTORIES_PER_ENGINE):
        context, steps = 0, []
        prompt = 800
        for _ in range(random.choice((2, 4, 6, 7, 8, 9, 14))):
            output = min(8000, 16 + int(random.lognormvariate(5.5, 1.1)))
            steps.append((context + prompt, context, output, random.expovariate(1 / 0.41)))
            context += prompt + output
            prompt = 20 + int(random.expovariate(1 / 180))
        trajectories.append(steps)
    return trajectories


class World:
    """Trajectories pinned to engines in turn, each step sent as soon as its tool returned."""

    def __init__(self, trajectories: list[list[Step]]) -> None:
        self.clock = Calendar()
        self.trajectories = trajectories
        self.at = [0] * len(trajectories)
        self.names = [TrajectoryId(f"t{i}") for i in range(len(trajectories))]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.groups = [GroupId(f"g{i // SAMPLES_PER_GROUP}") for i in range(len(trajectories))]
        self.finished_s = 0.0
        self.engines = [
            SimEngine(
                self.clock,
                EngineId(f"e{i}"),
                table(),
                max_running=TRAJECTORIES_PER_ENGINE,
                on_end=self.ended,
                speed=1.0 + 1e-6 * i,
            )
            for i in range(ENGINES)
        ]

    def send(self, i: int) -> None:
        """Dispatch the next step of trajectory `i`."""
        prompt, shared, output, _tool_s = self.trajectories[i][self.at[i]]
        self.engines[i % ENGINES].start(
            self.names[i],
            self.groups[i],
            prompt_tokens=prompt,
            shared_tokens=shared,
            output_tokens=output,
        )

    def ended(self, result: StepResult) -> None:
        """Run the tool, then the next step."""
        i = self.index[result.trajectory]
        tool_s = self.trajectories[i][self.at[i]][3]
        self.at[i] += 1
        if self.at[i] < len(self.trajectories[i]):
            self.clock.call_after(tool_s, self.send, i)
        else:
            self.engines[i % ENGINES].release(result.trajectory)
            self.finished_s = self.clock.now_s

    def run(self) -> None:
        """Send everything at once and wait for the last end."""
        for i in range(len(self.trajectories)):
            self.send(i)
        self.clock.run()


def main() -> None:
    """Print simulated tokens per second: the best of some runs, as the machine may be shared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    trajectories = workload(seed=11)
    steps = sum(len(t) for t in trajectories)
    tokens = sum(step[2] for t in trajectories for step in t)
    seconds = []
    for _ in range(options.runs):
        world = World(trajectories)
        began = time.process_time()
        world.run()
        seconds.append(time.process_time() - began)
    best_s = min(seconds)
    made = sum(engine.decoded_tokens for engine in world.engines)
    assert made == tokens, f"{made} tokens made of {tokens}"
    print(
        f"{ENGINES} engines, {len(trajectories)} trajectories, {steps} steps, {tokens / 1e6:.1f} M "
        f"output tokens, simulated makespan {world.finished_s:.0f} s, "
        f"{sum(engine.preemptions for engine in world.engines)} engine preemptions"
    )
    print(
        f"{best_s:.2f} s of one core (runs: {', '.join(f'{s:.2f}' for s in seconds)}): "
        f"{tokens / best_s / 1e6:.1f} M simulated output tokens/s, "
        f"{1e6 * best_s / steps:.1f} us per step, "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"
    )
    if options.profile:
        world = World(trajectories)
        with cProfile.Profile() as profile:
            world.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
