"""Functions for notebooks: tables, pictures, runs and measurements of engines.

Nothing here decides or measures by itself. Tables are pandas DataFrames with numbers of four
digits, keyed as the JSON of the command line; pictures show themselves as the last value of a cell.

Engines are driven in a process of their own: Jupyter's has an event loop that runs already, and an
interrupt of the kernel reaches that process too, which winds the run up.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pandas as pd

from heddle.calibration.measure import choose_sweep, sweep_engines
from heddle.comparison.result import Comparison
from heddle.config import RunConfig
from heddle.executor import Worker
from heddle.loops.result import LoopComparison
from heddle.reports.figures import draw
from heddle.reports.labels import labels
from heddle.reports.result_figures import draw_clusters, draw_regimes
from heddle.reports.trace_figures import draw_trace
from heddle.running import run as run_here
from heddle.runs import Run
from heddle.search.clusters import SearchedClusters
from heddle.simulation import RUN_KEYS, RunResult
from heddle_calibrate.check import FIGURES, Checked
from heddle_calibrate.fit.from_sweep import fit_sweep
from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.sweeps import Sweep, encode_sweep
from heddle_sim.profile_files import Profile
from heddle_trace.files import read_trace
from heddle_trace.stats import describe

P = ParamSpec("P")
T = TypeVar("T")

SHOWN_PX = 680
"""Width of a picture in a page; files have more pixels, for sharp screens."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG image that Jupyter shows."""

    png: bytes

    def __repr__(self) -> str:
        return f"Picture({len(self.png):,} bytes)"

    def _repr_png_(self) -> tuple[bytes, Mapping[str, int]]:
        return self.png, {"width": SHOWN_PX}


def picture(path: str | Path) -> Picture:
    """Read a PNG file.

    Raises:
        OSError: it cannot be read.
    """
    return Picture(Path(path).read_bytes())


def figures(runs: Sequence[Run]) -> dict[str, Picture]:
    """Draw finished runs: `completion`, `active`, `queueing`, and `timeline-...` for each run."""
    with tempfile.TemporaryDirectory() as folder:
        return {path.stem: picture(path) for path in draw(runs, Path(folder))}


def trace_figure(path: str | Path) -> Picture:
    """Draw a trace: length and step tails, tool seconds, and the spread inside groups.

    Raises:
        TraceError: it is no trace.
    """
    trace = read_trace(Path(path))
    return _drawn(partial(draw_trace, trace, describe(trace)))


def _drawn(draw_into: Callable[[Path], None]) -> Picture:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        draw_into(path)
        return picture(path)


def policies_table(comparison: Comparison) -> pd.DataFrame:
    """One row for each policy, means over seeds.

    `makespan_s`, with several seeds the half-width of its 95 % confidence interval,
    `throughput_tok_s`, `gpu_hours` and `dollars` of a rollout, `speedup` over the first policy,
    throughput over the best baseline where TP degrees were tried, and the share of the bound.
    """
    rows = [
        {
            "policy": p.policy,
            "makespan_s": p.makespan_s.mean,
            **({} if p.makespan_s.ci95 is None else {"ci95_s": p.makespan_s.ci95}),
            "throughput_tok_s": p.throughput_tok_s.mean,
            **p.cost.plain(),
            "speedup": p.speedup,
            **({"over_best_baseline": over} if (over := comparison.over_best_baseline(p)) else {}),
            "bound_fraction": p.bound_fraction,
        }
        for p in comparison.policies
    ]
    return _table(rows, "policy")


def clusters_table(found: SearchedClusters) -> pd.DataFrame:
    """One row for each cluster, the recommended first; docs/plan.md says what."""
    rows = [
        {
            "cluster": row.name,
            "policy": row.best.candidate.policy,
            "setting": row.best.setting,
            "makespan_s": row.makespan_s,
            "low": row.best.makespan_s.low,
            "high": row.best.makespan_s.high,
            "gpu_hours": row.cost.gpu_hours,
            "dollars": row.cost.dollars,
            "in_time": not found.limits.late(row),
        }
        for row in found.clusters
    ]
    return _table(rows, "cluster")


def clusters_figure(found: SearchedClusters) -> Picture:
    """Makespan against dollars of each cluster."""
    return _drawn(partial(draw_clusters, found))


def regimes_table(comparison: LoopComparison) -> pd.DataFrame:
    """One row for each regime at its best setting, means over seeds; docs/loop.md says what."""
    rows = [
        {
            "regime": row.setup.name,
            "train_gpus": row.setup.train_gpus,
            "step_s": row.step_s.mean,
            "samples_per_s": row.samples_per_s,
            "gpu_hours_per_1k_samples": row.cost_per_1k_samples.gpu_hours,
            "dollars_per_1k_samples": row.cost_per_1k_samples.dollars,
            "rollout_busy": row.rollout_busy,
            "train_busy": row.train_busy,
            "staleness": row.mean_staleness,
            "wasted": row.wasted_share,
            "length_bias": row.length_bias,
            "bound_fraction": row.bound_fraction,
        }
        for row in comparison.regimes
    ]
    return _table(rows, "regime")


def regimes_figure(comparison: LoopComparison) -> Picture:
    """Samples a second over staleness and length bias."""
    return _drawn(partial(draw_regimes, comparison))


def runs_table(
    runs: Sequence[Run] | Mapping[str, Run], keys: Sequence[str] = RUN_KEYS
) -> pd.DataFrame:
    """One row for each run with figures of its summary; docs/run-directory.md defines them.

    Runs are called by policy and seed, or as `runs` names them.
    """
    if not isinstance(runs, Mapping):
        runs = dict(zip(labels(runs), runs, strict=True))
    rows = [{"run": name} | {key: run.summary[key] for key in keys} for name, run in runs.items()]
    return _table(rows, "run")


# -- engines --------------------------------------------------------------------------------------


def run(config: RunConfig, out: Path) -> RunResult:
    """Roll out on the engines that `config.runtime` names; `heddle.running.run`, apart.

    Policies must be importable there: one that is defined in a notebook is not.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        OSError: the run directory cannot be written.
    """
    return _apart(run_here, config, out=out)


def measure(config: RunConfig, out: Path, *, max_running: int, max_context: int) -> Sweep:
    """Sweep the engines of `config.runtime` at `config.cluster.tp` and write the sweep to `out`.

    As `heddle profile measure --sweep small`, without its progress. Real engines take minutes,
    fake ones seconds.

    Raises:
        ValueError: vLLM, the model or the profile is not there, or a number is out of range.
        MeasureError: an engine failed or does not answer.
        OSError: `out` cannot be written.
    """
    return _apart(_measure, config, out, max_running, max_context)


def _measure(config: RunConfig, out: Path, max_running: int, max_context: int) -> Sweep:
    spec, model = choose_sweep(
        config,
        (config.cluster.tp,),
        size="small",
        model=None,
        gpu=None,
        max_running=max_running,
        max_context=max_context,
    )
    return sweep_engines(
        config,
        spec,
        model=model,
        on_progress=lambda done, total, what: None,
        save=lambda sweep: _write(out, encode_sweep(sweep)),
    )


def _apart(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a new process, which handles interrupts of the kernel itself."""
    with Worker("direct") as worker:
        return worker.submit(do, *args, **kwargs).result()


# -- calibration ----------------------------------------------------------------------------------


def fit(sweep: Sweep, out: Path) -> Profile:
    """Fit a profile to a sweep and write it to `out`, a name that ends in `.json`.

    Raises:
        FitError: too few measurements, or times that are no engine's.
        OSError: `out` cannot be written.
    """
    profile = fit_sweep(sweep, file=out.name)
    _write(out, encode_profile(profile))
    return profile


def fit_table(profile: Profile) -> pd.DataFrame:
    """Relative errors of a profile in percent: what was fitted, and what was held out."""
    rows = [
        {"part": part, "tp": tp} | {key: error[key] for key in ("median_pct", "worst_pct")}
        for tp in profile.tps
        for part, error in profile.at(tp).errors.items()
        if error.get("points")
    ]
    return _table(rows, "part")


def decode_table(
    profiles: Mapping[str, Profile], *, tp: int, batches: Sequence[int], context: int
) -> pd.DataFrame:
    """Milliseconds of an iteration that decodes a batch of sequences with `context` tokens each.

    One row for each batch, one column for each profile.

    Raises:
        ProfileError: a profile lacks this TP degree.
    """
    tables = {name: profile.table(tp) for name, profile in profiles.items()}
    rows = [
        {"batch": batch}
        | {
            f"{name}_ms": 1e3 * (t.base_s[batch] + t.per_context_s[batch] * batch * context)
            for name, t in tables.items()
        }
        for batch in batches
    ]
    return _table(rows, "batch")


def check_table(checked: Checked) -> pd.DataFrame:
    """Figures of a run on engines beside their simulation, and the error in percent."""
    found = [(name, checked.figures[name]) for name in FIGURES]
    rows = [
        {"figure": n, "measured": f.measured, "simulated": f.simulated, "error_pct": f.error_pct}
        for n, f in found
    ]
    return _table(rows, "figure")


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _table(rows: Iterable[Mapping[str, Any]], index: str) -> pd.DataFrame:
    shown = [{key: _digits(value) for key, value in row.items()} for row in rows]
    # As objects, each number is written with its own digits, not with its column's most.
    return pd.DataFrame(shown, dtype=object).set_index(index)


def _digits(value: Any) -> Any:
    """Four digits: what is beyond would differ and mean nothing."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
