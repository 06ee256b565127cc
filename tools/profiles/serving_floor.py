"""What no model of published runs can be better than: their noise, and constants in hindsight.

Noise is how far two runs of one layout and load are apart. Hindsight is the error of constants that
are fitted to the very runs they are judged on, TPOT and TTFT apart: what remains is the form's, or
the runs' own.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import nnls

from heddle_calibrate.serving.samples import ServingSample
from tools.profiles.serving_fit import Floats

ROUNDS = 20
"""Of reweighting, from least squares to least absolute errors."""

KeyOf = Callable[[ServingSample], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Errors in percent of TPOT and TTFT, one of each for a pair of runs or a layout."""

    name: str
    tpot: Sequence[float]
    ttft: Sequence[float]

    def cells(self) -> list[str]:
        """Median and 90th percentile of both."""
        parts = [(part, q) for part in (self.tpot, self.ttft) for q in (0.5, 0.9)]
        return [f"{np.quantile(part, q):.1f}" if part else "" for part, q in parts]


def floors(found: Sequence[ServingSample]) -> list[Floor]:
    """Return noise and hindsight of runs of one family of engines."""
    return [
        _apart(found, same_version=True),
        _apart(found, same_version=False),
        _hindsight("constants of each layout", found, lambda s: s.row.group),
        _hindsight("of each model and GPU type", found, lambda s: (s.model, s.row.gpu)),
        _hindsight("one set for all", found, lambda s: s.row.engine),
    ]


def _apart(found: Sequence[ServingSample], *, same_version: bool) -> Floor:
    """How much longer the slower of two runs takes, of the same layout, load and limits."""
    tpot, ttft = [], []
    by_load: dict[Hashable, list[ServingSample]] = {}
    for s in found:
        r = s.row
        load = (*r.group, r.dp, r.input_tokens, r.output_tokens, r.concurrency, r.limits)
        by_load.setdefault((*load, r.expert_parallel) if same_version else load, []).append(s)
    for alike in by_load.values():
        for a, b in combinations([s.row for s in alike], 2):
            if (a.version == b.version) is same_version:
                tpot.append(100 * (max(a.tpot_s, b.tpot_s) / min(a.tpot_s, b.tpot_s) - 1))
                ttft.append(100 * (max(a.ttft_s, b.ttft_s) / min(a.ttft_s, b.ttft_s) - 1))
    versions = "one version" if same_version else "two versions"
    return Floor(
        name=f"two runs of a layout and load, {versions}: {len(tpot)}", tpot=tpot, ttft=ttft
    )


def _hindsight(name: str, found: Sequence[ServingSample], part_of: KeyOf) -> Floor:
    """Mean absolute error of each layout by constants fitted to all runs of its part."""
    parts: dict[Hashable, list[ServingSample]] = {}
    for s in found:
        parts.setdefault(part_of(s), []).append(s)
    errors: dict[Hashable, list[tuple[float, float]]] = {}
    for of in parts.values():
        tpot = _least_errors(
            np.array([[x / s.row.tpot_s for x in astuple(s.work.per_token)] for s in of])
        )
        ttft = _least_errors(
            np.array([[x / s.row.ttft_s for x in (*astuple(s.work.first_token), 1)] for s in of])
        )
        for s, *both in zip(of, tpot, ttft, strict=True):
            errors.setdefault(s.row.group, []).append((both[0], both[1]))
    means = [100 * np.mean(each, axis=0) for each in errors.values()]
    return Floor(
        name=f"hindsight, {name}: {len(parts)}",
        tpot=[float(mean[0]) for mean in means],
        ttft=[float(mean[1]) for mean in means],
    )


def _least_errors(matrix: Floats) -> Floats:
    """Absolute relative errors of the constants, none negative, that make their sum least."""
    weight = np.ones(len(matrix))
    least = np.ones(len(matrix))
    for _ in range(ROUNDS):
        constants, _ = nnls(matrix * weight[:, None], weight)
        error = np.abs(matrix @ constants - 1)
        least = min(least, error, key=np.sum)
        weight = 1 / np.sqrt(np.maximum(error, 1e-3))
    return least
