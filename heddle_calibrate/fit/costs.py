"""The costs in a sweep beside iterations: transfers, starts and stops, the driver's overhead."""

from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from scipy.optimize import nnls

from heddle_calibrate.sweeps import MoveTrial, Sweep
from heddle_sim.profile_parts import Costs, Lifetimes, Reprefill, Transfer

NO_LINK_BYTES_PER_S = 1e12
"""Where longer moves took no longer, or none was measured."""


def fit_transfer(sweep: Sweep) -> Transfer:
    """Moves of KV beside decoding batches, as in a rollout; without those, all moves.

    For engines without KV export, the transfer is the prefill of the context on the target, with
    the bytes that a transfer would have moved.
    """
    by_kv = _beside(move for move in sweep.moves if move.way == "kv")
    if by_kv:
        fixed_s, per_byte_s = _line(
            [move.kv_bytes for move in by_kv], [move.export_s + move.place_s for move in by_kv]
        )
    else:
        again = _reprefill(sweep)
        fixed_s = again.fixed_s if again is not None else 0.0
        per_token_s = again.per_token_s if again is not None else 0.0
        per_byte_s = per_token_s / sweep.kv_bytes_per_token
    rate = 1.0 / per_byte_s if per_byte_s > 0 else NO_LINK_BYTES_PER_S
    return Transfer(fixed_s=round(fixed_s, 6), bytes_per_s=float(f"{rate:.6g}"))


def fit_costs(sweep: Sweep) -> Costs:
    """Medians of what was measured."""
    engines = {}
    for tp in sweep.tps:
        runs = [trial for trial in sweep.lives if trial.tp == tp]
        sleeps = [trial for trial in sweep.naps if trial.tp == tp and trial.level == 1]
        if runs:
            engines[str(tp)] = Lifetimes(
                start_s=_typical(trial.start_s for trial in runs),
                stop_s=_typical(trial.stop_s for trial in runs),
                sleep_s=_typical(trial.sleep_s for trial in sleeps) if sleeps else None,
                wake_s=_typical(trial.wake_s for trial in sleeps) if sleeps else None,
            )
    aborts, beside = sweep.aborts, sweep.beside
    ways = [move.way for move in sweep.moves]
    return Costs(
        dispatch_s=_dispatch_s(sweep),
        engines=engines,
        moves_by="prefill" if ways and "kv" not in ways else "kv",
        abort_s=_typical(abort.abort_s for abort in aborts) if aborts else None,
        reprefill=_reprefill(sweep),
        beside=_typical(b.beside_s / b.alone_s for b in beside) if beside else None,
    )


def _dispatch_s(sweep: Sweep) -> float:
    """Time of a prompt alone on an engine beyond its iterations: the driver's overhead."""
    alone = [t for t in sweep.prefill if not t.batch and t.together == 1]
    return _typical(max(0.0, trial.wall_s - trial.prefill_s) for trial in alone) if alone else 0.0


def _reprefill(sweep: Sweep) -> Reprefill | None:
    moves = _beside(move for move in sweep.moves if move.way == "prefill")
    if not moves:
        return None
    fixed_s, per_token_s = _line(
        [move.kv_tokens for move in moves], [move.place_s for move in moves]
    )
    return Reprefill(fixed_s=round(fixed_s, 6), per_token_s=float(f"{per_token_s:.6g}"))


def _beside(moves: Iterable[MoveTrial]) -> list[MoveTrial]:
    found = list(moves)
    return [move for move in found if move.batch] or found


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least relative squares of a line, neither number negative."""
    scale = max(x) or 1.0
    seconds = np.maximum(np.array(y), 1e-9)
    design = np.column_stack([np.ones(len(x)), np.array(x) / scale]) / seconds[:, None]
    (fixed, slope), _ = nnls(design, np.ones(len(x)))
    return float(fixed), float(slope) / scale


def _typical(values: Iterable[float]) -> float:
    return round(median(values), 6)
