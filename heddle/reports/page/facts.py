"""A run's facts on the page: summary, bound, settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

from heddle.reports.colours import policy_dashes, policy_shade
from heddle.reports.labels import labels
from heddle.reports.tried import TriedSettings, tried_settings
from heddle.runs import Run, RunError
from heddle.runs.conditions import lateness_note
from heddle.runs.record import Record

BoundOf: TypeAlias = Callable[[Run], Mapping[str, Any]]
"""Finds the lower bounds of a run's makespan in seconds, or `why` there are none."""


def same_trace(runs: Sequence[Run]) -> None:
    """Refuse runs of different traces: what is drawn over each other must be the same work.

    Raises:
        RunError: two runs replayed different traces.
    """
    first = runs[0].manifest["trace"]
    for run in runs[1:]:
        other = run.manifest["trace"]
        if other["sha256"] != first["sha256"]:
            raise RunError(
                f"{run.path}: replays {other['name']} (sha256 {other['sha256'][:8]}), and "
                f"{runs[0].path} {first['name']} ({first['sha256'][:8]}); a page compares runs of "
                "one trace: make one page for each"
            )


def facts(runs: Sequence[Run], bound_of: BoundOf) -> list[dict[str, Any]]:
    """One object for each run, as JSON."""
    # Regimes under one policy have different colours.
    drawn_as = [" ".join(filter(None, (regime_of(run), run.manifest["policy"]))) for run in runs]
    dashes = policy_dashes(drawn_as)
    tried = tried_settings(runs)
    return [
        {
            "label": label,
            "policy": run.manifest["policy"],
            "regime": regime_of(run),
            "seed": run.manifest["seed"],
            "colour": policy_shade(name),
            "dash": dash,
            "path": str(run.path),
            "bound": bound_of(run),
            "how": _how(run, settings),
            "late": lateness_note(run.summary) if run.status == "finished" else None,
            "tried": None if settings is None else asdict(settings),
        }
        for run, name, label, dash, settings in zip(
            runs, drawn_as, labels(runs), dashes, tried, strict=True
        )
    ]


def regime_of(run: Run) -> str | None:
    """The regime of a loop; None of a rollout."""
    loop = run.manifest.get("loop")
    return str(loop["regime"]) if loop else None


class Lasted(Protocol):
    """From when to when a run lasted, and why there is no more of it."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def note(self) -> str | None: ...


def opening(runs: Sequence[Lasted]) -> int:
    """The run that the page shows first, against run 0: the others' shortest that finished."""
    others = range(1, len(runs))
    finished = [at for at in others if runs[at].note is None] or others
    return min(finished, key=lambda at: runs[at].end_s - runs[at].start_s, default=0)


def summary(record: Record) -> Mapping[str, Any]:
    """Figures of a finished run; of any other the few that a part of a run has."""
    if record.note is None:
        return record.run.summary
    t = record.trajectories
    outcome = t["outcome"]
    return {
        "arrived": len(outcome),
        "finished_so_far": int((outcome >= 0).sum()),
        "seconds_so_far": record.end_s - record.start_s,
        "output_tokens": int(t["output_tokens"].sum()),
        "steps": int(t["steps"].sum()),
        "migrations": len(record.migrations["ok"]),
    }


def _how(run: Run, tried: TriedSettings | None) -> dict[str, str]:
    """The settings of the run, for readers."""
    manifest, config = run.manifest, run.config
    cluster = config.cluster
    history = manifest.get("history") or {}
    # What real engines were, when a run had any, is in no configuration of ours.
    world = manifest.get("world") or {}
    engines = f", {world['engine']} engines" if "engine" in world else ""
    pools = " + ".join(f"{count} x {gpu}" for gpu, count in cluster.pools.items())
    gpus = str(world.get("gpus", pools))
    loop = manifest.get("loop")
    beside = {} if not loop else {k: v for k, v in loop["config"].items() if v is not None}
    return {
        **({"regime": loop["regime"]} if loop else {}),
        "policy": manifest["policy"],
        "seed": str(manifest["seed"]),
        "cluster": f"{cluster.gpus} x {world['gpu']}" if "gpu" in world else gpus,
        **({"times of the GPU class": str(world["derived"])} if "derived" in world else {}),
        "dollars of a GPU and hour": ", ".join(
            f"{gpu} {dollars:g}" for gpu, dollars in config.prices.items()
        )
        or "no price",
        "model": str(world.get("model", cluster.model)),
        "TP of engines that are not planned": cluster.tps,
        **({"setting": tried.among} if tried is not None else {}),
        "running steps per engine": str(cluster.max_running),
        "speculative decoding": cluster.speculation,
        "tool calls at once": str(cluster.tool_capacity or "no limit"),
        **({"pools of tools": ", ".join(cluster.tool_pools)} if cluster.tool_pools else {}),
        **({"added to tool calls, s": cluster.env_latency} if cluster.env_latency else {}),
        "failures": cluster.failures or "none",
        **{name.replace("_", " "): str(value) for name, value in beside.items()},
        "history": str(history.get("name") or "none"),
        "shown the future": "yes: a bound, no result" if manifest.get("oracle") else "no",
        "driver": f"{manifest.get('driver')}{engines}",
        "heddle": str(manifest.get("versions", {}).get("heddle")),
        "commit": str(manifest.get("git_commit") or "unknown"),
        "started": str(manifest.get("started")),
        "run directory": str(run.path),
        "command": str(manifest.get("command_line")),
    }
