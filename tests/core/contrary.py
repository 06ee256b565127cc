"""A policy that does everything a policy may do, as often as it may, and for no good reason."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heddle_core.estimate.cost import CostModel
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, EngineShape, Role, TrajectoryId
from heddle_core.plans import Disaggregation, EngineSpec, ResourcePlan
from heddle_core.policy import EngineView, Policy, TrajectoryView, View


def scatter(*words: object) -> int:
    """Hash words the same way in every process."""
    return zlib.crc32(repr(words).encode())


@dataclass
class Whims:
    served: bool
    awaited: bool

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None: ...

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None: ...

    def observe_finish(self, t: TrajectoryView) -> None: ...

    def remaining_tokens(self, t: TrajectoryView) -> float:
        return float(scatter(t.id, t.step, t.output_tokens) % 1000)


@dataclass
class Pushy:
    preemptive: bool = True

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return remaining_tokens


class Greedy:
    keeps_kv = True

    def keep_kv_s(self, t: TrajectoryView, tool: str, view: View) -> float:
        return (0.0, 0.5, 3.0, math.inf)[scatter("keep", t.id, t.step) % 4]

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        return scatter("reserve", t.id, t.step) % 60


class Chunky(Greedy):
    chunk_tokens = 20


@dataclass
class Anywhere:
    needs_all: bool

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        return [self.place(t, view) for t in ts]

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        return view.engines[scatter("place", t.id, t.step) % len(view.engines)].id

    def finished(self, t: TrajectoryView) -> None: ...


@dataclass
class Undecided(Anywhere):
    """Lets every third step wait, and some of them at each review."""

    review_s: float = 2.0

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        if scatter("wait", t.id, t.step, t.output_tokens) % 3 == 0:
            return None
        return Anywhere.place(self, t, view)

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> list[tuple[TrajectoryId, EngineId]]:
        least = 0 if any(e.in_flight for e in view.engines) else 1
        some = [t for t in backlog.values() if scatter("go", t.id, view.now_s) % 4 == 0]
        some = some or list(backlog.values())[:least]
        return [(t.id, Anywhere.place(self, t, view)) for t in some]


class Restless:
    def carries_kv(self, t: TrajectoryView, target: EngineView, view: View) -> bool:
        return scatter("carry", t.id, t.step) % 2 == 0

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        return view.engines[scatter("move", t.id, t.step) % len(view.engines)].id

    def finished(self, t: TrajectoryView) -> None: ...


@dataclass(frozen=True)
class Problem:
    found: ResourcePlan
    charged_s: float = 1.0

    def solve(self) -> ResourcePlan:
        return self.found


@dataclass
class TwoSizes:
    needs_all: bool
    searched: bool
    role: Role = "both"

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | Problem:
        specs = tuple(
            EngineSpec(
                engine=EngineId(f"e{i}"),
                shape=EngineShape("h100", tp, self.role),
                max_running=slots,
            )
            for i, (tp, slots) in enumerate([(1, 2), (1, 1), (2, 3)])
        )
        homes = tuple((s.engine, tuple(t.id for t in ts[i::3])) for i, s in enumerate(specs))
        plan = ResourcePlan(engines=specs, homes=homes if self.searched else ())
        return Problem(found=plan) if self.searched else plan


class Reshuffle:
    """On half of the calls: merges two narrow engines, if there are, and plans homes."""

    def consolidate(self, view: View) -> Problem | None:
        seed = scatter("merge", view.unfinished, view.now_s)
        if seed % 2:
            return None
        narrow = [e for e in view.engines if e.shape.tp == 1][: 2 if seed % 3 else 0]
        specs = [
            EngineSpec(engine=e.id, shape=e.shape, max_running=e.max_running)
            for e in view.engines
            if e not in narrow or len(narrow) < 2
        ]
        if len(narrow) == 2:
            name = EngineId(narrow[0].id.partition("+")[0])
            wide = EngineShape("h100", 2, narrow[0].shape.role)
            specs.append(EngineSpec(engine=name, shape=wide, max_running=2))
        ts = list(view.trajectories)
        homes = tuple((s.engine, tuple(ts[i :: len(specs)])) for i, s in enumerate(specs))
        return Problem(found=ResourcePlan(engines=tuple(specs), homes=homes))


def contrary(
    *,
    needs_all: bool,
    served: bool,
    awaited: bool,
    backlog: bool = False,
    chunks: bool = False,
    role: Role = "both",
) -> Policy:
    """Preempts, migrates, re-homes and re-plans wherever the interface lets it."""
    return Policy(
        predictor=Whims(served=served, awaited=awaited),
        scheduler=Pushy(),
        admission=Chunky() if chunks else Greedy(),
        placement=Undecided(needs_all=False) if backlog else Anywhere(needs_all=needs_all),
        migration=Restless(),
        planner=TwoSizes(needs_all=needs_all, searched=needs_all, role=role),
        consolidation=Reshuffle(),
    )


GPUS = 4
"""Of the engines of `TwoSizes`."""

PREFILL_SHAPE = EngineShape("h100", 1, "prefill")
"""Of each of the two engines of `beside`."""


def beside(threshold_tokens: int) -> Disaggregation:
    """Two prefill engines beside those of `TwoSizes`."""
    return Disaggregation(
        engines=tuple(
            EngineSpec(engine=EngineId(f"p{i}"), shape=PREFILL_SHAPE, max_running=2)
            for i in range(2)
        ),
        threshold_tokens=threshold_tokens,
        prefill_s_by_shape={PREFILL_SHAPE: 1e-3},
    )


NO_COST = CostModel(by_shape={}, transfer_fixed_s=0.0, transfer_s_per_token=0.0)
