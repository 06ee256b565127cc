"""The router that verl's `router_config_path` names: an actor that lets the policy dispatch steps.

Its public methods and their parameters have verl's names (`RequestLoadBalancer` of verl 0.9.1).
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from heddle.running import FlushTimer
from heddle.runs import RunDirectory, open_run
from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_core.journal import Sink
from heddle_verl.dispatcher import Dispatcher
from heddle_verl.proxy import Lengths, ProxyHandle, abort_request, prompt_of
from heddle_verl.settings import (
    EngineFacts,
    Prepared,
    RouterSettings,
    check,
    prepare_router,
    read_settings,
)
from heddle_verl.steps import EngineCall, Grant, SampleIdentity, StepPrompt

MAX_CALLS = 100_000
"""Calls that the actor has open at once: Ray's 1,000 would end where steps begin to wait."""
PROXY = "heddle"
"""Name of the engine that clients of a proxy acquire and release."""
FACTS_LIMIT_S = 60.0
"""Seconds that an engine has to report its configuration."""

log = logging.getLogger(__name__)


class RouterActor:
    """verl's `RequestLoadBalancer` over a `Dispatcher`."""

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """`config` is the whole YAML file."""
        self._settings: RouterSettings = read_settings(config)
        self._self = ray.get_runtime_context().current_actor
        self._calls: dict[int, EngineCall] = {}
        """Steps of clients of the proxy, by number."""
        self._number = 0
        self._dispatcher: Dispatcher | None = None
        self._facts = EngineFacts()
        self._is_set_up = asyncio.Event()
        self._error: BaseException | None = None
        self._resources = ExitStack()
        self._run: RunDirectory | None = None
        self._known_ends = self._settings.ends == "announced"
        self._adding = asyncio.Lock()
        self._adding_first = asyncio.ensure_future(self.add_servers(servers)) if servers else None

    # -- verl's protocol --------------------------------------------------------------------------

    async def require_acquire_fields(self) -> list[str]:
        """`generate` arguments that `acquire_server` gets."""
        return [] if self._settings.proxy else ["prompt_ids", "sampling_params"]

    async def require_release_fields(self) -> list[str]:
        """What `release_server` gets beside the engine."""
        return ["request_id"]

    async def acquire_server(
        self,
        request_id: str,
        prompt_ids: Sequence[int] = (),
        sampling_params: Mapping[str, Any] | None = None,
        identity: SampleIdentity | None = None,
        **_: Any,
    ) -> tuple[str, Any]:
        """Return an engine for a step, when the policy dispatches it there.

        A proxy is returned at once; its call waits.
        """
        dispatcher = await self._dispatching()
        who = identity or SampleIdentity()
        if self._settings.proxy:
            facts = self._facts
            lengths = Lengths(facts.prompt_tokens, facts.response_tokens)
            return PROXY, ProxyHandle(self._self, request_id, who, lengths, facts.by_priority)
        call = dispatcher.request(request_id, prompt_of(prompt_ids, sampling_params or {}), who)
        grant = await asyncio.shield(call.waiter)
        return grant.address, grant.handle

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A step has ended. Those of a proxy report that themselves."""
        if self._dispatcher is not None and server_id != PROXY and request_id is not None:
            self._dispatcher.release(server_id, request_id)

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        async with self._adding:
            if self._dispatcher is None and self._error is None and servers:
                await self._set_up(servers)
        if self._dispatcher is not None:
            self._dispatcher.add_engines(servers)

    async def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Let engines go; their steps go on elsewhere."""
        if self._dispatcher is not None:
            self._dispatcher.remove_engines(server_ids)
            if not self._dispatcher.in_flight:
                log.warning("verl has taken the last engine away: steps wait until one comes")

    async def get_all_servers(self) -> list[str]:
        return list(self._dispatcher.in_flight) if self._dispatcher is not None else []

    async def get_status(self) -> dict[str, Any]:
        """verl's keys, and the numbers of steps that wait and of trajectories without a step."""
        dispatcher = self._dispatcher
        in_flight = dict(dispatcher.in_flight) if dispatcher is not None else {}
        return {
            "servers": in_flight,
            "total_inflight": sum(in_flight.values()),
            "active_servers": len(in_flight),
            "registered_handles": list(in_flight),
            "waiting": dispatcher.waiting if dispatcher is not None else 0,
            "idle": dispatcher.idle if dispatcher is not None else 0,
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Steps are about to be aborted, and KV is void; idle trajectories end if nothing else
        announces their ends.
        """
        if self._dispatcher is None:
            return {"cleared_entries": 0, "server_loads": {}}
        loads = dict(self._dispatcher.in_flight)
        cleared = self._dispatcher.redistribute(end_idle=not self._known_ends)
        return {"cleared_entries": cleared, "server_loads": loads}

    async def get_total_inflight(self) -> int:
        """Steps that run on engines; those that wait here are none."""
        if self._dispatcher is None:
            return 0
        total = sum(self._dispatcher.in_flight.values())
        if not total:
            self._dispatcher.drained()
        return total

    # -- the proxy's calls ------------------------------------------------------------------------

    async def begin_step(
        self, request_id: str, prompt: StepPrompt, identity: SampleIdentity
    ) -> tuple[int, Grant]:
        """Return the number of a step and its first dispatch."""
        dispatcher = await self._dispatching()
        call = dispatcher.request(request_id, prompt, identity)
        self._number += 1
        number = self._number
        self._calls[number] = call
        try:
            return number, await asyncio.shield(call.waiter)
        except BaseException:
            self._calls.pop(number, None)
            raise

    async def dispatch_ended(
        self, number: int, dispatch: str, tokens: int, aborted: bool
    ) -> Grant | None:
        """Take the result of a dispatch; return the next one if the step is not over."""
        call = self._calls[number]
        dispatcher = await self._dispatching()
        if dispatcher.dispatch_ended(call, dispatch, tokens, aborted=aborted):
            return await asyncio.shield(call.waiter)
        del self._calls[number]
        return None

    async def engine_died(self, number: int, dispatch: str, reason: str) -> Grant:
        """The actor of an engine has ended; return the step's next dispatch."""
        call = self._calls[number]
        (await self._dispatching()).engine_died(call, dispatch, reason)
        return await asyncio.shield(call.waiter)

    async def step_failed(self, number: int, error: str) -> None:
        """A step cannot go on; nothing happens if it is over."""
        call = self._calls.pop(number, None)
        if call is not None:
            (await self._dispatching()).failed(call, error)

    # -- an agent loop manager's calls ------------------------------------------------------------

    async def announce_rollout(self, rollout: str, trajectories: int, weights_version: int) -> None:
        """A rollout of so many trajectories begins."""
        if not self._known_ends:
            log.warning("ends of trajectories are announced: set ends: announced in the YAML file")
        self._known_ends = True
        (await self._dispatching()).announce(rollout, trajectories, weights_version)

    async def conclude_rollout(self, rollout: str) -> None:
        """All trajectories of an announced rollout have ended or will never come."""
        (await self._dispatching()).conclude(rollout)

    async def finish_trajectories(self, request_ids: Sequence[str]) -> None:
        """Trajectories have ended."""
        if self._dispatcher is not None:
            self._dispatcher.finish(request_ids)

    async def write_journal(self) -> None:
        """Write what the journal does not have yet; this happens every few seconds by itself."""
        if self._run is not None:
            self._run.flush()

    async def process(self) -> int:
        """Id of this process, to look at its memory."""
        return os.getpid()

    # -- inside -----------------------------------------------------------------------------------

    async def _dispatching(self) -> Dispatcher:
        await self._is_set_up.wait()
        if self._error is not None:
            raise self._error
        assert self._dispatcher is not None
        return self._dispatcher

    async def _set_up(self, engines: Mapping[str, Any]) -> None:
        """Learn from an engine what it is, and make the policy."""
        try:
            self._facts = await _facts_of(next(iter(engines.values())))
            prepared = prepare_router(self._settings, self._facts, len(engines))
            self._dispatcher = Dispatcher(
                prepared,
                abort=abort_request if self._settings.proxy else None,
                sink=self._open_journal(prepared),
            )
        except BaseException as error:
            self._error = error
        self._is_set_up.set()

    def _open_journal(self, prepared: Prepared) -> Sink | None:
        """Take the journal into a run directory, which nobody closes: a router ends with verl."""
        if not self._settings.out:
            return None
        setup = prepared.setup
        opened = open_run(Path(self._settings.out), setup.config, setup.facts("heddle_verl"))
        run = self._run = self._resources.enter_context(opened)
        timer = FlushTimer(run)

        def record(event: Event, commands: Sequence[Command]) -> None:
            run.record(event, commands)
            timer.start()

        return record


async def _facts_of(handle: Any) -> EngineFacts:
    """What an engine reports of itself; nothing if it has no such call."""
    report = getattr(handle, "get_rollout_config", None)
    if report is None:
        return EngineFacts()
    return EngineFacts.of(await asyncio.wait_for(report.remote(), FACTS_LIMIT_S))


Router = ray.remote(num_cpus=0, max_concurrency=MAX_CALLS)(RouterActor)
"""verl takes a class that `ray.remote` made as it is, with its options."""

_start = Router.remote


def _checked(servers: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Start a router; what is wrong with its file is said here, not by a dead actor."""
    check(config)
    return _start(servers, config)


Router.remote = _checked
