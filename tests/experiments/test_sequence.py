"""The recurrent network: learned by torch, answered by numpy, the same numbers from both."""

from importlib import import_module

import numpy as np
import pytest

from experiments.predictor.recurrent import NAMES, Recurrent
from heddle_predict.corpus import split
from heddle_predict.examples import examples
from heddle_predict.fit import prepared
from heddle_predict.measures import correlation
from heddle_predict.play import Pace
from heddle_predict.quantiles import LEVELS
from tests.predict.made import fitted, synthetic

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def sequence():
    """The module that trains: torch takes seconds to import, also where none of these tests run."""
    pytest.importorskip("torch", reason="the network is trained by torch: heddle-rl[train]")
    return import_module("experiments.predictor.sequence")


@pytest.fixture(scope="module")
def learned(sequence):
    seen, held = split(synthetic("coding", 320), share=0.3, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "EPOCHS", 6)
        vocabulary, asked, augmented = prepared([seen], 1)
        found = sequence.fit_sequence(asked, augmented, vocabulary, 1)
    return found, examples(held.scripts, vocabulary, Pace())


def test_it_learns_from_siblings_and_steps(learned):
    found, test = learned
    quantiles = found.model.answers(test)
    assert (np.diff(quantiles, axis=1) >= -1e-9).all()
    late = test.queued & (test.step == 2)
    middle = np.log(quantiles[late, LEVELS.index(0.5)])
    truth = np.log(test.remaining[late])
    assert correlation(middle, truth) > max(0.25, correlation(test.survival[late], truth))
    assert 1 <= found.epochs <= 6
    assert 0.3 < found.error < 2.0


def test_numpy_answers_as_torch_does(sequence):
    torch = sequence.torch
    columns, size = 7, sequence.STATE
    rng = np.random.default_rng(2)
    trainer = sequence._Trainer(3, rng.normal(size=columns), np.full(columns, 2.0))
    network = trainer.network()
    rows = rng.normal(size=(5, 4, columns))
    scaled = torch.from_numpy(((rows - network.centre) / network.spread).astype(np.float32))
    with torch.no_grad():
        expected, _ = trainer._gru(scaled)
    states = np.tile(network.initial_state(), (5, 1))
    for step in range(4):
        states = network.update(states, rows[:, step])
        assert np.allclose(states, expected[:, step].numpy(), atol=1e-5)
    assert states.shape == (5, size)
    with torch.no_grad():
        seen = torch.cat((expected[:, -1], scaled[:, -1]), dim=1)
        out = trainer._head(torch.relu(trainer._hidden(seen))).numpy()
    out[:, 1:] = np.log1p(np.exp(out[:, 1:]))
    assert np.allclose(network.quantiles(states, rows[:, -1]), out.cumsum(axis=1), atol=1e-5)


def test_the_same_fit_gives_the_same_network(sequence, monkeypatch):
    monkeypatch.setattr(sequence, "EPOCHS", 1)
    vocabulary, asked, augmented = prepared([synthetic()], 2)
    first, second = (sequence.fit_sequence(asked, augmented, vocabulary, 2) for _ in range(2))
    for name in NAMES:
        one, other = (getattr(each.model.network, name) for each in (first, second))
        assert np.array_equal(one, other), name


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("head_weight", np.zeros((2, 3)), "head_weight has shape"),
        ("spread", np.zeros(3), "not above 0"),
        ("input_bias", np.full(6, np.nan), "no number"),
    ],
)
def test_arrays_that_are_no_network_are_refused(name, bad, said):
    shapes = [(3,), (3,), (6, 3), (6,), (6, 2), (6,), (4, 5), (4,), (7, 4), (7,)]
    arrays = {n: np.ones(shape) for n, shape in zip(NAMES, shapes, strict=True)}
    Recurrent.of(arrays, columns=3, quantiles=7)
    with pytest.raises(ValueError, match=said):
        Recurrent.of(arrays | {name: bad}, columns=3, quantiles=7)


def test_trees_and_network_look_at_the_same_rows(learned):
    assert learned[0].model.vocabulary.names()[:37] == fitted().vocabulary.names()[:37]


def test_shifts_give_each_quantile_its_share_and_keep_them_in_order(sequence):
    rng = np.random.default_rng(1)
    truths = rng.normal(2.0, 1.0, 4000)
    found = np.tile(np.linspace(-0.3, 0.3, len(LEVELS)), (4000, 1))
    shifts, error = sequence.shifted(truths, found, np.ones(4000))
    shares = (truths[:, None] <= found + shifts).mean(axis=0)
    assert np.allclose(shares, LEVELS, atol=0.01)
    assert (np.diff((found + shifts)[0]) >= 0).all()
    assert error == pytest.approx(1.0, abs=0.05)
