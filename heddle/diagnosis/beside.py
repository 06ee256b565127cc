"""A prediction beside what was measured: figures, parts, and the cause of the difference."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from heddle.cluster.profiles import load_profiles
from heddle.diagnosis.again import Ran, Rollouts
from heddle.diagnosis.causes import UNKNOWN, Cause, Differences, cause_of
from heddle.diagnosis.fitted import Constants, FittedConstants, lives, matched
from heddle.diagnosis.verdict import Diagnosis, diagnosed, summed
from heddle_calibrate.check import FIGURES, Figure, compare_figures
from heddle_trace.observed.columns import ObservedSteps

SCHEMA: Final = "heddle.verify/1"
COMPARED: Final = (*FIGURES, "queueing_mean_s", "generation_mean_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """Seconds of one part of all steps."""

    part: str
    measured_s: float
    simulated_s: float
    difference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What ran, measured and simulated."""

    source: str
    ran: Mapping[str, Any]
    measured_s: float
    simulated_s: float
    steps: tuple[Mapping[str, Any], ...]
    figures: Mapping[str, Figure]
    parts: tuple[ComparedPart, ...]
    """Their differences sum to that of the whole."""
    cause: Cause
    not_recorded: tuple[str, ...]
    kernel: float = 1.0
    """Factor on the profile's times, which makes requests decode as long as was measured."""
    by_profile: "Verified | None" = None
    """Without that factor."""

    @property
    def error_pct(self) -> float:
        """Of the simulated time."""
        return (self.simulated_s / self.measured_s - 1.0) * 100.0 if self.measured_s else 0.0

    @property
    def sentence(self) -> str:
        """Both times, where the difference is, and why."""
        error = f"{self.error_pct:+.1f} %"
        if self.by_profile is not None:
            alone = f"{self.by_profile.error_pct:+.1f} % by the profile alone"
            error = f"{error} at the measured speed of decode, {alone}"
        said = (
            f"Heddle predicts {self.simulated_s:,.1f} s where {self.measured_s:,.1f} s were "
            f"measured ({error})"
        )
        if self.cause.name == "none":
            return f"{said}: {self.cause.why}."
        gap_s = self.simulated_s - self.measured_s
        most = max(self.parts, key=lambda each: each.difference_s * np.sign(gap_s))
        likely = "its cause is" if self.cause.name == UNKNOWN else "likely cause:"
        return (
            f"{said}; most of it is {most.part} ({most.difference_s:+,.1f} s); {likely} "
            f"{self.cause.name} ({self.cause.why})."
        )

    def plain(self, fitted: FittedConstants | None) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "verdict": self.sentence,
            "error_pct": self.error_pct,
            **asdict(self),
            "by_profile": None if self.by_profile is None else self.by_profile.plain(None),
            "fit": None if fitted is None else asdict(fitted),
        }


def beside(ran: Ran, simulated: Rollouts) -> Verified:
    """Put a prediction beside what was measured, both decomposed alike.

    Raises:
        TraceError: the measured steps cannot be of one run.
    """
    mine, theirs = ([diagnosed(each, "") for each in runs] for runs in (ran.seen, simulated))
    took, made = (summed(each.parts for each in of) for of in (mine, theirs))
    figures = compare_figures(figures_of(ran.seen), figures_of(simulated), COMPARED)
    measured_s, simulated_s = sum(took.values()), sum(made.values())
    hits = figures["prefix_hit"].error_pct
    own, other = _of_trajectories(ran.seen), _of_trajectories(simulated)
    lasted_s = sum(own.values()) or 1.0
    requests = matched(ran.seen, simulated)
    cause = cause_of(
        Differences(
            makespan=(measured_s - simulated_s) / measured_s if measured_s else 0.0,
            seconds={n: (own.get(n, 0.0) - other.get(n, 0.0)) / lasted_s for n in own | other},
            hits=None if hits is None else -hits / 100.0,
            engines=(_engines(ran.seen), _engines(simulated)),
            left=requests.left(Constants()),
            left_by_host=requests.left(requests.by_host()),
            left_by_kernels=requests.left(requests.by_kernels()),
            kernel=requests.by_kernels().kernel,
            beside=load_profiles(ran.config.cluster, check_tp=False).costs.beside,
        )
    )
    return Verified(
        source=ran.source,
        ran=_ran(ran),
        measured_s=measured_s,
        simulated_s=simulated_s,
        steps=_steps(mine, theirs),
        figures=figures,
        parts=tuple(
            ComparedPart(
                part=name,
                measured_s=took.get(name, 0.0),
                simulated_s=made.get(name, 0.0),
                difference_s=made.get(name, 0.0) - took.get(name, 0.0),
            )
            for name in dict.fromkeys((*took, *made))
        ),
        cause=cause,
        not_recorded=mine[0].absent,
    )


def _ran(ran: Ran) -> dict[str, Any]:
    cluster = ran.config.cluster
    return {
        "policy": ran.config.policy.preset,
        "model": cluster.model,
        "engines": [{"gpu": e.gpu, "gpus": e.gpus, "tp": e.tp} for e in cluster.classes],
        "max_running": cluster.max_running,
    }


def _steps(mine: list[Diagnosis], theirs: list[Diagnosis]) -> tuple[Mapping[str, Any], ...]:
    """Each step, where as many were simulated as measured."""
    own, other = ([step for each in of for step in each.steps] for of in (mine, theirs))
    if len(own) != len(other):
        return ()
    return tuple(
        {"label": a.label, "measured_s": a.end_s - a.start_s, "simulated_s": b.end_s - b.start_s}
        for a, b in zip(own, other, strict=True)
    )


def _engines(seen: Rollouts) -> int:
    return len({name for each in seen for name in each.column("engine").occurring()})


def _of_trajectories(seen: Rollouts) -> dict[str, float]:
    """Seconds of all trajectories by part, as if each had run by itself."""
    alone = (
        replace(each, header=msgspec.structs.replace(each.header, clock="trajectory"))
        for each in seen
    )
    return summed(diagnosed(each, "").parts for each in alone)


def figures_of(seen: Rollouts) -> dict[str, float | None]:
    """`COMPARED` of rollouts; None of what is not recorded. TTFT counts the queue."""
    found = [lives(each) for each in seen]
    ended = np.concatenate([last_s - first_s.min() for _, first_s, last_s in found])
    made = _column(seen, "output_tokens")
    decode_s, prefill_s, queue_s = (_column(seen, f"{p}_s") for p in ("decode", "prefill", "queue"))
    llm_s = np.nansum([decode_s, prefill_s, queue_s, _column(seen, "llm_s")], axis=0)
    given, cached = _column(seen, "input_tokens"), _column(seen, "cached_tokens")
    known = ~np.isnan(given) & ~np.isnan(cached)
    waits_s = np.nan_to_num(queue_s)
    p50, p99 = np.percentile(ended, [50.0, 99.0])
    return {
        "makespan_s": sum(float(last.max() - first.min()) for _, first, last in found),
        "completion_p50_s": float(p50),
        "completion_p99_s": float(p99),
        "tpot_mean_ms": _mean(decode_s[made >= 2] / (made[made >= 2] - 1.0) * 1e3),
        "ttft_mean_s": _mean(waits_s + prefill_s),
        "prefix_hit": float(cached[known].sum() / given[known].sum()) if known.any() else None,
        "queueing_mean_s": _mean(queue_s),
        "generation_mean_s": _mean(llm_s),
    }


def _column(seen: Rollouts, name: str) -> Any:
    """A field of all requests; NaN where it is not recorded."""

    def values(each: ObservedSteps) -> Any:
        column = each.column(name)
        return np.where(column.known, column.values, np.nan)

    return np.concatenate([values(each) for each in seen])


def _mean(values: Any) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
