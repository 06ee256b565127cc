"""Data sources for slime and vime, over a source with the calls and files of slime's (3c9aa092)."""

import sys
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from heddle.config_error import ConfigError
from heddle.epochs.file import read_samples
from heddle_gateway.identity import identify
from tests.app import slime_source
from tests.app.slime_source import Status, arguments


def load_function(path: str) -> Any:
    """As slime loads what an argument names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.fixture(params=["slime", "vime"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that `--data-source-path` names, where slime or vime is installed."""
    for name in ("", ".rollout", ".rollout.data_source"):
        monkeypatch.setitem(sys.modules, request.param + name, slime_source)
    return load_function(f"heddle.epochs.slime.{request.param.capitalize()}DataSource")


def number(sample: Any) -> int:
    return int(sample.label)


def rollout(args: Any, made: Any, *, length: Any = lambda n: 10 * n) -> list[int]:
    """Generate a batch; its prompts' numbers."""
    groups = made.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.status, sample.response_length = Status.COMPLETED, length(number(sample))
    process = load_function("heddle.epochs.slime.write_lengths")
    process(args, groups, made.get_samples)
    assert all(number(a) == number(b) for a, b in groups)
    return [number(group[0]) for group in groups]


def test_later_epochs_have_prompts_of_like_length_in_a_rollout(source: Any, tmp_path: Path):
    args = arguments(tmp_path, 16)
    made = source(args)
    first = [rollout(args, made) for _ in range(4)]
    assert sorted(chain(*first)) == list(range(16))
    assert not all(len({n // 4 for n in each}) == 1 for each in first)
    for _ in range(2):
        later = [rollout(args, made) for _ in range(4)]
        assert sorted(chain(*later)) == list(range(16))
        assert all(len({n // 4 for n in each}) == 1 for each in later)
    assert made.epoch_id == 2
    assert len(read_samples(tmp_path / "epoch.jsonl")) == 3 * 16 * 2


def test_sessions_have_the_names_by_which_the_gateway_knows_prompts(source: Any, tmp_path: Path):
    args = arguments(tmp_path, 8)
    made = source(args)
    groups = made.get_samples(4)
    sessions = [[sample.session_id for sample in group] for group in groups]
    assert len({each for group in sessions for each in group}) == 8
    known = [{identify({"X-Session-ID": each}, {}).group for each in group} for group in sessions]
    assert all(len(each) == 1 for each in known)
    rollout(args, made)
    written = {each.prompt for each in read_samples(tmp_path / "epoch.jsonl")}
    assert len(written) == 4
    assert not written & {name for each in known for name in each}
    # Samples that were handed back keep their session.
    made.add_samples(groups[:1])
    again = made.get_samples(1)
    assert [sample.session_id for sample in again[0]] == sessions[0]


def test_only_whole_samples_count_and_only_what_the_model_wrote(source: Any, tmp_path: Path):
    args = arguments(tmp_path, 8)
    made = source(args)
    (done, masked), (aborted, long) = made.get_samples(2)
    done.status, done.response_length = Status.COMPLETED, 9
    masked.status, masked.response_length = Status.TRUNCATED, 9
    masked.loss_mask = [1, 1, 0, 0, 0, 1, 0, 0, 0]
    aborted.status, aborted.response_length = Status.ABORTED, 7
    long.status, long.response_length, long.session_id = Status.COMPLETED, 5, None
    write = load_function("heddle.epochs.slime.write_lengths")
    write(args, [[done, [masked]], [aborted, long]], made.get_samples)
    assert [each.tokens for each in read_samples(tmp_path / "epoch.jsonl")] == [9, 3]


def test_a_checkpoint_goes_on_in_its_epoch(source: Any, tmp_path: Path):
    args = arguments(tmp_path, 16)
    made = source(args)
    for _ in range(4):
        rollout(args, made)
    seen = [*rollout(args, made), *rollout(args, made)]
    made.save(5)
    rest = [*rollout(args, made), *rollout(args, made, length=lambda n: 1000 - 60 * n)]
    resumed = source(args)
    resumed.load(5)
    again = [*rollout(args, resumed), *rollout(args, resumed)]
    assert again == rest
    assert sorted([*seen, *again]) == list(range(16))
    assert sorted(chain(*(rollout(args, resumed) for _ in range(4)))) == list(range(16))
    assert resumed.epoch_id == 2


def test_a_checkpoint_of_slimes_own_source_can_be_gone_on_from(source: Any, tmp_path: Path):
    args = arguments(tmp_path, 16)
    plain = slime_source.RolloutDataSourceWithBuffer(args)
    for _ in range(9):
        plain.get_samples(4)
    plain.save(8)
    resumed = source(args)
    resumed.load(8)
    rollout(args, resumed, length=lambda n: 5)
    assert (resumed.epoch_id, resumed.sample_offset) == (2, 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_shuffle": False}, "add --rollout-shuffle"),
        ({"heddle_plan": "sort"}, "heddle_plan = 'sort' is no epoch plan"),
        ({"rollout_batch_size": 5}, "16 prompts are no whole batches of 5"),
        ({"heddle_epoch_file": None}, "heddle_epoch_file is missing"),
    ],
)
def test_what_cannot_be_is_refused(source: Any, tmp_path: Path, given: dict[str, Any], said: str):
    written = tmp_path / "epoch.jsonl"
    written.write_text('{"schema":"heddle.epoch/1"}\n')
    with pytest.raises(ConfigError, match=said):
        source(arguments(tmp_path, 16, **given))


def test_other_names_are_no_data_sources():
    with pytest.raises(AttributeError, match="has no attribute 'Source'"):
        load_function("heddle.epochs.slime.Source")
