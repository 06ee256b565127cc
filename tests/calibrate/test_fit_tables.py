"""The shipped profiles come out of the fit, and reproduce the measured runs."""

import json
import math
from pathlib import Path

import pytest

from heddle_calibrate.fit.closed_loop import replay, replay_on_engine
from heddle_calibrate.fit.from_tables import make_profiles
from heddle_calibrate.fit.host import measured_runs
from heddle_calibrate.profiles import encode_profile
from heddle_sim.profile_files import PROFILE_FOLDER, load_profile

PERF = Path(__file__).parents[3] / "shared" / "perf"
pytestmark = pytest.mark.skipif(
    not PERF.is_dir(), reason="the performance tables (../shared/perf) are not here"
)


def test_the_fit_gives_the_shipped_files() -> None:
    def close(a: object, b: object) -> bool:
        match a, b:
            case dict(), dict():
                return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
            case list(), list():
                return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
            case ((int() | float()), (int() | float())):
                return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)
            case _:
                return a == b

    for made in make_profiles(PERF):
        shipped = (PROFILE_FOLDER / f"{made.model}.{made.gpu}.json").read_text()
        assert close(json.loads(encode_profile(made)), json.loads(shipped)), made.summary


def test_the_engine_reproduces_measured_tpot() -> None:
    p = load_profile("qwen3-32b", "h100")
    errors, apart = [], []
    for run in measured_runs(PERF):
        t = p.table(run.tp)
        on_engine = replay_on_engine(t, run.loop)
        errors.append(abs(on_engine.tpot_s / run.tpot_s - 1))
        apart.append(abs(on_engine.tpot_s / replay(t, run.loop).tpot_s - 1))
    assert sum(errors) / len(errors) <= 0.04
    assert max(apart) < 0.02
