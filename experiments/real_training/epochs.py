"""What packing the prompts of an epoch by length does to learning, on the toy task of this folder.

    python -m experiments.real_training.epochs [--seeds 5] [--batches 64]

The micro model learns by GRPO on CPU, synchronously; transformers generates, since no time is
measured. Prompts recur each epoch, and their order is that of `heddle_core.loop.epoch`, from the
lengths of the epochs before. Results are kept in epochs.json as they come; what was interrupted
goes on where it was.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from experiments.real_training.echo import END_OF_STEP, EchoAgent, EchoTask
from experiments.real_training.messages import TrainBatch, TrainerSettings
from experiments.real_training.process import GrpoTrainer
from experiments.real_training.trainer import sample_of
from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.loop.epoch import EpochOrder, EpochPlan
from heddle_core.loop.groups import Prompt
from heddle_rollout.clock import Clock
from heddle_rollout.engines import StepResult
from heddle_runtime.tiny_model import make_tiny_model

RESULTS = Path(__file__).with_suffix(".json")
RULES = ("random", "sorted", "tail:.25")
PROMPTS, GROUPS, SAMPLES, STEPS = 64, 8, 8, 6
"""Of an epoch; of a batch; of a prompt; of the longest trajectories."""
LAST = 16
"""Batches that the reward at the end is the mean of: two epochs."""
PAD = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, and print a line of figures for each rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=64)
    given = parser.parse_args(arguments)
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
    for seed, rule in product(range(given.seeds), RULES):
        key = f"{rule}, seed {seed}, {given.batches} batches"
        if key not in runs:
            runs[key] = _trained(rule, seed, given.batches)
            shown = {"runs": runs, "summary": summary(runs)}
            RESULTS.write_text(json.dumps(shown, indent=1) + "\n")
            print(key, f"{fmean(runs[key]['reward'][-LAST:]):.3f}", flush=True)
    print(json.dumps(summary(runs), indent=1))


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Figures of each rule: means over seeds, and the spread of the reward at the end."""
    found = {}
    for rule in RULES:
        mine = [run for key, run in runs.items() if key.startswith(f"{rule},")]
        if not mine:
            continue
        ends = [fmean(run["reward"][-LAST:]) for run in mine]
        found[rule] = {
            "seeds": len(mine),
            "reward_mean": round(fmean(fmean(run["reward"]) for run in mine), 4),
            "reward_at_end": round(fmean(ends), 4),
            "spread_over_seeds": round(pstdev(ends), 4),
            # Without the first epoch, which is in random order.
            "longest_over_mean": round(
                fmean(fmean(run["longest_over_mean"][PROMPTS // GROUPS :]) for run in mine), 3
            ),
            "reward_spread_of_batches": round(
                fmean(pstdev(run["reward"][-LAST:]) for run in mine), 4
            ),
        }
    return found


def _trained(rule: str, seed: int, batches: int) -> dict[str, Any]:
    """Reward, and longest over mean output tokens, of each batch."""
    task = EchoTask(steps=STEPS, seed=seed)
    names = [GroupId(f"prompt-{number}") for number in range(PROMPTS)]
    order = EpochOrder(
        EpochPlan.of(rule),
        [Prompt(group=name, samples=SAMPLES) for name in names],
        batch=GROUPS,
        seed=seed,
    )
    reward, longest = [], []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder, "model"), size="micro", seed=seed)
        settings = TrainerSettings(model_dir=f"{folder}/model", seed=seed)
        trainer = GrpoTrainer(settings, Path(folder, "trained"))
        trainer.torch.manual_seed(seed)
        prompts = iter(order)
        for batch in range(batches):
            agents = list(_agents(task, islice(prompts, GROUPS)))
            _generate(trainer, task, agents)
            tokens = [len(agent.logprobs) for agent in agents]
            for agent, made in zip(agents, tokens, strict=True):
                order.ended(agent.group, made)
            samples = [sample_of(agent) for agent in agents]
            metrics = trainer.train(TrainBatch(batch=batch, samples=samples)).metrics
            reward.append(round(metrics.reward, 5))
            longest.append(round(max(tokens) / fmean(tokens), 4))
    return {"reward": reward, "longest_over_mean": longest}


def _agents(task: EchoTask, prompts: Iterator[Prompt]) -> Iterator[EchoAgent]:
    for prompt in prompts:
        number = int(prompt.group.partition("#")[0].removeprefix("prompt-"))
        shown = task.prompt(number)
        for sample in range(prompt.samples):
            id_ = TrajectoryId(f"{prompt.group}/{sample}")
            yield EchoAgent(id_, prompt.group, task, shown, _NoClock())


class _NoClock(Clock):
    """Tools answer at once here, and nothing asks for the time."""


def _generate(trainer: GrpoTrainer, task: EchoTask, agents: Sequence[EchoAgent]) -> None:
    """Run all trajectories to their ends, a step of each at once."""
    torch = trainer.torch
    running = list(agents)
    while running:
        contexts = [list(agent.context_ids) for agent in running]
        width = max(map(len, contexts))
        ids = torch.tensor([[PAD] * (width - len(c)) + c for c in contexts])
        with torch.no_grad():
            found = trainer.model.generate(
                input_ids=ids,
                attention_mask=torch.tensor(
                    [[0] * (width - len(c)) + [1] * len(c) for c in contexts]
                ),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=task.step_tokens,
                eos_token_id=END_OF_STEP,
                pad_token_id=PAD,
                output_logits=True,
                return_dict_in_generate=True,
            )
        made = found.sequences[:, width:]
        logprobs = torch.stack(found.logits, dim=1).log_softmax(-1)
        each = logprobs.gather(-1, made[:, :, None]).squeeze(-1)
        left = []
        for agent, row, logs in zip(running, made.tolist(), each.tolist(), strict=True):
            end = row.index(END_OF_STEP) + 1 if END_OF_STEP in row else len(row)
            agent.on_step_end(
                StepResult(
                    trajectory=agent.id,
                    tokens=end,
                    finished=True,
                    output_ids=tuple(row[:end]),
                    output_logprobs=tuple(logs[:end]),
                )
            )
            if agent.next_action().reason == "tool_call":
                agent.on_tool_timeout(0.0)
                left.append(agent)
        running = left


if __name__ == "__main__":
    main()
