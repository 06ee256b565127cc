"""An agent loop manager for verl's v1 trainers, whose results go to TransferQueue.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class: heddle_verl.agent_loops_tq.ManagerTQ`.
"""

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from heddle_verl.identifying import Identifying, rollout_name, router_of

_Plain: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class
"""verl offers it as an actor's class, from which no class can be derived."""


class AgentLoopsTQ(Identifying, _Plain):  # type: ignore[misc]
    """verl's agent loops, whose requests have an identity."""


class ManagerTQ(AgentLoopManagerTQ):  # type: ignore[misc]
    """Announces the samples of each batch of prompts as a rollout."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)
        self._router = router_of(llm_client)
        self.agent_loop_workers_class = ray.remote(AgentLoopsTQ)
        self._before: str | None = None

    def generate_sequences(self, prompts: Any) -> None:
        """Announce a rollout, and begin it; nothing waits for it here."""
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        # Samples that failed before their first request belong to the batch before.
        if self._before is not None:
            self._router.conclude_rollout.remote(self._before)
        self._before = name = rollout_name(prompts["global_steps"], validate)
        config = self.rollout_config
        samples = config.val_kwargs.n if validate else config.n
        each = prompts.get("__rollout_n__", None)
        trajectories = len(prompts) * samples if each is None else sum(int(n) for n in each)
        announced = self._router.announce_rollout.remote(name, trajectories, 0)
        ray.get(announced)
        super().generate_sequences(prompts)
