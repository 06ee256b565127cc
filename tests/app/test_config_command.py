"""`heddle config` and `heddle regimes check`; a list of engines as a key."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.command_config import Config
from heddle.config_files import ConfigError, resolve, setting
from heddle.config_reference import reference
from tests.app.journals import Heddle


def cluster(*texts: str) -> tuple[object, ...]:
    found = resolve([setting("trace=t"), *map(setting, texts)]).cluster
    pools = tuple((pool.gpu, pool.gpus, pool.tp) for pool in found.pool)
    return found.gpu, found.gpus, found.tp, found.mix, pools, found.roles, found.prefill_tp


@pytest.mark.parametrize(
    ("engines", "more", "said"),
    [
        ("[{gpu='h20',count=3,tp=2}]", (), ("h20", 6, 2, (), (), "", None)),
        (
            "[{gpus=4,tp=4},{gpus=2,tp=2},{gpus=2}]",
            (),
            ("h100", 8, 1, (4, 2, 1, 1), (), "", None),
        ),
        (
            "[{gpu='h100',gpus=4},{gpu='l40s',gpus=4,tp=2}]",
            (),
            ("h100", 8, 1, (), (("h100", 4, None), ("l40s", 4, 2)), "", None),
        ),
        (
            "[{gpus=2,tp=2,role='prefill'},{gpus=6,role='decode'}]",
            (),
            ("h100", 8, 1, (), (), "prefill=2,decode=6", 2),
        ),
        (
            "[{gpus=2,role='prefill'},{gpus=6,role='decode'}]",
            ("cluster.gpus=12",),
            ("h100", 12, 1, (), (), "prefill=2,decode=6", None),
        ),
    ],
)
def test_a_list_of_engines_says_what_the_keys_of_each_kind_say(
    engines: str, more: tuple[str, ...], said: tuple[object, ...]
):
    assert cluster(f"cluster.engines={engines}", *more) == said


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ("[{gpus=3,tp=2}]", "3 GPUs are no engines of 2: take a multiple of 2"),
        ("[{gpus=3,count=2}]", "give either gpus or count"),
        ("[{gpu='h20',gpus=1},{gpu='h100',gpus=1,role='decode'}]", "all do both: leave role out"),
        (
            "[{gpus=1},{gpus=1,role='decode'}]",
            "give every entry a role, prefill or decode, or none",
        ),
        ("[{gpus=1,role='prefill'}]", "none that decode for them"),
        ("[{gpus=1,tps=1}]", "cluster.engines.tps is not a key"),
        ("5", "cluster.engines"),
    ],
)
def test_engines_that_cannot_be_are_refused(engines: str, said: str):
    with pytest.raises(ConfigError, match=said):
        cluster(f"cluster.engines={engines}")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("cluster.gpus=9", "sets cluster.gpus = 9, and the pools of .* have 4"),
        ("cluster.gpu=h200", "sets cluster.gpu = h200, and the pools of .* have h100"),
        ("cluster.mix=[1]", "leave these out"),
    ],
)
def test_nothing_else_says_what_the_list_says(more: str, said: str):
    with pytest.raises(ConfigError, match=said):
        cluster("cluster.engines=[{gpu='h100',gpus=4}]", more)


def test_every_key_has_a_meaning():
    assert [key.name for key in reference() if not key.text] == []


def test_a_new_file_has_every_key_and_changes_nothing(heddle: Heddle, refused: Callable[..., str]):
    assert heddle("config", "init").exit_code == 0
    text = Path("heddle.toml").read_text()
    given = tomllib.loads(text)
    assert resolve([setting("trace=t")]) == Config(trace="t")
    assert all(not section for section in given.values())
    assert {f"[{key.name.rpartition('.')[0]}]" for key in reference() if "." in key.name} <= {
        *text.splitlines()
    }
    assert "heddle.toml: exists" in refused("config", "init")


def test_the_keys_in_force_are_shown(heddle: Heddle):
    Path("heddle.toml").write_text("[cluster]\ngpus = 3\n")
    words = ("config", "show", "--set", "cluster.tp=3")
    shown = heddle(*words).stdout.splitlines()
    assert "cluster.gpus = 3" in shown
    assert "cluster.tp = 3" in shown
    found = json.loads(heddle(*words, "--json").stdout)
    assert (found["cluster"]["gpus"], found["plan"]["budget_s"]) == (3, None)


def test_a_key_is_explained(heddle: Heddle, refused: Callable[..., str]):
    said = heddle("config", "explain", "loop.train_gpus").stdout
    assert "loop.train_gpus (int 1 or more | None)" in said
    assert "GPUs of the trainer" in said
    assert heddle("config", "explain", "logs").stdout.count("logs.") >= 7
    assert "Did you mean 'cluster.gpus'?" in refused("config", "explain", "cluster.gpusx")


def test_a_regime_of_ones_own_is_checked_and_run(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    Path("heddle.toml").write_text(
        '[regimes.tight]\nregime = "areal"\nmax_head_offpolicyness = 1\nenforce = true\n'
        "[loop]\nbatches = 4\ntrain_gpus = 4\ngroups = 1\nsamples = 2\nrepeat = true\n"
    )
    said = heddle("regimes", "check", "tight").stdout
    assert "areal:max_head_offpolicyness=1:enforce=true: valid" in said
    done = heddle("loop", trace, "--seeds", "1", "--regimes", "tight", "--gpus", 8, "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["regimes"]
    assert row["regime"] == "areal:max_head_offpolicyness=1:enforce=true"
    assert "no regime is named 'tiht'" in refused("regimes", "check", "tiht")


def test_two_names_of_one_regime_are_refused(refused: Callable[..., str], heddle: Heddle):
    text = 'regime = "areal"\nmax_head_offpolicyness = 2\n'
    Path("heddle.toml").write_text(f"[regimes.one]\n{text}[regimes.two]\n{text}")
    said = refused("regimes", "check", "one,two")
    assert "regimes one and two are the same, areal:max_head_offpolicyness=2: leave one" in said
    assert "names no regime" in refused("regimes", "check", "")
    assert heddle("regimes", "check", "two,two").exit_code == 0


def test_a_regime_of_ones_own_has_parts(heddle: Heddle):
    Path("heddle.toml").write_text(
        '[regimes.mine]\nregime = "areal"\nmax_head_offpolicyness = 2\n'
        'staleness.late = "drop"\n'
        'batching = { order = "first_finished", equal_rewards = "drop" }\n'
        "[regimes.mine.sampling]\nextra_samples = 2\n"
    )
    said = heddle("regimes", "check", "mine")
    assert said.exit_code == 0, said.output
    for field in ("staleness.bound=2", "staleness.late=drop", "batching.order=first_finished"):
        assert f":{field}\n" in said.stdout
    assert "starts 18 samples of each prompt, and trains 16" in said.stdout
    assert "areal:max_head_offpolicyness=2" in heddle("regimes", "check", "mi*").stdout


@pytest.mark.parametrize(
    ("name", "section", "said"),
    [
        ("mine", "max_head_offpolicyness = 1", "it needs the regime that it is of, as in regime ="),
        ("mine", 'regime = "areall"', "no regime is named 'areall'; there are sync"),
        ("areal", 'regime = "sync"', "areal is a regime of Heddle's: take another name"),
        ('"a:b"', 'regime = "sync"', "take another name"),
        ("mine", 'regime = "sync"\nbound = 1', "no parameter 'bound'; it has none, and the fields"),
        ("mine", 'regime = "sync"\nstaleness.most = 1', "staleness has bound, counted_by, late"),
        ("mine", 'regime = "sync"\nstaleness.late = 3', "one of wait, drop, train, not '3'"),
        ("mine", 'regime = "sync"\nupdate.every = 1.5', "update.every must be a whole number"),
        ("mine", 'regime = "sync"\nupdate.every = 0', "update every 1 or more batches, not 0"),
        ("mine", 'regime = "sync"\nstaleness.bound = -1', "staleness.bound must be from 0 to"),
        ("mine", 'regime = "sync"\nstaleness.bound = 1', "use update interrupt or in_flight"),
    ],
)
def test_what_is_no_regime_is_refused_with_file_and_section(
    refused: Callable[..., str], name: str, section: str, said: str
):
    Path("heddle.toml").write_text(f"[regimes.{name}]\n{section}\n")
    found = refused("regimes", "check", "sync")
    plain = name.strip('"')
    assert f"heddle.toml: [regimes.{plain}]: " in found
    assert said in found
