"""Simulations with speculative decoding over those without: CPU seconds of one rollout, in turn.

    python benchmarks/bench_speculation.py [TRACE]

The same trace on the same engines, without drafts, with 3 everywhere, and with a schedule that
changes drafts as a batch shrinks; the least of `ROUNDS` each, in turn. A ratio of 0.7 is a
simulation that takes 1 / 0.7 times as long.
"""

import argparse
import time

from heddle.cli.errors import exit_with_user_errors
from heddle.comparison.tuning import with_policy
from heddle.config import ClusterConfig, RunConfig
from heddle.setup import Workspace, prepare
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout

TRACE = "traces/coding-512.jsonl.gz"
ROUNDS = 5
SETTINGS = ("off", "eagle3:3:0.886/0.770/0.663", "eagle3:1-16=4,17-48=3,49-=1:0.886/0.770/0.663")
POLICIES = ("verl", "heddle")


def seconds(trace: str, policy: str, speculation: str, workspace: Workspace) -> float:
    """CPU seconds of a simulation, without its set-up and without a journal."""
    cluster = ClusterConfig(model="qwen3-8b", gpus=8, tp=2, speculation=speculation)
    config = with_policy(RunConfig(trace=trace, cluster=cluster), policy, cluster)
    setup = prepare(config, workspace=workspace)
    core = RecordedCore(setup.controller(), lambda event, commands: None)
    began_s = time.process_time()
    simulate_rollout(setup.workload.scripts, core, setup.simulation)
    return time.process_time() - began_s


def main() -> None:
    """Print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", nargs="?", default=TRACE)
    trace, workspace = parser.parse_args().trace, Workspace()
    for policy in POLICIES:
        found = {setting: float("inf") for setting in SETTINGS}
        for _ in range(ROUNDS):
            for setting in SETTINGS:
                found[setting] = min(found[setting], seconds(trace, policy, setting, workspace))
        for setting, least in found.items():
            print(f"{policy:<8} {setting:<48} {least:6.3f} s  {found['off'] / least:5.2f}")


if __name__ == "__main__":
    with exit_with_user_errors():
        main()
