"""The planned engines, and the starts and stops that lead to them. No trajectories."""

from collections.abc import Sequence

from heddle_core.commands import CommandList, StartEngine, StopEngine
from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec, PlanError, ResourcePlan, RestartLimit


class Fleet:
    """Carries out resource plans: first the stops, then, on the freed GPUs, the starts.

    A running engine takes the place of any planned engine of its shape. Ids are never used twice,
    so that a late message for a dead engine cannot reach its successor: the engine of the plan's
    name "e3" may have the id "e3+1".
    """

    def __init__(self, limit: RestartLimit | None = None) -> None:
        self._limit = RestartLimit() if limit is None else limit
        self._running: dict[EngineId, EngineSpec] = {}
        self._starting: dict[EngineId, EngineSpec] = {}
        self._restarting: dict[EngineId, EngineSpec] = {}
        self._stopping: dict[EngineId, None] = {}
        self._unwanted: dict[EngineId, None] = {}
        """Still starting, though not part of a newer plan."""
        self._after_stops: list[EngineSpec] = []
        self._replaced: list[EngineSpec] = []
        """Engines that were stopped for those of the plan."""
        self.gave_up = False
        """Whether narrower engines were started again, since a wide one failed too often."""
        self._borrowed: dict[EngineId, None] = {}
        """On GPUs that are not the rollouts' own: no part of a plan, and not restarted."""
        self._joined: dict[str, None] = {}
        """Names of engines that their owners have brought and not recalled: no part of a plan."""
        self._lives: dict[str, int] = {}
        """Number of engines that have had a plan's name."""
        self._restarted_s: dict[str, list[float]] = {}
        """When engines of a name were started again, within the limit's time."""

    @property
    def settled(self) -> bool:
        """Whether every engine of the plan has started; restarts of failed ones do not count."""
        return not (self._starting or self._after_stops)

    @property
    def steady(self) -> bool:
        """Whether nothing is starting, restarting or stopping, and all engines are of the plan."""
        return self.settled and not (
            self._restarting or self._stopping or self._unwanted or self._borrowed or self._joined
        )

    def borrow(self, engines: Sequence[EngineSpec], out: CommandList) -> list[EngineId]:
        """Start engines beside those of the plan; return their ids."""
        started = [self._carrier(spec) for spec in engines]
        for spec in started:
            self._borrowed[spec.engine] = None
            out.append(_start_command(spec, out.cause))
        return [spec.engine for spec in started]

    def give_back(self, engine: EngineId, out: CommandList) -> None:
        """Stop a borrowed engine that is ready; its running steps end early."""
        del self._borrowed[engine]
        out.append(StopEngine(engine=engine, drain=False, cause=out.cause))

    def plans(self, engine: EngineId) -> bool:
        """Whether a running engine is one of the plan; others are borrowed, joined or attached."""
        return engine in self._running and engine.name not in self._joined

    def join(self, spec: EngineSpec, out: CommandList) -> None:
        """Take in an engine that its owner has brought.

        Raises:
            PlanError: an engine had this name before.
        """
        name = spec.engine.name
        if name in self._lives:
            raise PlanError(f"engine {name!r} cannot join: an engine had this name before")
        self._joined[name] = None
        carrier = self._carrier(spec)
        self._restarting[carrier.engine] = carrier
        out.append(_start_command(carrier, out.cause))

    def recall(self, name: str, out: CommandList, *, drain: bool) -> EngineId | None:
        """Let go of an engine that joined; return its id if it may have work.

        One that is still starting stops as soon as it is ready.
        """
        joined = name in self._joined
        self._joined.pop(name, None)
        if joined:
            for engine in self._running:
                if engine.name == name:
                    del self._running[engine]
                    self._stopping[engine] = None
                    out.append(StopEngine(engine=engine, drain=drain, cause=out.cause))
                    return engine
            for engine in self._restarting:
                if engine.name == name:
                    del self._restarting[engine]
                    self._unwanted[engine] = None
                    return None
        elif not drain:
            for engine in self._stopping:
                if engine.name == name:
                    out.append(StopEngine(engine=engine, drain=False, cause=out.cause))
                    return engine
        return None

    def change_to(
        self, plan: ResourcePlan, out: CommandList
    ) -> tuple[list[EngineId], dict[EngineId, EngineId]]:
        """Begin to carry out `plan`.

        Returns the engines that must take no more work, and the engine for each name of the plan.

        Raises:
            PlanError: the plan contradicts itself.
        """
        plan.check()
        every = self._running | self._starting | self._restarting
        present = {e: spec for e, spec in every.items() if e.name not in self._joined}
        by_shape: dict[tuple[EngineShape, int], dict[EngineId, None]] = {}
        for name, there in present.items():
            by_shape.setdefault(_shape(there), {})[name] = None
        carriers: dict[EngineId, EngineId] = {}
        missing: list[EngineSpec] = []
        for spec in plan.engines:
            alike = by_shape.get(_shape(spec), {})
            carrier_name = spec.engine if spec.engine in alike else next(iter(alike), None)
            if carrier_name is None:
                missing.append(spec)
            else:
                carriers[spec.engine] = carrier_name
                del present[carrier_name], alike[carrier_name]
        draining = [name for name in present if name in self._running]
        if draining:
            self._replaced = [self._running[name] for name in draining]
        for name in present:
            if name in self._running:
                del self._running[name]
                self._stopping[name] = None
                out.append(StopEngine(engine=name, drain=True, cause=out.cause))
            else:
                self._starting.pop(name, None)
                self._restarting.pop(name, None)
                self._unwanted[name] = None
        self._after_stops = []
        for spec in missing:
            carrier = self._carrier(spec)
            carriers[spec.engine] = carrier.engine
            self._after_stops.append(carrier)
        self._start(out)
        return draining, carriers

    def ready(self, engine: EngineId, out: CommandList) -> bool:
        """Record that an engine has started; return whether the plan still needs it."""
        if engine in self._unwanted:
            del self._unwanted[engine]
            self._stopping[engine] = None
            out.append(StopEngine(engine=engine, drain=True, cause=out.cause))
            return False
        spec = self._starting.pop(engine, None) or self._restarting.pop(engine, None)
        if spec is not None:
            self._running[engine] = spec
        return True

    def stopped(self, engine: EngineId, out: CommandList) -> None:
        """Record that an engine has drained; its GPUs are free."""
        self._stopping.pop(engine, None)
        self._start(out)

    def failed(self, engine: EngineId, now_s: float, out: CommandList) -> None:
        """Record that an engine died, in any state; restart it if the plan needs it.

        Instead of one that has failed too often, start narrower ones that were stopped for it.
        """
        wanted = (
            self._running.pop(engine, None)
            or self._starting.pop(engine, None)
            or self._restarting.pop(engine, None)
        )
        if wanted is not None:
            self._restart(wanted, now_s, out)
        self._unwanted.pop(engine, None)
        self._borrowed.pop(engine, None)
        self.stopped(engine, out)

    def _start(self, out: CommandList) -> None:
        if self._stopping or self._unwanted:
            return  # their GPUs are not free yet
        for spec in self._after_stops:
            self._starting[spec.engine] = spec
            out.append(_start_command(spec, out.cause))
        self._after_stops = []

    def _restart(self, spec: EngineSpec, now_s: float, out: CommandList) -> None:
        name, limit = spec.engine.name, self._limit
        since_s = now_s - limit.window_s
        latest = [time_s for time_s in self._restarted_s.get(name, ()) if time_s > since_s]
        again = len(latest) < limit.restarts
        self._restarted_s[name] = [*latest, now_s] if again else latest
        instead = [spec] if again else self._narrower(spec)
        for each in instead:
            new = self._carrier(each)
            self._restarting[new.engine] = new
            out.append(_start_command(new, out.cause))

    def _narrower(self, spec: EngineSpec) -> list[EngineSpec]:
        """Take engines out of `_replaced` that are narrower than `spec`, for its GPUs."""
        taken: list[EngineSpec] = []
        free = spec.shape.gpus
        for each in self._replaced:
            alike = each.shape.gpu == spec.shape.gpu and each.shape.role == spec.shape.role
            narrower = alike and each.shape.gpus < spec.shape.gpus
            if narrower and each.shape.gpus <= free:
                taken.append(each)
                free -= each.shape.gpus
        self._replaced = [each for each in self._replaced if each not in taken]
        self.gave_up = self.gave_up or bool(taken)
        return taken

    def _carrier(self, spec: EngineSpec) -> EngineSpec:
        """Return `spec` under an unused id."""
        name = spec.engine.name
        lives = self._lives.get(name, 0)
        self._lives[name] = lives + 1
        return EngineSpec(
            engine=EngineId(name, lives), shape=spec.shape, max_running=spec.max_running
        )


def _shape(spec: EngineSpec) -> tuple[EngineShape, int]:
    return spec.shape, spec.max_running


def _start_command(spec: EngineSpec, cause: int) -> StartEngine:
    return StartEngine(
        engine=spec.engine, shape=spec.shape, max_running=spec.max_running, cause=cause
    )
