"""Hold the simulator against measured serving runs: TPOT and TTFT, with and without host time.

    python benchmarks/check_measured.py --perf ../shared/perf

replays the vLLM runs of Qwen3-32B on H100 in `measured_hopper_dense.csv` (fixed concurrency, input
and output lengths) with the shipped profile, on the simulated engine and on the plain closed-loop
model beside it, and refits host time on one TP degree at a time to show that it carries over. The
exit status is 1 when the engine's mean absolute TPOT error exceeds 4 %.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from heddle_calibrate.fit.kernel_profile import HostFit
from heddle_sim.profile_files import Profile, load_profile
from tools.profiles.closed_loop import LoopResult, replay_on_engine
from tools.profiles.host import (
    FIT_TPS,
    MeasuredRun,
    fit_host,
    ground_truth_tables,
    halves,
    measured_runs,
    replayed,
)

TARGET_PCT = 4.0
RAMP_S = 0.05
"""Clients that start one after the other, for the sensitivity of TTFT to how a benchmark begins."""
NO_HOST = HostFit(per_step_s=0.0, per_running_s=0.0, per_prefill_s=0.0)


def on_engine(profile: Profile, runs: Sequence[MeasuredRun], host: HostFit) -> list[LoopResult]:
    """Replay each run on the simulated engine."""
    tables = ground_truth_tables(profile, host, sorted({r.tp for r in runs}))
    return [replay_on_engine(tables[r.tp], r.loop) for r in runs]


def on_model(profile: Profile, runs: Sequence[MeasuredRun], host: HostFit) -> list[LoopResult]:
    """Replay each run on the plain closed-loop model."""
    return replayed(runs, ground_truth_tables(profile, host, sorted({r.tp for r in runs})))


def line(name: str, runs: Sequence[MeasuredRun], results: Sequence[LoopResult]) -> float:
    """Print one line of errors; returns the mean absolute TPOT error in percent."""
    both = list(zip(results, runs, strict=True))
    tpot = np.array([x.tpot_s / r.tpot_s - 1 for x, r in both]) * 100
    ttft = np.array([x.ttft_s / r.ttft_s - 1 for x, r in both]) * 100
    mean = float(np.abs(tpot).mean())
    print(
        f"{name:<44} {len(runs):>4} {mean:>8.2f} {np.median(tpot):>+8.2f} "
        f"{np.abs(tpot).max():>7.1f} {np.abs(ttft).mean():>9.1f} {np.median(ttft):>+9.1f}"
    )
    return mean


def parts(runs: Sequence[MeasuredRun]) -> list[tuple[str, list[MeasuredRun]]]:
    """Name the subsets worth a line of their own."""
    for_ground_truth, for_estimate = halves(runs)
    by_tp = [(f"TP {tp}", [r for r in runs if r.tp == tp]) for tp in sorted({r.tp for r in runs})]
    never = [r for r in runs if r.tp not in FIT_TPS]
    by_length = [
        (f"prompts of {n}", [r for r in runs if r.loop.input_tokens == n])
        for n in sorted({r.loop.input_tokens for r in runs})
    ]
    named = [
        *by_tp,
        ("half that host time was fitted on", for_ground_truth),
        ("other half", for_estimate),
        ("TP degrees never fitted", never),
        *by_length,
    ]
    return [(name, part) for name, part in named if part]


def each(runs: Sequence[MeasuredRun], results: Sequence[LoopResult]) -> None:
    """Print every run."""
    print(
        "\n tp  input output conc |    TPOT ms  simulated   error |    TTFT ms  simulated   error"
    )
    for x, r in zip(results, runs, strict=True):
        loop = r.loop
        print(
            f"{r.tp:>3} {loop.input_tokens:>6} {loop.output_tokens:>6} {loop.concurrency:>4} | "
            f"{r.tpot_s * 1e3:>10.2f} {x.tpot_s * 1e3:>10.2f} {x.tpot_s / r.tpot_s - 1:>+7.1%} | "
            f"{r.ttft_s * 1e3:>10.0f} {x.ttft_s * 1e3:>10.0f} {x.ttft_s / r.ttft_s - 1:>+7.0%}"
        )


def carries_over(profile: Profile, runs: Sequence[MeasuredRun]) -> None:
    """Fit host time on one TP degree and print the error at each."""
    for tp in FIT_TPS:
        own = [r for r in runs if r.tp == tp]
        if not own:
            continue
        host = fit_host(own, lambda h, tps: ground_truth_tables(profile, h, tps))
        ms = ", ".join(f"{s * 1e3:.4g}" for s in asdict(host).values())
        print(f"\nhost time fitted on TP {tp} alone ({ms} ms per step, sequence, prefill)")
        for other in sorted({r.tp for r in runs}):
            part = [r for r in runs if r.tp == other]
            line(f"  on TP {other}", part, on_engine(profile, part, host))


def main() -> int:
    """Print the report; 0 when the target is met or there is nothing to compare with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perf", type=Path, default=Path("../shared/perf"))
    parser.add_argument("--runs", action="store_true", help="print every run")
    args = parser.parse_args()
    if not (args.perf / "measured_hopper_dense.csv").exists():
        print(f"no measured_hopper_dense.csv in {args.perf}: nothing to compare with")
        return 0
    profile = load_profile("qwen3-32b", "h100")
    h = profile.host
    host = HostFit(
        per_step_s=h.per_step_s, per_running_s=h.per_running_s, per_prefill_s=h.per_prefill_s
    )
    runs = measured_runs(args.perf)
    print(
        f"{profile.model} {profile.gpu}; host time {h.per_step_s * 1e3:g} ms per step, "
        f"{h.per_running_s * 1e3:g} per running sequence, {h.per_prefill_s * 1e3:g} per prefill\n"
        f"{'errors in percent':<44} {'runs':>4} {'TPOT':>8} {'median':>8} {'worst':>7} "
        f"{'TTFT':>9} {'median':>9}"
    )
    results = on_engine(profile, runs, host)
    error = line("engine, all runs", runs, results)
    for name, part in parts(runs):
        line(f"  {name}", part, [x for x, r in zip(results, runs, strict=True) if r in part])
    line("engine, without host time", runs, on_engine(profile, runs, NO_HOST))
    line("plain closed-loop model", runs, on_model(profile, runs, host))
    ramped = [replace(r, loop=replace(r.loop, ramp_s=RAMP_S)) for r in runs]
    name = f"engine, clients start {RAMP_S * 1e3:.0f} ms apart"
    line(name, ramped, on_engine(profile, ramped, host))
    carries_over(profile, runs)
    if args.runs:
        each(runs, results)
    met = error <= TARGET_PCT
    verdict = "met" if met else "MISSED"
    print(f"\nTPOT mean absolute error {error:.2f} %, target {TARGET_PCT} %: {verdict}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
