"""What verl's agent loops know of a trajectory and its router does not: group, task, rollout, end.

verl makes the request id inside an agent loop. A context variable around the loop holds what the
router is to know, and the handle of the router adds it to the loop's requests.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from heddle.config_error import ConfigError
from heddle_verl.proxy import IdentifyingHandle
from heddle_verl.steps import SampleIdentity

_ROUTER = "_load_balancer"
"""Attribute of verl's client with the handle of its router."""
PROMPT = "heddle_prompt"
"""Column of `heddle_verl.epochs.EpochDataset` with a prompt's name."""


class _Trajectory:
    """One run of an agent loop."""

    def __init__(self, identity: SampleIdentity) -> None:
        self.identity = identity
        self.request_ids: list[str] = []


_RUNNING: ContextVar[_Trajectory | None] = ContextVar("heddle_trajectory", default=None)


def router_of(client: Any) -> Any:
    """The router of a client.

    Raises:
        ConfigError: it is none of Heddle's.
    """
    router = getattr(client, _ROUTER, None)
    if getattr(router, "announce_rollout", None) is None:
        raise ConfigError(
            "rollout.agent.agent_loop_manager_class is Heddle's, and the router is not: set "
            "rollout.router_config_path to a file with router_class: heddle_verl.Router, or leave "
            "agent_loop_manager_class out"
        )
    return router


def rollout_name(step: Any, validate: Any) -> str:
    """Name of the rollout of a training step: managers announce it, trajectories belong to it."""
    return f"{'val' if validate else 'train'}-{step}"


class Identifying:
    """A mix-in for verl's `AgentLoopWorker`: its requests have an identity, and their ends are
    announced.
    """

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, llm_client, *args, **kwargs)  # type: ignore[call-arg]
        self._router = router_of(llm_client)
        setattr(llm_client, _ROUTER, IdentifyingHandle(self._router, _identify))

    async def _run_agent_loop(
        self,
        sampling_params: Mapping[str, Any],
        trajectory: Mapping[str, Any],
        **kwargs: Any,
    ) -> Any:
        prompt = "" if trajectory["validate"] else str(kwargs.get(PROMPT, ""))
        running = _Trajectory(
            SampleIdentity(
                group=str(kwargs.get("uid", "")),
                prompt=prompt,
                task=str(kwargs.get("data_source", "")),
                rollout=rollout_name(trajectory["step"], trajectory["validate"]),
            )
        )
        before = _RUNNING.set(running)
        try:
            run = super()._run_agent_loop  # type: ignore[misc]
            return await run(sampling_params, trajectory, **kwargs)
        finally:
            _RUNNING.reset(before)
            self._finish(running)

    async def _agent_loop_postprocess(self, *args: Any, **kwargs: Any) -> Any:
        """The loop is over; its reward is not part of the rollout."""
        running = _RUNNING.get()
        if running is not None:
            self._finish(running)
        return await super()._agent_loop_postprocess(*args, **kwargs)  # type: ignore[misc]

    def _finish(self, running: _Trajectory) -> None:
        request_ids, running.request_ids = running.request_ids, []
        if request_ids:
            self._router.finish_trajectories.remote(request_ids)


def _identify(request_id: str) -> SampleIdentity:
    running = _RUNNING.get()
    if running is None:
        return SampleIdentity()
    if request_id not in running.request_ids:
        running.request_ids.append(request_id)
    if running.request_ids[0] == request_id:
        return running.identity
    # A second request id of one loop is no trajectory of the announced ones.
    return SampleIdentity(group=running.identity.group, task=running.identity.task)
