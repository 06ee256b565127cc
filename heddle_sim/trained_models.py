"""Models as a trainer sees them: those of `models.json`, by their configurations.

Parameters are `billions` of that file, where model cards or fits have them, else counted; of
mixture-of-experts models the active ones are attention, router, the experts that one token uses
(shared experts too) and both embeddings.
"""

import difflib
from dataclasses import dataclass
from functools import cache

from heddle_sim.known_models import known_configs
from heddle_sim.model_config import model_shape
from heddle_sim.model_names import known_model, listed_models
from heddle_sim.model_shape import count_parameters


class UnknownModelError(ValueError):
    """A model that `models.json` does not have; the message names those it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Shape of one model. Parameters are counts, not billions."""

    name: str
    parameters: float
    """All parameters; a tied embedding is counted once."""
    active: float
    """Parameters that one token uses, embeddings included; equal to `parameters` if dense."""
    layers: int
    hidden: int
    heads: int
    head_dim: float
    """Mean of query-key and value dimension where they differ (DeepSeek-V3: 192 and 128), and over
    layers: one with linear attention counts 0."""
    vocabulary: int
    tied: bool = False
    """True where input embedding and output head are one matrix."""
    experts: int = 0
    """Routed experts of a layer."""
    chosen: int = 8
    """Those that one token uses; of no effect if dense."""
    dense_layers: int = 0
    """Layers without experts, among others that have them."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as of queries."""

    @property
    def moe(self) -> bool:
        return self.active < self.parameters

    @property
    def multiplied(self) -> float:
        """Active parameters that are multiplied: all but the input embedding.

        A tied matrix is multiplied, as output head, so nothing is taken off there.
        """
        return self.active if self.tied else self.active - float(self.vocabulary * self.hidden)

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.moe else 0


def trained_model(name: str | TrainedModel) -> TrainedModel:
    """Return a model by its name or Hugging Face id; a TrainedModel is returned as it is.

    A precision in the name ("-FP8") does not count.
    Raises UnknownModelError with the known names and the nearest.
    """
    if isinstance(name, TrainedModel):
        return name
    known = known_model(name)
    if known is None:
        names = list(listed_models()["shapes"])
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UnknownModelError(
            f"no training shape of the model {name!r}{hint} Known: {', '.join(names)}; "
            "or give a TrainedModel"
        )
    return _of_shape(known.shape)


@cache
def _of_shape(name: str) -> TrainedModel:
    listed = listed_models()["shapes"][name]
    shape = model_shape(known_configs()[listed["config"]], place=name, name=name)
    counts, latent, experts = count_parameters(shape), shape.attention, shape.experts
    stated = [1e9 * billions for billions in listed.get("billions", ())]
    total, active = stated or (counts.total, counts.active)
    head_dim = float(shape.head_dim)
    if latent is not None:
        head_dim = (latent.nope_dim + latent.rope_dim + latent.value_dim) / 2
    return TrainedModel(
        name=name,
        parameters=total,
        active=active,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        head_dim=head_dim * shape.full_layers / shape.layers,
        vocabulary=shape.vocabulary,
        tied=shape.tied,
        experts=0 if experts is None else experts.count,
        chosen=8 if experts is None else experts.per_token,
        dense_layers=0 if experts is None else shape.dense_layers,
        kv_heads=shape.kv_heads,
    )
