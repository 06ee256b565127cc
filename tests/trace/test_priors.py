"""Shipped histories: made by the recorded command, and labelled as such."""

import msgspec
import pytest

from heddle_core.estimate.history import History
from heddle_trace.errors import TraceError
from heddle_trace.prior_files import (
    COMMAND,
    FOLDER,
    SEED,
    TRAJECTORIES,
    Prior,
    known_priors,
    make_prior,
    read_prior,
)
from heddle_trace.workloads import WORKLOADS


def test_every_synthetic_workload_has_one():
    assert known_priors() == tuple(sorted(WORKLOADS))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_recorded_command_makes_them_again(workload: str):
    shipped = msgspec.json.decode((FOLDER / f"{workload}.json").read_bytes(), type=Prior)
    assert shipped == make_prior(workload)
    assert (shipped.command, shipped.seed, shipped.trajectories) == (COMMAND, SEED, TRAJECTORIES)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_prior_is_a_distribution_and_knows_no_prompt(workload: str):
    history, sha256 = read_prior(workload)
    assert isinstance(history, History)
    assert history.group_totals == {}
    assert list(history.output_quantiles) == sorted(history.output_quantiles)
    assert len(sha256) == 64


def test_an_unknown_workload_is_refused_with_the_known_ones():
    with pytest.raises(TraceError, match="workload 'poetry'; there is one for coding, math, sear"):
        read_prior("poetry")


def test_a_damaged_prior_says_how_to_mend_it(tmp_path, monkeypatch):
    (tmp_path / "coding.json").write_text('{"schema": "heddle.prior/1"}')
    monkeypatch.setattr("heddle_trace.prior_files.FOLDER", tmp_path)
    with pytest.raises(TraceError, match="make it again with python -m"):
        read_prior("coding")
