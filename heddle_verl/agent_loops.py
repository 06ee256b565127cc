"""An agent loop manager for verl's `ray_trainer`, which waits for each batch.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class: heddle_verl.agent_loops.Manager`.
"""

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.ray_utils import auto_await

from heddle_verl.identifying import Identifying, rollout_name, router_of


class AgentLoops(Identifying, AgentLoopWorker):  # type: ignore[misc]
    """verl's agent loops, whose requests have an identity."""


class Manager(AgentLoopManager):  # type: ignore[misc]
    """Announces each batch as a rollout."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        self._router = router_of(llm_client)
        self.agent_loop_workers_class = ray.remote(AgentLoops)
        super().__init__(config, llm_client, *args, **kwargs)

    @auto_await  # type: ignore[untyped-decorator]
    async def generate_sequences(self, prompts: Any) -> Any:
        """Announce a rollout, run it, and end it."""
        step = prompts.meta_info.get("global_steps", -1)
        name = rollout_name(step, prompts.meta_info.get("validate", False))
        await self._router.announce_rollout.remote(name, len(prompts), max(int(step), 0))
        try:
            return await super().generate_sequences(prompts)
        finally:
            self._router.conclude_rollout.remote(name)
