"""Scripts to replay in columns: all steps in one array, a row each; scripts are made on demand."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from struct import Struct
from types import MappingProxyType
from typing import Any, Final, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from heddle_trace.columns import NONE, Bools, Codes, Floats, Ints, Words, positions, sums
from heddle_trace.schema import StepScript, TrajectoryScript

_NUMBERS: Final = ("prompt_tokens", "shared_tokens", "output_tokens", "tool_tokens")
_FIELDS: Final = (*_NUMBERS, "tool", "tool_ok", "tool_s")
LOOP_FIELDS: Final = ("reward", "reward_s", "env_start_s", "rl_step")
"""What a trace may record of an RL loop, by trajectory."""
OK: Final = (False, True, None)
"""By code of `tool_ok`: the last answers to `NONE`."""


Row: TypeAlias = tuple[int, int, int, int, int, int, float]
"""Prompt, shared, output and tool tokens, codes of tool and `tool_ok`, and `tool_s`."""


class StepTable:
    """Steps of many trajectories, a row each. Do not change its arrays.

    `rows` has a field for each of `StepScript`; tools are codes into `tools`, `tool_ok` is 0, 1 or
    `NONE`. `row(number)` reads one row much faster than numpy does.
    """

    __slots__ = ("_bytes", "_read", "_size", "rows", "tools")

    def __init__(self, rows: npt.NDArray[Any], tools: Sequence[str | None]) -> None:
        """`tools` has a last word more, None, for the code `NONE`."""
        self.rows, self.tools = rows, tools
        number = "i" if rows.dtype["tool"] == np.int32 else "q"
        row = Struct(f"={6 * number}d")
        self._read, self._size = row.unpack_from, row.size
        self._bytes: memoryview = rows.view(np.uint8).data

    @staticmethod
    def made(columns: dict[str, npt.NDArray[Any]], tools: Sequence[str]) -> "StepTable":
        """Put columns, one for each field, into one table."""
        largest = max((int(columns[name].max(initial=0)) for name in _NUMBERS), default=0)
        number = np.int32 if largest < 2**31 else np.int64
        kinds = [(name, number) for name in _FIELDS[:-1]]
        rows = np.empty(len(columns["tool"]), np.dtype([*kinds, ("tool_s", np.float64)]))
        for name, values in columns.items():
            rows[name] = values
        return StepTable(rows, [*tools, None])

    @staticmethod
    def of(steps: Iterable[StepScript]) -> "StepTable":
        """The steps, one after another."""
        tools = Words()
        listed = [
            (
                step.prompt_tokens,
                step.shared_tokens,
                step.output_tokens,
                step.tool_tokens,
                tools[step.tool],
                NONE if step.tool_ok is None else int(step.tool_ok),
                step.tool_s,
            )
            for step in steps
        ]
        columns = zip(*listed, strict=True) if listed else [()] * len(_FIELDS)
        kinds = [np.int64] * 6 + [np.float64]
        made = {
            name: np.array(values, kind)
            for name, values, kind in zip(_FIELDS, columns, kinds, strict=True)
        }
        return StepTable.made(made, tools.listed())

    def row(self, number: int) -> Row:
        return self._read(self._bytes, number * self._size)

    def step(self, number: int) -> StepScript:
        prompt, shared, output, added, tool, ok, tool_s = self.row(number)
        return StepScript(prompt, shared, output, self.tools[tool], tool_s, OK[ok], added)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepTable, (self.rows, self.tools)


class ScriptSteps(Sequence[StepScript]):
    """The steps of one trajectory, made on demand."""

    __slots__ = ("start", "stop", "table")

    def __init__(self, table: StepTable, start: int, stop: int) -> None:
        """The rows of `table` from `start` on, before `stop`."""
        self.table, self.start, self.stop = table, start, stop

    @staticmethod
    def of(steps: Sequence[StepScript]) -> "ScriptSteps":
        """The steps in a table; the same object if they are in one."""
        if isinstance(steps, ScriptSteps):
            return steps
        return ScriptSteps(StepTable.of(steps), 0, len(steps))

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: SupportsIndex) -> StepScript: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepScript, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> StepScript | tuple[StepScript, ...]:
        rows = range(self.start, self.stop)[index]
        if isinstance(rows, range):
            return tuple(map(self.table.step, rows))
        return self.table.step(rows)

    def __iter__(self) -> Iterator[StepScript]:
        return map(self.table.step, range(self.start, self.stop))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return ScriptSteps, (self.table, self.start, self.stop)


class Scripts(Sequence[TrajectoryScript]):
    """Scripts of a workload. Do not change its arrays.

    `arrival_s`, `truncated`, `groups` and `tasks` have an item for each trajectory, the last two
    as codes into `group_names` and `task_names`. Trajectory k has the rows of `table` from
    `start[k]` on, before `stop[k]`. `recorded` has columns of `LOOP_FIELDS`, NaN where a
    trajectory has no value, and only those with any. Pickled with protocol 5, its arrays can be
    shared.
    """

    __slots__ = (
        "arrival_s",
        "group_names",
        "groups",
        "ids",
        "recorded",
        "start",
        "stop",
        "table",
        "task_names",
        "tasks",
        "truncated",
    )

    def __init__(
        self,
        *,
        ids: Sequence[str],
        groups: Codes,
        group_names: Sequence[str],
        tasks: Codes,
        task_names: Sequence[str],
        arrival_s: Floats,
        truncated: Bools,
        start: Ints,
        stop: Ints,
        table: StepTable,
        recorded: Mapping[str, Floats] = MappingProxyType({}),
    ) -> None:
        self.recorded = recorded
        self.ids, self.arrival_s, self.truncated = ids, arrival_s, truncated
        self.groups, self.group_names = groups, group_names
        self.tasks, self.task_names = tasks, task_names
        self.start, self.stop, self.table = start, stop, table

    @staticmethod
    def of(scripts: Iterable[TrajectoryScript]) -> "Scripts":
        """The scripts in columns; the same object if they are."""
        if isinstance(scripts, Scripts):
            return scripts
        listed = tuple(scripts)
        groups, tasks = Words(), Words()
        count = np.array([len(script.steps) for script in listed], np.int64)
        stop = np.cumsum(count)
        return Scripts(
            ids=[script.id for script in listed],
            groups=groups.codes(script.group for script in listed),
            group_names=groups.listed(),
            tasks=tasks.codes(script.task for script in listed),
            task_names=tasks.listed(),
            arrival_s=np.array([script.arrival_s for script in listed], np.float64),
            truncated=np.array([script.truncated for script in listed], np.bool_),
            start=stop - count,
            stop=stop,
            table=StepTable.of(chain.from_iterable(script.steps for script in listed)),
            recorded=recorded_columns(
                {
                    name: np.array([getattr(script, name) for script in listed], np.float64)
                    for name in LOOP_FIELDS
                }
            ),
        )

    @property
    def steps(self) -> Ints:
        """The number of steps of each trajectory."""
        return self.stop - self.start

    def column(self, name: str) -> Any:
        """A field of every step, trajectories one after another."""
        return self.table.rows[name][positions(self.start, self.stop)]

    def total(self, name: str) -> Ints:
        """The sum over the steps of each trajectory, of a field of tokens."""
        return sums(self.table.rows[name], self.start, self.stop)

    def first(self, name: str) -> Any:
        """A field of each trajectory's first step."""
        return self.table.rows[name][self.start]

    def largest_context(self) -> Ints:
        """Tokens that each trajectory's context grows to."""
        context = self.column("prompt_tokens").astype(np.int64)
        context += self.column("output_tokens")
        count = self.steps
        return np.asarray(np.maximum.reduceat(context, np.cumsum(count) - count), np.int64)

    def take(self, chosen: Ints | Bools | slice) -> "Scripts":
        """Some of the scripts, in any order, by numbers, a mask or a slice; steps are shared."""
        places: Any = np.arange(len(self.ids))[chosen]
        return Scripts(
            ids=[self.ids[place] for place in places.tolist()],
            groups=self.groups[places],
            group_names=self.group_names,
            tasks=self.tasks[places],
            task_names=self.task_names,
            arrival_s=self.arrival_s[places],
            truncated=self.truncated[places],
            start=self.start[places],
            stop=self.stop[places],
            table=self.table,
            recorded={name: values[places] for name, values in self.recorded.items()},
        )

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: SupportsIndex) -> TrajectoryScript: ...
    @overload
    def __getitem__(self, index: slice) -> "Scripts": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "TrajectoryScript | Scripts":
        if isinstance(index, slice):
            return self.take(index)
        place = range(len(self.ids))[index]
        return next(self._made(slice(place, place + 1)))

    def __iter__(self) -> Iterator[TrajectoryScript]:
        return self._made(slice(None))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self.ids))

    def __repr__(self) -> str:
        return f"<{len(self.ids):,} scripts>"

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(
            Scripts,
            ids=self.ids,
            groups=self.groups,
            group_names=self.group_names,
            tasks=self.tasks,
            task_names=self.task_names,
            arrival_s=self.arrival_s,
            truncated=self.truncated,
            start=self.start,
            stop=self.stop,
            table=self.table,
            recorded=dict(self.recorded),
        )
        return made, ()

    def _made(self, own: slice) -> Iterator[TrajectoryScript]:
        table, groups, tasks = self.table, self.group_names, self.task_names
        loop = zip(*(self._plain(name, own) for name in LOOP_FIELDS), strict=False)
        for id_, group, task, arrival_s, start, stop, truncated in zip(
            self.ids[own],
            self.groups[own].tolist(),
            self.tasks[own].tolist(),
            self.arrival_s[own].tolist(),
            self.start[own].tolist(),
            self.stop[own].tolist(),
            self.truncated[own].tolist(),
            strict=True,
        ):
            steps = ScriptSteps(table, start, stop)
            yield TrajectoryScript(
                id_, groups[group], tasks[task], arrival_s, steps, truncated, *next(loop)
            )

    def _plain(self, name: str, own: slice) -> Iterable[Any]:
        """One of `LOOP_FIELDS` as Python values; None where nothing is recorded."""
        values = self.recorded.get(name)
        if values is None:
            return repeat(None)
        kind = int if name == "rl_step" else float
        return [None if value != value else kind(value) for value in values[own].tolist()]


def recorded_columns(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """The columns that have a value."""
    return {name: values for name, values in columns.items() if not np.isnan(values).all()}
