"""Sessions of clients: which trajectory takes a request, and when trajectories end.

A session has lanes. Its requests go to the first lane; one that comes while that is busy goes to
another, which is a trajectory of its own. A session ends when its client says so or has been idle
for too long; a later request begins it anew, as another trajectory.

This module has no sockets and no tasks: `ClientSessions` is called with requests, with the ends of
trajectories, and from time to time.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from heddle_core.events import ArrivalHints, Outcome
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_gateway.agent import GatewayAgent, common_prefix
from heddle_gateway.client_step import ClientStep
from heddle_gateway.continuation import Continuations
from heddle_gateway.errors import ApiError
from heddle_gateway.identity import Identity, UniqueNames, readable
from heddle_gateway.saved import SavedState
from heddle_runtime.generation import GenerationEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Times of sessions, in seconds."""

    idle_s: float = 1800.0
    """A trajectory whose client sends nothing for so long is cancelled."""
    grace_s: float = 2.0
    """A step whose clients are all gone is cancelled after this."""
    keep_answer_s: float = 60.0
    """An answer is kept for clients that send its request again; 0: none is."""


@dataclass(slots=True, eq=False)
class ClientSession:
    """The open trajectories of one session id, or one trajectory without an id."""

    id: str
    name: str
    """Of its first trajectory."""
    group: GroupId
    lanes: dict[int, GatewayAgent] = field(default_factory=dict)
    opened: int = 0
    """Lanes so far."""
    ends: bool = False
    """Whether each trajectory ends with its current step."""


class ClientSessions:
    """All sessions; implements `StepListener`."""

    def __init__(
        self,
        limits: SessionLimits,
        *,
        now: Callable[[], float],
        soon: Callable[[Callable[[], None]], object],
        admit: Callable[[GatewayAgent], None],
        cancel: Callable[[TrajectoryId, str], None],
        begin_tool: Callable[[TrajectoryId, str], None],
        abort_dispatch: Callable[[TrajectoryId], None],
        check_open: Callable[[], None] = lambda: None,
        make_agent: Callable[..., GatewayAgent] = GatewayAgent,
        saved: SavedState | None = None,
        url_of: Callable[[str], str] = lambda engine: "",
        engine_at: Callable[[str], EngineId | None] = lambda url: None,
    ) -> None:
        """`now` gives seconds; `soon` makes a call after the current one; `admit` gives a
        trajectory to the driver, `cancel` ends one there, for a reason, and `begin_tool` names the
        tool that a step ended in. `abort_dispatch` ends what runs on an engine, tokens kept.
        `check_open` raises where no step may begin any more.
        `saved` has what earlier gateways knew, `url_of` and `engine_at` the URLs of engines.
        """
        self._saved, self._url_of, self._engine_at = saved, url_of, engine_at
        self._make_agent, self._check_open = make_agent, check_open
        self._limits = limits
        self._now, self._call_soon, self._admit, self._cancel = now, soon, admit, cancel
        self._begin_tool, self._abort_dispatch = begin_tool, abort_dispatch
        self._sessions: dict[str, ClientSession] = {}
        """By client's id; those without one are in `_of` alone."""
        self._of: dict[TrajectoryId, tuple[ClientSession, int]] = {}
        """Session and lane of each open trajectory."""
        self._names = UniqueNames()
        """Journals have each trajectory once."""
        self.on_over: Callable[[str], object] = lambda session: None
        """Called when a session has no open trajectory any more."""
        self._anonymous = 0
        self._groups: dict[GroupId, int] = {}
        """Open trajectories without a session id, by group."""
        self._continuations = Continuations(lambda agent: self._groups.get(agent.group, 0) < 2)
        self._idle: dict[TrajectoryId, float] = {}
        """Since when each waits for its client, the oldest first."""
        self._abandoned: deque[tuple[float, ClientStep]] = deque()
        """Steps that may be cancelled, and when."""
        self._answers: deque[tuple[float, str, ClientStep]] = deque()
        """Ended steps, and until when they are kept."""
        self._steps: dict[str, dict[bytes, list[ClientStep]]] = {}
        """Steps under way and kept ones, by session id and key."""
        self._agents: dict[ClientStep, GatewayAgent] = {}
        """Of the steps under way."""

    # -- what there is -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sessions) + sum(self._groups.values())

    @property
    def trajectories(self) -> int:
        """Open ones."""
        return len(self._of)

    @property
    def idle(self) -> int:
        """Open ones that wait for their clients."""
        return len(self._idle)

    @property
    def under_way(self) -> Iterator[ClientStep]:
        """Steps that are held, queued or running."""
        return iter(list(self._agents))

    def step_of(self, trajectory: TrajectoryId) -> ClientStep | None:
        """The current or last step of an open trajectory."""
        found = self._of.get(trajectory)
        return found[0].lanes[found[1]].step if found is not None else None

    # -- requests ----------------------------------------------------------------------------------

    def submit(
        self, who: Identity, step: ClientStep, *, has_reply: bool | None = None, model: str = ""
    ) -> ClientStep:
        """Begin a step, or return the equal one that is under way or was kept.

        The client counts among the clients of the step that is returned, until `release`.
        """
        known = self._equal(who, step)
        if known is not None and not known.cancelled:
            known.clients += 1
            return known
        if known is not None and known.resumable and not known.wants_logprobs:
            # The last one may be the end of the generation, which it would be wrong to go on from.
            step.output_ids = known.output_ids[: step.max_tokens][:-1]
        step.clients = 1
        step.submitted_s = self._now()
        saved = self._saved if known is None and who.session else None
        if saved is not None and saved.restore(who.session, step):
            return step
        self._check_open()
        agent = self._waiting_agent(who, step, has_reply)
        if agent is not None:
            self._of[agent.id][0].ends |= who.final
            self._leave_idle(agent)
            self._enter(who.session, step, agent)
            agent.begin(step)
            return step
        session = self._session(who, step)
        session.ends |= who.final
        self._open(session, who, step, model)
        return step

    def _equal(self, who: Identity, step: ClientStep) -> ClientStep | None:
        """The newest equal step that this request may be the repetition of."""
        for known in reversed(self._steps.get(who.session, {}).get(step.key, [])):
            # Equal requests without an id may be samples: only a lost one is repeated.
            lost = not (known.clients or known.delivered)
            if known.error is None and not known.aborted and (who.session or lost):
                return known
        return None

    def _waiting_agent(
        self, who: Identity, step: ClientStep, has_reply: bool | None
    ) -> GatewayAgent | None:
        if not who.session:
            return self._continuations.find(step.prompt_ids, has_reply=has_reply, tenant=who.tenant)
        session = self._sessions.get(who.session)
        waiting = [a for a in session.lanes.values() if a.waits] if session is not None else []
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        return max(waiting, key=lambda a: common_prefix(a.context_ids, step.prompt_ids))

    def _session(self, who: Identity, step: ClientStep) -> ClientSession:
        """The session of a request that begins a trajectory."""
        if who.session in self._sessions:
            return self._sessions[who.session]
        if who.session:
            name = self._names.of(readable(who.session))
        else:
            self._anonymous += 1
            name = f"anon~{self._anonymous}"
        group = readable(who.group) or step.prompt_name
        session = ClientSession(who.session, name, GroupId(group))
        if who.session:
            self._sessions[who.session] = session
        return session

    def _open(self, session: ClientSession, who: Identity, step: ClientStep, model: str) -> None:
        lane = session.opened
        session.opened += 1
        name = f"{session.name}~{lane}" if lane else session.name
        task = readable(who.task or model) or "chat"
        agent = self._make_agent(TrajectoryId(name), session.group, task, step, self)
        url = self._saved.url_of(session.id) if self._saved is not None and session.id else ""
        home = (self._engine_at(url) if url else None) or EngineId("")
        if who.tier or home:
            agent.hints = ArrivalHints(tier=who.tier, home=home)
        session.lanes[lane] = agent
        self._of[agent.id] = session, lane
        if not session.id:
            self._groups[session.group] = self._groups.get(session.group, 0) + 1
        self._enter(session.id, step, agent)
        try:
            self._admit(agent)
        except BaseException:
            self.closed(agent.id)
            raise

    def _enter(self, session: str, step: ClientStep, agent: GatewayAgent) -> None:
        step.trajectory = agent.id
        self._agents[step] = agent
        self._steps.setdefault(session, {}).setdefault(step.key, []).append(step)

    def release(self, step: ClientStep, *, delivered: bool) -> None:
        """A client waits no more: it has its answer, or it is gone."""
        step.clients -= 1
        step.delivered |= delivered
        if step.clients:
            return
        if step.over:
            self.name_tool(step, "")
        else:
            self._abandoned.append((self._now() + self._limits.grace_s, step))

    def name_tool(self, step: ClientStep, tool: str) -> None:
        """Name the tool that a step ended in; only the first name counts."""
        agent = self._agents.get(step)
        if agent is not None and step.end is not None:
            self._begin_tool(agent.id, tool)

    # -- ends --------------------------------------------------------------------------------------

    def finish(self, session_id: str, outcome: Outcome = "completed") -> bool:
        """End a session; its steps under way end as aborted. Return whether it was open.

        Its answers are not kept: the same id and prompt may come again as another trajectory.
        """
        session = self._sessions.get(session_id)
        if not session_id:
            return False
        self._steps.pop(session_id, None)
        saved = self._saved is not None and self._saved.finish(session_id)
        if session is None:
            return saved
        for agent in list(session.lanes.values()):
            if agent.waits:
                self._leave_idle(agent)
                agent.end(outcome)
            else:
                self.abort(agent.step, f"session {session.name} was finished")
        return True

    def abort(self, step: ClientStep, reason: str) -> None:
        """End a step with the tokens so far, and its trajectory.

        With log-probs it ends when its engine has handed them over.
        """
        agent = self._agents.get(step)
        if agent is None or step.abort_reason:
            return
        if step.wants_logprobs and agent.runs:
            step.abort_reason = reason
            self._abort_dispatch(agent.id)
        else:
            step.finish(GenerationEnd(finish_reason="abort"))
            self._cancel(agent.id, reason)

    def step_aborted(self, agent: GatewayAgent) -> None:
        step = agent.step
        step.finish(GenerationEnd(finish_reason="abort"))
        self._call_soon(lambda: self._cancel(agent.id, step.abort_reason))

    def fail(self, step: ClientStep, error: ApiError) -> None:
        """End a step with an error, and its trajectory."""
        agent = self._agents.get(step)
        if agent is not None:
            step.fail(error)
            self._cancel(agent.id, str(error))

    def step_done(self, agent: GatewayAgent) -> None:
        (session, _), step = self._of[agent.id], agent.step
        if self._saved is not None and session.id and step.end is not None and not step.aborted:
            self._saved.keep(session.id, step, step.end, self._url_of(step.engine))

    def step_over(self, agent: GatewayAgent) -> None:
        session, _ = self._of[agent.id]
        self._keep(session, agent.step)
        self._idle[agent.id] = self._now()
        if session.ends:
            self._call_soon(lambda: self._end_if_waiting(agent))
        elif not session.id:
            self._continuations.add(agent)

    def _end_if_waiting(self, agent: GatewayAgent) -> None:
        if agent.id in self._idle:
            self._leave_idle(agent)
            agent.end("completed")

    def closed(self, trajectory: TrajectoryId) -> None:
        """A trajectory is over, whatever ended it."""
        session, lane = self._of.pop(trajectory, (None, 0))
        if session is None:
            return
        agent = session.lanes.pop(lane)
        self._leave_idle(agent)
        if agent.step in self._agents:
            if not agent.step.over:
                agent.step.fail(ApiError(500, "the trajectory was ended", kind="server_error"))
            self._keep(session, agent.step)
        if not session.id:
            self._groups[session.group] -= 1
            if not self._groups[session.group]:
                del self._groups[session.group]
        elif not session.lanes:
            del self._sessions[session.id]
            self.on_over(session.id)

    def _keep(self, session: ClientSession, step: ClientStep) -> None:
        self._agents.pop(step, None)
        if self._limits.keep_answer_s > 0.0:
            self._answers.append((self._now() + self._limits.keep_answer_s, session.id, step))
        else:
            self._forget(session.id, step)

    def _forget(self, session_id: str, step: ClientStep) -> None:
        """Drop a kept answer; nothing if its session was finished."""
        of_session = self._steps.get(session_id, {})
        kept = of_session.get(step.key, [])
        if step in kept:
            kept.remove(step)
        if not kept:
            of_session.pop(step.key, None)
        if not of_session:
            self._steps.pop(session_id, None)

    def _leave_idle(self, agent: GatewayAgent) -> None:
        self._idle.pop(agent.id, None)
        self._continuations.remove(agent)

    # -- time --------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Do what is due: abandoned steps, old answers, idle trajectories."""
        now_s = self._now()
        if self._saved is not None:
            self._saved.sweep()
        while self._abandoned and self._abandoned[0][0] <= now_s:
            _, step = self._abandoned.popleft()
            agent = self._agents.get(step)
            if agent is not None and not (step.clients or step.over):
                step.cancel()
                self._cancel(agent.id, "its client is gone")
        while self._answers and self._answers[0][0] <= now_s:
            _, session_id, step = self._answers.popleft()
            self._forget(session_id, step)
        while self._idle:
            trajectory, since_s = next(iter(self._idle.items()))
            if now_s - since_s < self._limits.idle_s:
                break
            session, lane = self._of[trajectory]
            agent = session.lanes[lane]
            self._leave_idle(agent)
            agent.end("cancelled")
