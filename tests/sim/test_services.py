"""Service pools: places, cold starts, failures and draws, checked by hand."""

import math
from statistics import fmean, median, stdev

import pytest

from heddle.cluster.tool_pools import latency_of, tool_pools_of
from heddle_core.ids import TrajectoryId
from heddle_sim.calendar import Calendar
from heddle_sim.services import KEEP_ALIVE_S, Latency, ServiceConfig, ServicePool

TWO_S = Latency(seconds=2.0)


def ids(count: int) -> list[TrajectoryId]:
    return [TrajectoryId(f"g/{k}") for k in range(count)]


def ends(config: ServiceConfig, requests: list[tuple[str, float]], seed: int = 0) -> dict:
    """When the calls that are requested at these times end, and whether they succeed."""
    clock = Calendar()
    pool = ServicePool("reward", config, clock, seed)
    found: dict[str, tuple[float, bool]] = {}

    def end(name: TrajectoryId, ok: bool) -> None:
        found[name] = clock.now_s, ok

    for name, at_s in requests:
        clock.call_at(at_s, pool.call, TrajectoryId(name), end)
    clock.run()
    assert pool.running == 0
    return found


def test_calls_beyond_the_capacity_wait_in_order():
    found = ends(
        ServiceConfig(capacity=2, latency=TWO_S), [(name, 0.0) for name in ("a", "b", "c", "d")]
    )
    assert {name: at for name, (at, _) in found.items()} == {"a": 2, "b": 2, "c": 4, "d": 4}


def test_a_cold_start_is_paid_only_where_no_warm_instance_is_idle():
    config = ServiceConfig(cold_start_s=5.0, keep_alive_s=10.0, latency=TWO_S)
    # "b" finds the instance of "a" in use; "c" finds one idle for 1 s; "d" comes 10 s after "c".
    found = ends(config, [("a", 0.0), ("b", 1.0), ("c", 9.0), ("d", 21.0)])
    assert {name: at for name, (at, _) in found.items()} == {"a": 7, "b": 8, "c": 11, "d": 28}


def test_an_instance_that_is_kept_for_no_time_starts_for_every_call():
    config = ServiceConfig(cold_start_s=5.0, keep_alive_s=0.0, latency=TWO_S)
    assert ends(config, [("a", 0.0), ("b", 7.0)])["b"] == (14.0, True)


def test_seconds_of_the_trace_hold_where_none_are_given():
    clock = Calendar()
    pool = ServicePool("reward", ServiceConfig(capacity=1), clock, 0)
    at: list[float] = []
    for name, recorded_s in (("a", 3.0), ("b", 4.0)):
        pool.call(TrajectoryId(name), lambda name, ok: at.append(clock.now_s), recorded_s)
    clock.run()
    assert at == [3.0, 7.0]
    assert pool.busy_s() == 7.0
    assert ServicePool("r", ServiceConfig(latency=TWO_S), clock, 0).drawn(ids(1)[0], 0, 9.0) == (
        2.0,
        True,
    )


def test_a_failed_attempt_is_noticed_after_its_timeout_and_repeated():
    config = ServiceConfig(latency=TWO_S, failure_rate=0.5, timeout_s=30.0, retries=2)
    pool = ServicePool("env", config, Calendar(), 1)
    drawn = [pool.drawn(name, 0, 0.0) for name in ids(4000)]
    assert {seconds for seconds, ok in drawn if ok} == {2.0, 32.0, 62.0}
    assert {seconds for seconds, ok in drawn if not ok} == {90.0}
    shares = [sum(each == (30.0 * k + 2.0, True) for each in drawn) / 4000 for k in range(3)]
    assert shares == pytest.approx([0.5, 0.25, 0.125], abs=0.03)


def test_distributions_have_their_moments():
    normal = Latency(seconds=100.0, sigma=5.0)
    found = [drawn(normal, k) for k in range(4000)]
    assert fmean(found) == pytest.approx(100.0, abs=0.4)
    assert stdev(found) == pytest.approx(5.0, rel=0.05)
    cut = [drawn(Latency(seconds=1.0, sigma=10.0), k) for k in range(500)]
    assert min(cut) == 0.0
    starts = Latency(seconds=2.0, sigma=0.5, lognormal=True, miss_rate=0.1, miss_s=90.0)
    found = [drawn(starts, k) for k in range(4000)]
    assert median(each for each in found if each < 20.0) == pytest.approx(2.0, rel=0.05)
    assert sum(each >= 20.0 for each in found) / 4000 == pytest.approx(0.1, abs=0.015)
    logs = [math.log(each) for each in found if each < 20.0]
    assert stdev(logs) == pytest.approx(0.5, rel=0.05)


def drawn(latency: Latency, k: int) -> float:
    pool = ServicePool("env", ServiceConfig(latency=latency), Calendar(), 3)
    return pool.drawn(TrajectoryId(f"t{k}"), 0, 0.0)[0]


def test_draws_depend_on_seed_pool_trajectory_and_call_alone():
    config = ServiceConfig(latency=Latency(seconds=10.0, sigma=3.0))

    def draws(name: str, seed: int, order: list[TrajectoryId]) -> dict:
        pool = ServicePool(name, config, Calendar(), seed)
        return {(t, call): pool.drawn(t, call, 0.0) for t in order for call in (0, 1)}

    first = draws("env", 0, ids(20))
    assert draws("env", 0, ids(20)[::-1]) == first
    assert len(set(first.values())) == 40
    assert not set(first.values()) & set(draws("env", 1, ids(20)).values())
    assert not set(first.values()) & set(draws("reward", 0, ids(20)).values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"capacity": 0}, "capacity must be 1 or more"),
        ({"cold_start_s": -1.0}, "from 0 to below 1e9"),
        ({"timeout_s": float("nan")}, "from 0 to below 1e9"),
        ({"capacity": 2, "cold_start_s": 1.0}, "only an elastic one"),
        ({"failure_rate": 1.0}, "below 1"),
        ({"retries": -1}, "retries must be from 0"),
    ],
)
def test_a_service_that_cannot_be_is_refused(wrong: dict, said: str):
    with pytest.raises(ValueError, match=said):
        ServiceConfig(**wrong)


def test_text_of_a_distribution():
    assert latency_of("2") == TWO_S
    assert latency_of(" 10,5 ") == Latency(seconds=10.0, sigma=5.0)
    assert latency_of("lognormal:2,0.5") == Latency(seconds=2.0, sigma=0.5, lognormal=True)
    assert latency_of("lognormal:2,0.5,0.05,90") == Latency(
        seconds=2.0, sigma=0.5, lognormal=True, miss_rate=0.05, miss_s=90.0
    )
    for wrong in ("", "x", "1,2,3", "lognormal:2", "gamma:1,2", "1;2", ":3"):
        with pytest.raises(ValueError, match="write seconds, as 2; MEAN,SIGMA"):
            latency_of(wrong)
    for wrong in ("-1", "nan", "inf", "lognormal:2,0.5,2,90"):
        with pytest.raises(ValueError, match=r"from 0 to"):
            latency_of(wrong)
    with pytest.raises(ValueError, match="natural logarithms and at most 10, not 11"):
        latency_of("lognormal:2,11")


def test_text_of_pools():
    found = tool_pools_of(
        ["bash=64", "a=elastic:cold=0.3", "b=2:fail=0.1:timeout=9:latency=lognormal:1,2"]
    )
    assert found == {
        "bash": ServiceConfig(capacity=64),
        "a": ServiceConfig(cold_start_s=0.3, keep_alive_s=KEEP_ALIVE_S),
        "b": ServiceConfig(
            capacity=2,
            failure_rate=0.1,
            timeout_s=9.0,
            retries=3,
            latency=Latency(seconds=1.0, sigma=2.0, lognormal=True),
        ),
    }
    for wrong, said in (
        ("bash", "TOOL=CAPACITY"),
        ("=3", "TOOL=CAPACITY"),
        ("bash=many", "no whole number"),
        ("bash=3:cold=1", "of elastic pools"),
        ("bash=3:fail=0.1", "belong together"),
        ("bash=3:hot=1", "not one of cold"),
        ("bash=3:fail=x:timeout=1", "no number"),
    ):
        with pytest.raises(ValueError, match=said):
            tool_pools_of([wrong])
    with pytest.raises(ValueError, match="two pools"):
        tool_pools_of(["a=1", "a=2"])
