"""Inputs of a policy besides the cluster: history, a model, and oracles by name.

History comes from a trace of earlier rollouts or from a shipped prior, never from the trace that is
replayed. An oracle is the exception, named in the policy: ``heddle+oracle``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from heddle.config import MissingConfig
from heddle.config_files import ConfigError
from heddle.workload import ReplayedTrace
from heddle_core.estimate.history import History
from heddle_core.loop.epoch import Totals
from heddle_core.parts.predictor import Served
from heddle_core.parts.table import Part, learned
from heddle_core.policy import Policy, PolicyContext, Predictor
from heddle_predict.artefact import read_artefact
from heddle_predict.learned import LearnedFactory, LearnedPredictor
from heddle_predict.models import TreesModel, model_from
from heddle_predict.shipped import shipped_model
from heddle_trace.complete import MissingRules, complete
from heddle_trace.files import read_trace
from heddle_trace.history import history_of, totals_by_epoch
from heddle_trace.oracle import NoisyOracle, Oracle, PaperQuality
from heddle_trace.prior_files import known_priors, read_prior
from heddle_trace.schema import TrajectoryScript
from heddle_trace.table import Scripts

NONE, PRIOR = "none", "prior"

ORACLES = {
    "oracle": "reads the scripts exactly; a comparison, not a result",
    "noisy-oracle:SIGMA": "the oracle with a log-normal error, as in noisy-oracle:0.5",
    "paper_quality": "the oracle made as bad as the paper's predictor, as an awaited service; "
    "reads the scripts: no result",
}
"""Predictors that only a replay can offer, for listings."""

LEARNED = {"learned:QUANTILE": "the same by another quantile than the median, as in learned:0.75"}
"""Predictors whose names hold a number, for listings."""

SHIPPED = "shipped"
"""Names the model that comes with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySource:
    """The history of a policy, and its source."""

    name: str
    """``none``, ``prior:WORKLOAD`` or the path of a trace; as a configuration's `history` again."""
    sha256: str | None
    """Of the trace's uncompressed bytes, or of the prior's file."""
    history: History | None
    epochs: Sequence[Totals] = ()
    """Output tokens by prompt of the epochs that it has, the newest last."""

    def plain(self) -> dict[str, Any] | None:
        """As JSON; None when there is none."""
        return None if self.history is None else {"name": self.name, "sha256": self.sha256}


def missing_rules(missing: MissingConfig) -> MissingRules:
    """Return a run's rules for missing values in the form of the trace package."""
    return MissingRules(**{**asdict(missing), "tool_s": str(missing.tool_s)})


def resolve_history(name: str, trace: ReplayedTrace, missing: MissingConfig) -> HistorySource:
    """Find the history that a configuration names, for a rollout of `trace`.

    Raises:
        ConfigError: it would be the replayed trace itself.
        TraceError: the history's trace is unusable, or no such prior is shipped.
    """
    kind, _, workload = name.partition(":")
    if name == NONE:
        return HistorySource(name=NONE, sha256=None, history=None)
    if kind == PRIOR:
        workload = workload or trace.workload
        if name == PRIOR and workload not in known_priors():
            return HistorySource(name=NONE, sha256=None, history=None)
        history, sha256 = read_prior(workload)
        return HistorySource(name=f"{PRIOR}:{workload}", sha256=sha256, history=history)
    earlier, scripts = _from_trace(name, missing)
    if earlier == trace.sha256:
        raise ConfigError(
            f"history {name} is the replayed trace itself (sha256 {earlier[:16]}): a policy would "
            "know the future. Give a trace of earlier rollouts, or none"
        )
    return HistorySource(
        name=name,
        sha256=earlier,
        history=history_of(scripts),
        epochs=totals_by_epoch(scripts),
    )


def extras(
    policy: str, scripts: Sequence[TrajectoryScript], seed: int
) -> dict[str, Part[Predictor]]:
    """Predictors whose names hold a number, and oracles, by the names that a policy uses."""
    return oracles(policy, scripts, seed) | quantile_predictors(policy)


def oracles(
    policy: str, scripts: Sequence[TrajectoryScript], seed: int
) -> dict[str, Part[Predictor]]:
    """Oracles that read `scripts`, by the names that a policy uses."""
    found: dict[str, Part[Predictor]] = {
        "oracle": Part(lambda _: Oracle(scripts), ORACLES["oracle"]),
        "paper_quality": Part(
            lambda _: Served(PaperQuality(scripts, seed=seed), awaited=True),
            ORACLES["paper_quality"],
        ),
    }
    for part in policy.split("+")[1:]:
        name, _, sigma = part.partition(":")
        if name == "noisy-oracle":
            make = partial(_noisy, scripts, _sigma(part, sigma), seed)
            found[part] = Part(make, ORACLES["noisy-oracle:SIGMA"])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A predictor model, and its source."""

    name: str
    """``shipped`` or the path of its file; as a configuration's `predictor_model` again."""
    sha256: str
    model: TreesModel
    trained_on: tuple[str, ...]
    """sha256 of the traces that it was fitted on."""

    @property
    def factory(self) -> LearnedFactory:
        return LearnedFactory(self.model)

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256}


def load_predictor_model(name: str) -> LoadedModel:
    """Read the model that a configuration names.

    Raises:
        PredictError: its file is no model, damaged, or of another version or kind.
        OSError: it cannot be read.
    """
    path = shipped_model() if name == SHIPPED else Path(name)
    artefact = read_artefact(path)
    return LoadedModel(
        name=name,
        sha256=artefact.sha256,
        model=model_from(artefact, path),
        trained_on=tuple(trained.sha256 for trained in artefact.header.trained_on),
    )


def model_used(
    model: LoadedModel, predictor: Predictor, trace: ReplayedTrace
) -> dict[str, Any] | None:
    """Name and hash of a model for a manifest; None if the predictor does not use it.

    Raises:
        ConfigError: the model was fitted on the trace that is replayed.
    """
    if not any(isinstance(part, LearnedPredictor) for part in _layers(predictor)):
        return None
    if trace.sha256 in model.trained_on:
        raise ConfigError(
            f"predictor model {model.name} was fitted on the replayed trace itself (sha256 "
            f"{trace.sha256[:16]}): a policy would know the future. Fit it on earlier rollouts"
        )
    return model.plain()


def quantile_predictors(policy: str) -> dict[str, Part[Predictor]]:
    """Parts for each ``learned:QUANTILE`` in the name of a policy."""
    found = {}
    for part in policy.split("+")[1:]:
        name, colon, quantile = part.partition(":")
        if name == "learned" and colon:
            make = partial(learned, quantile=_quantile(part, quantile))
            found[part] = Part(make, LEARNED["learned:QUANTILE"])
    return found


def needs_oracle(policy: str) -> bool:
    """Whether a policy's name has an oracle in it."""
    known = [name.partition(":")[0] for name in ORACLES]
    return any(p.partition(":")[0] in known for p in policy.split("+")[1:])


def sees_the_future(policy: Policy) -> bool:
    """Whether a part, or one that it wraps, is from `heddle_trace`, which reads future steps."""
    parts = [getattr(policy, field.name) for field in fields(policy)]
    layers = [layer for part in parts for layer in _layers(part)]
    return any(type(layer).__module__.startswith("heddle_trace.") for layer in layers)


def _layers(part: object) -> Iterator[object]:
    """A part, the part that it wraps as `inner`, and so on."""
    while part is not None:
        yield part
        part = getattr(part, "inner", None)


def _from_trace(path: str, missing: MissingConfig) -> tuple[str, Scripts]:
    """The hash and the trajectories of a trace of earlier rollouts."""
    trace = read_trace(Path(path))
    scripts, _ = complete(trace, rules=missing_rules(missing), seed=0)
    return trace.sha256, scripts


def _noisy(
    scripts: Sequence[TrajectoryScript], sigma: float, seed: int, _: PolicyContext
) -> NoisyOracle:
    return NoisyOracle(scripts, sigma=sigma, seed=seed)


def _quantile(part: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{part!r}: write one of the model's quantiles after a colon, as in learned:0.5"
        ) from None


def _sigma(part: str, text: str) -> float:
    try:
        sigma = float(text)
    except ValueError:
        sigma = -1.0
    if not 0.0 <= sigma <= 10.0:
        raise ConfigError(
            f"{part!r}: write the error's standard deviation in natural log after a colon, "
            "from 0 to 10, as in noisy-oracle:0.5"
        )
    return sigma
