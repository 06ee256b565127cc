"""GPU-hours and dollars of runs, comparisons, loops and plans, by hand; and the objective cost."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.gpu_pools import PoolConfig
from heddle.comparison.compare import compare
from heddle.comparison.result import PolicyResult, policy_results
from heddle.comparison.tuning import Variant
from heddle.config import RunConfig
from heddle.config_files import ConfigError, ConfigSource, resolve
from heddle.cost.objective import Objective
from heddle.cost.prices import Prices, price_text, prices_of, shipped_prices
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.splits import splits
from heddle.runs import load_run
from heddle.runs.bound import Bound
from heddle.runs.ideal import Ideal
from heddle.simulation import RunResult, simulate
from heddle_sim.profile_files import PROFILE_FOLDER, read_profile
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.conftest import ROOT
from tests.app.journals import ONE_RUN, Heddle, run_of

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prices") / "search.jsonl.gz"
    write_trace(path, synth("search", trajectories=48, samples_per_group=4, seed=1))
    return str(path)


def loop(trace: str, *, gpus: int = 8, **changes: object) -> LoopConfig:
    cluster = ClusterConfig(model="qwen3-8b", gpus=gpus, tp=2)
    config = LoopConfig(
        run=RunConfig(trace=trace, cluster=cluster),
        regimes=("sync",),
        groups=3,
        samples=4,
        batches=4,
        train_gpus=2,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def own_class(folder: Path, name: str) -> str:
    """A profile file of a GPU class that no table knows."""
    profile = replace(read_profile(PROFILE_FOLDER / "qwen3-14b.h100.json"), gpu=name)
    path = folder / "own.json"
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)


# -- the table ------------------------------------------------------------------------------------


def test_every_row_of_the_table_has_a_source_and_a_date():
    rows = shipped_prices()
    assert {"a100", "l40s", "h100", "h200", "b200", "h20", "gb200"} <= rows.keys()
    for gpu, row in rows.items():
        assert gpu == gpu.lower()
        assert row.source
        assert len(row.date.split("-")) == 3
        assert row.dollars_per_hour is None or row.dollars_per_hour > 0.0
        sourced = "https://" in row.source or row.source.startswith(("derived", "none"))
        assert sourced, f"{gpu} has neither a source nor a word that it is derived"
    assert rows["gb200"].dollars_per_hour is None
    h20, h800 = rows["h20"].dollars_per_hour, rows["h800"].dollars_per_hour
    assert h20 is not None
    assert h800 is not None
    assert h20 == pytest.approx(h800 / 2.85, abs=5e-4)


def test_prices_are_shown_as_they_are_counted():
    assert prices_of({}).text(["h20"]).startswith("h20 at $0.947 a GPU-hour")
    assert prices_of({"h20": 1234.5}).text(["h20"]).startswith("h20 at $1,234.50")


def test_the_table_is_listed_with_its_sources(heddle: Heddle):
    shown = heddle("prices").output
    listed = json.loads(heddle("prices", "--json").stdout)
    assert listed["schema"] == "heddle.prices/1"
    for row in listed["prices"]:
        assert row["source"] in shown
        line = next(at for at in shown.splitlines() if at.startswith(f"  {row['gpu']} "))
        dollars = row["dollars_per_hour"]
        assert line.split()[1] == ("-" if dollars is None else price_text(dollars))


def test_a_cost_is_gpus_times_hours_times_price_over_all_classes():
    prices = prices_of({"h20": 1.0, "H100": 2.0})
    cost = prices.cost({"h100": 8, "h20": 4}, 1800.0)
    assert cost.gpu_hours == pytest.approx(6.0)
    assert cost.dollars == pytest.approx(8 * 0.5 * 2.0 + 4 * 0.5 * 1.0)
    unpriced = prices.cost({"h100": 8, "gb200": 4}, 1800.0)
    assert unpriced.gpu_hours == pytest.approx(6.0)
    assert unpriced.dollars is None
    assert prices.cost({}, 1800.0).plain() == {"gpu_hours": 0.0, "dollars": 0.0}


def test_prices_in_words_have_their_source_and_the_remedy():
    prices = prices_of({"h100": 2.0})
    assert prices.text(["h100", "h200", "l40s", "gb200"]) == (
        "h100 at $2.00 a GPU-hour (given); "
        "h200 at $3.60, l40s at $0.80 a GPU-hour (heddle prices, 2026-03-10); "
        "gb200 without a price: give --set prices.gb200=DOLLARS"
    )


# -- what is counted ------------------------------------------------------------------------------


def test_a_run_pays_for_all_gpus_until_its_makespan(config: RunConfig, tmp_path: Path):
    done = simulate(replace(config, prices={"h100": 7.2}), out=tmp_path / "runs")
    hours = 2 * done.summary["makespan_s"] / 3600
    assert done.summary["gpu_hours"] == pytest.approx(hours)
    assert done.summary["dollars"] == pytest.approx(7.2 * hours)
    assert load_run(done.path).summary["dollars"] == done.summary["dollars"]
    row = done.row()
    assert (row["gpu_hours"], row["dollars"]) == (
        done.summary["gpu_hours"],
        done.summary["dollars"],
    )


def test_a_run_directory_keeps_the_price_that_it_was_counted_with(
    config: RunConfig, tmp_path: Path
):
    shipped = simulate(config, out=tmp_path / "runs")
    assert load_run(shipped.path).config.prices == {"h100": 2.7}
    own = simulate(replace(config, prices={"h100": 1.5}), out=tmp_path / "runs")
    assert load_run(own.path).config.prices == {"h100": 1.5}


def test_a_comparison_has_mean_gpu_hours_and_dollars_of_each_policy(
    config: RunConfig, tmp_path: Path
):
    found = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "runs")
    plain = found.plain()
    assert plain["prices"] == {"h100": 2.7}
    assert plain["objective"] == "makespan"
    for row in plain["policies"]:
        hours = 2 * row["makespan_s"]["mean"] / 3600
        assert row["gpu_hours"] == pytest.approx(hours)
        assert row["dollars"] == pytest.approx(2.7 * hours)
    means = {row["policy"]: row["makespan_s"]["mean"] for row in plain["policies"]}
    assert plain["ranking"] == sorted(means, key=lambda name: means[name])


def test_pools_of_several_classes_pay_each_class_its_price(trace: Path, tmp_path: Path):
    pools = (PoolConfig(gpu="h100", gpus=2), PoolConfig(gpu="l40s", gpus=4))
    cluster = ClusterConfig(model="qwen3-8b", pool=pools, max_running=2)
    found = compare(RunConfig(trace=str(trace), cluster=cluster), ["verl"], out=tmp_path / "runs")
    (row,) = found.plain()["policies"]
    hours = row["makespan_s"]["mean"] / 3600
    assert row["gpu_hours"] == pytest.approx(6 * hours)
    assert row["dollars"] == pytest.approx((2 * 2.7 + 4 * 0.8) * hours)
    assert found.plain()["prices"] == {"h100": 2.7, "l40s": 0.8}


def test_a_loop_pays_for_engines_trainer_and_rewards(prompts: str, tmp_path: Path):
    made = loop(prompts, reward_gpus=2, reward_s="1", gpus=8)
    (split,) = splits(made, [2], [2])
    assert (split.run.cluster.gpus, split.train_gpus) == (4, 2)
    (row,) = compare_regimes([split], out=tmp_path / "runs").tried
    hours = 8 * 1000 / row.samples_per_s / 3600
    plain = row.plain()
    assert plain["gpu_hours_per_1k_samples"] == pytest.approx(hours)
    assert plain["dollars_per_1k_samples"] == pytest.approx(2.7 * hours)
    (folder,) = (tmp_path / "runs").iterdir()
    kept = load_run(folder)
    assert kept.summary["gpu_hours"] == pytest.approx(8 * row.runs[0].duration_s / 3600)
    assert kept.summary["dollars"] == pytest.approx(2.7 * kept.summary["gpu_hours"])
    assert kept.config.prices == {"h100": 2.7}


# -- prices of one's own, and none ----------------------------------------------------------------


def test_a_price_is_replaced_by_option_and_by_file(heddle: Heddle, trace: Path, tmp_path: Path):
    toml = tmp_path / "own.toml"
    toml.write_text("[prices]\nh100 = 36\nh20 = 2\n")
    cluster = ("--gpus", 2, "--max-running", 2, "--json")

    def dollars_of_a_gpu_hour(*args: object) -> float:
        shown = run_of(heddle(*ONE_RUN, trace, *args, *cluster))
        return float(shown["dollars"] / shown["gpu_hours"])

    assert dollars_of_a_gpu_hour() == pytest.approx(2.7)
    assert dollars_of_a_gpu_hour("-c", toml) == pytest.approx(36.0)
    assert dollars_of_a_gpu_hour("-c", toml, "--set", "prices.h100=0.5") == pytest.approx(0.5)
    assert dollars_of_a_gpu_hour(
        "--set", "prices.h20=9", "--set", "prices.H100=4"
    ) == pytest.approx(4.0)
    assert dollars_of_a_gpu_hour("--set", "prices.h100=3") == pytest.approx(3.0)


def test_a_class_without_a_price_shows_a_dash_and_what_to_do(
    heddle: Heddle, trace: Path, tmp_path: Path
):
    options = ("--model", own_class(tmp_path, "mine"), "--gpus", 2, "--max-running", 2)
    shown = heddle("compare", trace, "--policies", "verl,slime", *options)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("give --set prices.mine=DOLLARS") == 1
    table = [line.split() for line in shown.output.splitlines() if line.startswith("verl ")]
    assert "-" in table[0]
    plain = json.loads(heddle("compare", trace, "--policies", "verl", *options, "--json").stdout)
    assert plain["prices"] == {"mine": None}
    assert plain["policies"][0]["dollars"] is None
    assert plain["policies"][0]["gpu_hours"] > 0.0
    priced = heddle(
        *("compare", trace, "--policies", "verl", *options, "--json"), "--set", "prices.mine=3"
    )
    assert json.loads(priced.stdout)["prices"] == {"mine": 3.0}


def test_a_class_with_a_space_in_its_name_has_a_price(
    heddle: Heddle, refused: Refused, trace: Path, tmp_path: Path
):
    given = ("compare", trace, "--policies", "verl", "--model", own_class(tmp_path, "NVIDIA L4"))
    given += ("--gpus", 2, "--max-running", 2)
    said = refused(*given, "--set", "plan.objective=cost")
    assert "give --set 'prices.NVIDIA L4=DOLLARS' for" in said
    assert '"NVIDIA L4" = DOLLARS under [prices]' in said
    priced = heddle(*given, "--set", "prices.NVIDIA L4=2", "--json")
    assert priced.exit_code == 0, priced.output
    assert json.loads(priced.stdout)["prices"] == {"NVIDIA L4": 2.0}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ("--set", "prices.h100=-1"),
            "--set prices.h100=-1: prices.h100 must be from 0 to below 100,000",
        ),
        (("--set", "prices.h100=nan"), "h100 must be from 0 to below 100,000"),
        (("--set", "prices.h100=1e9"), "h100 must be from 0 to below 100,000"),
        (("--set", "prices.h100"), "write it as section.key=value"),
        (("--set", "prices=2.1"), "prices is a section: write [prices]"),
        (("--set", "prices.h100=two"), "prices.h100 must be a number, not 'two'"),
        (("--set", "prices.=2"), "price of '' ([prices]): no such GPU class"),
        (("--set", "prices.h100=2=3"), "prices.h100 must be a number, not '2=3'"),
        (("--set", "prices.h10=2"), "did you mean 'h100'?"),
        (("--set", "prices.abacus=2"), "no such GPU class. Known: a100, "),
        (("--set", "prices.h100=x"), "prices.h100 must be a number, not 'x'"),
        (("--set", "prices.h100=true"), "prices.h100 must be a number, not True"),
        (("--set", "prices=2"), "write [prices]"),
    ],
)
def test_a_wrong_price_is_one_message(
    refused: Refused, trace: Path, wrong: tuple[str, ...], said: str
):
    cluster = ("--gpus", 2, "--max-running", 2)
    assert said in refused(*ONE_RUN, trace, *cluster, *wrong)
    assert said in refused("compare", trace, "--policies", "verl", *cluster, *wrong)
    assert said in refused("plan", trace, *cluster, *wrong)


def test_a_wrong_price_in_a_file_names_file_and_key(tmp_path: Path):
    def read(values: dict[str, object]) -> None:
        resolve([ConfigSource("a.toml", {"trace": "t", "prices": values})])

    with pytest.raises(ConfigError, match=r"a\.toml: prices\.h100 must be from 0"):
        read({"h100": -2.0})
    with pytest.raises(ConfigError, match=r"a\.toml: prices\.h100 must be a number"):
        read({"h100": "cheap"})


def test_a_wrong_price_in_python_is_refused_too(config: RunConfig, tmp_path: Path):
    for price in (-1.0, float("nan"), 1e9):
        with pytest.raises(ConfigError, match="price of 'h100' must be from 0"):
            simulate(replace(config, prices={"h100": price}), out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_ranking_by_cost_needs_a_price_above_nothing(refused: Refused, trace: Path):
    said = refused(
        "compare",
        trace,
        "--policies",
        "verl,slime",
        "--set",
        "plan.objective=cost",
        "--set",
        "prices.h100=0",
    )
    assert "cannot rank what is free: the price of h100 is 0" in said


def test_ranking_by_cost_needs_every_price(refused: Refused, trace: Path, tmp_path: Path):
    own = ("--model", own_class(tmp_path, "mine"), "--set", "plan.objective=cost")
    said = "mine has none: give --set prices.mine=DOLLARS"
    assert said in refused("compare", trace, "--policies", "verl", *own, "--gpus", 2)
    assert not list(Path().iterdir()), "refused before anything runs"


def test_a_loop_is_not_ranked_by_cost_without_a_price(
    prompts: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("heddle.cost.prices.shipped_prices", dict)
    made = splits(loop(prompts), [2], [2])
    with pytest.raises(ConfigError, match=r"h100 has none: give --set prices\.h100=DOLLARS"):
        compare_regimes(made, objective="cost")
    (row,) = compare_regimes(made).regimes
    assert row.plain()["dollars_per_1k_samples"] is None
    assert row.plain()["gpu_hours_per_1k_samples"] > 0.0


# -- the objective --------------------------------------------------------------------------------


def best_of(objective: Objective) -> list[str]:
    """The best setting of a policy that is faster on twice the GPUs, and dearer."""
    prices = Prices({})
    settings = {"small": (8, 100.0), "large": (16, 60.0)}
    variants, runs = [], []
    for name, (gpus, makespan_s) in settings.items():
        variants.append(
            Variant(
                name=name,
                policy="verl",
                cluster=ClusterConfig(gpus=gpus),
                swept=True,
                baseline=True,
            )
        )
        paid = prices.cost({"h100": gpus}, makespan_s).plain()
        summary = {"makespan_s": makespan_s, "throughput_tok_s": 1e5 / makespan_s, **paid}
        runs.append([RunResult("verl", 0, Path(name), summary, 0.0)])
    bound = Bound(makespan_s=50.0, solo_s=50.0, capacity_s=10.0, tools_s=0.0, multipliers={})
    ideal = Ideal(fluid_s=55.0, equal_progress_s=58.0)
    rows: tuple[PolicyResult, ...] = policy_results(variants, runs, bound, ideal, objective)
    return [row.policy for row in rows if row.best]


def test_the_best_setting_follows_the_objective():
    assert best_of("makespan") == ["large"]
    assert best_of("cost") == ["small"]


def test_splits_of_a_loop_follow_the_objective(prompts: str):
    # Twice the engines make a step shorter, and not twice as short.
    both = [*splits(loop(prompts, gpus=4), [2], [2]), *splits(loop(prompts, gpus=16), [2], [2])]
    fast = compare_regimes(both)
    cheap = compare_regimes(both, objective="cost")
    assert [row.setup.gpus for row in fast.regimes] == [16]
    assert [row.setup.gpus for row in cheap.regimes] == [4]
    small, large = fast.tried
    assert small.step_s.mean > large.step_s.mean
    dollars = [row.cost_per_1k_samples.dollars for row in (small, large)]
    assert dollars[0] is not None
    assert dollars[1] is not None
    assert dollars[0] < dollars[1]


def test_prices_of_classes_decide_by_cost(prompts: str):
    """The faster class is not the cheaper one at every price."""

    def best(objective: Objective, h200: float) -> str:
        made = []
        for gpu in ("h100", "h200"):
            one = loop(prompts)
            cluster = replace(one.run.cluster, gpu=gpu)
            run = replace(one.run, cluster=cluster, prices={"h100": 2.0, "h200": h200})
            made += splits(replace(one, run=run), [2], [2])
        (row,) = compare_regimes(made, objective=objective).regimes
        return row.setup.config.run.cluster.gpu

    assert best("makespan", 20.0) == "h200"
    assert best("cost", 20.0) == "h100"
    assert best("cost", 2.0) == "h200"


def test_the_tables_show_dollars_where_the_objective_is_cost(heddle: Heddle, prompts: str):
    small = (
        "--model",
        "qwen3-8b",
        "--gpus",
        8,
        "--set",
        "loop.groups=3",
        "--set",
        "loop.samples=4",
        "--set",
        "loop.batches=4",
    )
    options = (
        "--regimes",
        "sync",
        "--sweep",
        "loop.train_gpus=2,4",
        "--sweep",
        "cluster.tp=2",
        *small,
    )
    shown = heddle(
        "loop",
        prompts,
        "--seeds",
        "1",
        *options,
        "--set",
        "plan.objective=cost",
        "--set",
        "prices.h100=36",
    )
    assert shown.exit_code == 0, shown.output
    assert "mean dollars of 1,000 samples" in shown.output
    assert "h100 at $36.00 a GPU-hour (given)" in shown.output


def test_the_pages_list_the_keys_of_costs():
    compared = (ROOT / "docs" / "json.md").read_text()
    page = (ROOT / "docs" / "loop.md").read_text()
    for key in ("gpu_hours", "dollars", "prices", "objective", "ranking"):
        assert f"`{key}`" in compared, key
    for key in ("prices", "objective", "ranking"):
        assert f"`{key}`" in page, key
