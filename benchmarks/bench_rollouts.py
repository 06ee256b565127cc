"""Memory of a run of many rollouts, one after the other: `python benchmarks/bench_rollouts.py`.

One driver, one controller and one simulated cluster run `--rollouts` rollouts of the same prompts.
Before each, new weights are pushed; its trajectories have new ids. What Python holds after each
tenth of them is printed, and the largest resident memory of the process so far.
"""

import argparse
import gc
import resource
import tracemalloc
from dataclasses import replace
from pathlib import Path

from heddle.cluster_config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.setup import prepare
from heddle_core.controller import Controller
from heddle_core.ids import RolloutId
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation

TRACE = Path(__file__).resolve().parent.parent / "traces" / "coding-512.jsonl.gz"


def main() -> None:
    """Print one line for each tenth."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--policy", default="heddle")
    args = parser.parse_args()
    config = RunConfig(
        trace=str(TRACE),
        cluster=ClusterConfig(model="qwen3-14b", gpu="h100", gpus=8),
        policy=PolicyConfig(preset=args.policy),
    )
    setup = prepare(config)
    controller = Controller(setup.policy)
    simulation = Simulation(controller, setup.simulation)
    tracemalloc.start()
    print(f"{args.policy}: {len(setup.workload.scripts)} trajectories in each rollout")
    for version in range(args.rollouts):
        rollout = RolloutId(f"r{version}")
        driver = simulation.driver
        driver.update_weights(version, "weights")
        driver.open_rollout(
            rollout, trajectories=len(setup.workload.scripts), weights_version=version
        )
        for script in setup.workload.scripts:
            named = replace(script, id=f"{rollout}/{script.id}")
            driver.admit(ScriptedAgent(named, simulation.clock), rollout)
        simulation.run()
        if (version + 1) % max(args.rollouts // 10, 1) == 0:
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] / 1e6
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            ledger = controller.ledger
            print(
                f"{version + 1:4} rollouts  {held:6.2f} MB held by Python, {peak:.0f} MiB at most, "
                f"{len(ledger.trajectories) + len(ledger.ended)} trajectories in the ledger, "
                f"{len(ledger.known_engines)} engines known",
                flush=True,
            )


if __name__ == "__main__":
    main()
