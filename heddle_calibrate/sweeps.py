"""Sweeps: measurements of an engine, as a file that a profile is fitted to.

`heddle_calibrate.measure` writes them and `heddle_calibrate.fit` reads them, usually on another
machine. Times are seconds, sizes tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from heddle_core.bounds import Bounds, bound_faults
from heddle_core.json_faults import NO_JSON

SCHEMA = "heddle.sweep/1"


class SweepError(ValueError):
    """A sweep that cannot be read or used; the message names file, field and remedy."""


MOST: Final = 10**9
"""Longer times, and contexts, are mistakes."""
Count: TypeAlias = Annotated[int, Bounds(0)]
AtLeastOne: TypeAlias = Annotated[int, Bounds(1)]
Tokens: TypeAlias = Annotated[int, Bounds(0, MOST)]
Measured: TypeAlias = Annotated[float, Bounds(0, MOST)]
Positive: TypeAlias = Annotated[float, Bounds(above=0, most=MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Fields of every measurement."""

    order: Count
    """Its position in the sweep, which is shuffled, so that drift is visible."""
    tp: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTrial(Trial):
    """A batch of equal steps that decode together; means over the iterations that they share."""

    held_out: bool
    """Whether its cell is off the grid, for checking only, never to fit the ground truth."""
    batch: Count
    context: Tokens
    """Of each at its start."""
    step_s: Positive
    """Seconds per iteration."""
    mean_batch: Positive
    """Below `batch` when the first had ended before the last began."""
    mean_context: Measured
    """Of all of them together in one iteration, each new token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTrial(Trial):
    """A prompt, or several alike in the same iterations, of which all but the cached part is
    computed for one token, alone or beside a decoding batch."""

    held_out: bool
    batch: Count
    """Sequences that decode beside; 0 when it is alone on the engine."""
    mean_context: Measured
    """What they hold together."""
    together: AtLeastOne
    """Prompts at once."""
    prompt: Tokens
    cached: Count
    """As the engine reported it."""
    prefill_s: Positive
    """From the first prefill to the token."""
    queued_s: Measured
    wall_s: Measured
    """From the request of the step to the report of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTrial(Trial):
    """A step that was aborted and started again with the tokens that it had."""

    prompt: Tokens
    """Of the second dispatch."""
    cached: Count
    abort_s: Measured
    """From the request of the abort to the report of the end."""
    resume_s: Measured
    """From the second dispatch to its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTrial(Trial):
    """A context that was brought to another engine."""

    target_tp: Count
    batch: Count
    """Sequences that decode on each of the two meanwhile."""
    context: Tokens
    way: str
    """"kv", "prefill" or "none"."""
    kv_tokens: Count
    """At the target afterwards."""
    kv_bytes: Count
    """Of the handle; 0 without one."""
    export_s: Measured
    """From the request to the source to its answer; 0 without one."""
    place_s: Measured
    """From the request to the target to its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStopTrial(Trial):
    others: Count
    """Engines that were ready already."""
    start_s: Positive
    stop_s: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepTrial(Trial):
    """An engine that released its memory and took it again."""

    level: Count
    """1 keeps the weights in main memory, 2 drops them."""
    sleep_s: Measured
    wake_s: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocationTrial(Trial):
    """The same decoding batch, alone and while another engine on the same machine decodes."""

    batch: Count
    context: Tokens
    alone_s: Positive
    """Seconds per iteration."""
    beside_s: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """One step of a client of a `LoopTrial`."""

    prompt: Tokens
    """The whole context."""
    output: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTrial(Trial):
    """Clients with growing contexts, each sending its next step when the last one ends. Never
    fitted: its simulation tests all parts of a profile together."""

    clients: tuple[tuple[LoopStep, ...], ...]
    makespan_s: Positive
    ttft_s: Measured
    """Mean over steps: queue and prefill."""
    tpot_s: Measured
    """Mean over steps: decode time over tokens but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTrial(Trial):
    """A closed loop of clients that send new prompts, as in serving benchmarks; means over
    requests. Never fitted."""

    input_tokens: AtLeastOne
    """The longest prompt; lengths are drawn from 0.8 of it."""
    output_tokens: AtLeastOne
    """The longest output, drawn likewise."""
    concurrency: AtLeastOne
    requests: AtLeastOne
    ttft_s: Positive
    tpot_s: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One sweep of one model on one machine."""

    schema: Literal["heddle.sweep/1"]
    made: str
    """UTC."""
    command: str
    size: str
    """Which cells: "quick", "small" or "full"."""
    seed: int
    engine: str
    """What kind of engine: "vllm", "fake"."""
    model: str
    gpu: str
    model_config: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    """Further settings of the engines."""
    max_running: AtLeastOne
    max_batched_tokens: AtLeastOne
    """The most tokens of one iteration."""
    block_tokens: AtLeastOne
    kv_bytes_per_token: AtLeastOne
    """Over all GPUs of an engine."""
    precision: str
    kv_capacity_tokens: dict[str, int]
    """By TP degree, as text because JSON keys are text."""
    decode: tuple[DecodeTrial, ...] = ()
    prefill: tuple[PrefillTrial, ...] = ()
    aborts: tuple[AbortTrial, ...] = ()
    moves: tuple[MoveTrial, ...] = ()
    lives: tuple[StartStopTrial, ...] = ()
    naps: tuple[SleepTrial, ...] = ()
    beside: tuple[ColocationTrial, ...] = ()
    loops: tuple[LoopTrial, ...] = ()
    served: tuple[ServedTrial, ...] = ()
    spoiled: int = 0
    """Measurements left out because the engine preempted a step."""
    notes: tuple[str, ...] = field(default=())
    """What could not be measured, and why."""

    @property
    def tps(self) -> tuple[int, ...]:
        """TP degrees that were measured, ascending."""
        return tuple(sorted(int(tp) for tp in self.kv_capacity_tokens))


TRIALS = ("decode", "prefill", "aborts", "moves", "lives", "naps", "beside", "loops", "served")


def encode_sweep(sweep: Sweep) -> bytes:
    """Format a sweep as JSON, one trial a line."""
    plain: dict[str, Any] = msgspec.to_builtins(sweep)
    parts = []
    for name, value in plain.items():
        if name in TRIALS and value:
            rows = ",\n    ".join(msgspec.json.encode(row).decode() for row in value)
            parts.append(f'  "{name}": [\n    {rows}\n  ]')
        else:
            parts.append(f'  "{name}": {msgspec.json.encode(value).decode()}')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def read_sweep(path: Path) -> Sweep:
    """Read a sweep and check that its numbers can have been measured.

    Raises:
        SweepError: it is missing, cut short, of another schema, or holds impossible values.
    """
    try:
        text = path.read_bytes()
    except OSError as e:
        raise SweepError(f"cannot read the sweep {path}: {e.strerror}") from None
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any]).get("schema")
    except NO_JSON as e:
        raise SweepError(
            f"{path}: not JSON to its end ({e}); measure again if it was cut short"
        ) from None
    if schema != SCHEMA:
        raise SweepError(
            f"{path}: its schema is {schema!r}, not {SCHEMA!r}; give a file that "
            f"`heddle profile measure` of this version wrote"
        )
    try:
        sweep = msgspec.json.decode(text, type=Sweep)
    except (msgspec.ValidationError, UnicodeDecodeError) as e:
        raise SweepError(f"{path}: {e}") from None
    for fault in _faults(sweep):
        raise SweepError(f"{path}: {fault}; measure again")
    return sweep


def _faults(sweep: Sweep) -> Iterator[str]:
    yield from bound_faults(sweep)
    if not sweep.kv_capacity_tokens:
        yield "kv_capacity_tokens names no TP degree"
    for tp, tokens in sweep.kv_capacity_tokens.items():
        if not (tp.isdecimal() and int(tp) > 0 and tokens > 0):
            yield f"kv_capacity_tokens.{tp} must give a TP degree its tokens, not {tokens}"
    for name in TRIALS:
        trials: Sequence[Trial] = getattr(sweep, name)
        for i, trial in enumerate(trials):
            for fault in _trial_faults(trial, sweep):
                yield f"{name}[{i}].{fault}"


def _trial_faults(trial: Trial, sweep: Sweep) -> Iterator[str]:
    if trial.tp not in sweep.tps:
        yield f"tp is {trial.tp}, which kv_capacity_tokens does not name"
    if isinstance(trial, PrefillTrial) and trial.cached >= trial.prompt:
        yield f"cached is {trial.cached}, which is not below prompt, {trial.prompt}"
    if isinstance(trial, LoopTrial) and not all(trial.clients):
        yield "clients has one without steps"


_MAY_DIFFER = ("made", "command", "seed", "spoiled", "notes", *TRIALS)
"""Between pooled sweeps; all other fields describe the engine and the machine."""


def pooled(sweeps: Mapping[Path, Sweep]) -> Sweep:
    """All trials together, one sweep after the other, with the date of the first.

    Raises:
        SweepError: they are of different engines, or none is given.
    """
    if not sweeps:
        raise SweepError("no sweep to fit; name one or more")
    (first_path, first), *others = sweeps.items()
    for path, other in others:
        for each in fields(Sweep):
            if each.name in _MAY_DIFFER:
                continue
            here, there = (_without_commit(getattr(sweep, each.name)) for sweep in (other, first))
            if here != there:
                raise SweepError(
                    f"{path}: {each.name} is {here}, in {first_path} it is {there}; only sweeps "
                    f"of the same engine on the same machine are fitted together"
                )
    trials: dict[str, Any] = {name: _renumbered(list(sweeps.values()), name) for name in TRIALS}
    return replace(
        first,
        spoiled=sum(sweep.spoiled for sweep in sweeps.values()),
        notes=tuple(dict.fromkeys(note for sweep in sweeps.values() for note in sweep.notes)),
        **trials,
    )


def _without_commit(value: Any) -> Any:
    """Versions without that of Heddle's source: another commit changes no engine."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key != "git_commit"}
    return value


def _renumbered(sweeps: list[Sweep], name: str) -> tuple[Any, ...]:
    """Trials whose order continues from one sweep to the next, so that drift is visible."""
    trials: list[Any] = []
    begin = 0
    for sweep in sweeps:
        trials += [replace(t, order=t.order + begin) for t in getattr(sweep, name)]
        begin += 1 + max((t.order for n in TRIALS for t in getattr(sweep, n)), default=-1)
    return tuple(trials)
