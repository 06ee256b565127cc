"""Models as a trainer sees them: parameters and shapes, from their public configurations.

Source of each entry: the `config.json` and the model card on Hugging Face. Parameters are counted
from these shapes; for mixture-of-experts models the active ones are attention, router, the experts
that one token uses (shared experts too) and both embeddings.
"""

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from heddle_sim.model_names import short_model_name

SizeClass = Literal["dense-small", "dense-mid", "dense-large", "moe-small", "moe-large"]
SIZE_CLASSES: Final[tuple[SizeClass, ...]] = (
    "dense-small",
    "dense-mid",
    "dense-large",
    "moe-small",
    "moe-large",
)
DENSE_SMALL, DENSE_MID, MOE_SMALL = 20e9, 50e9, 10e9
"""Upper limits of the size classes: parameters of dense models, active ones of the others."""


class UnknownModelError(ValueError):
    """A model that the table does not hold; the message names those it holds."""


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
    """Mean of query-key and value dimension where they differ (DeepSeek-V3: 192 and 128)."""
    vocabulary: int
    tied: bool = False
    """True where input embedding and output head are one matrix."""

    @property
    def moe(self) -> bool:
        return self.active < self.parameters

    @property
    def input_embedding(self) -> float:
        """Parameters of the input embedding: a look-up, no arithmetic."""
        return float(self.vocabulary * self.hidden)

    @property
    def multiplied(self) -> float:
        """Active parameters that are multiplied: all but the input embedding.

        A tied matrix is multiplied, as output head, so nothing is taken off there.
        """
        return self.active if self.tied else self.active - self.input_embedding

    @property
    def size_class(self) -> SizeClass:
        """Class by which a profile states its MFU."""
        if self.moe:
            return "moe-small" if self.active < MOE_SMALL else "moe-large"
        if self.parameters < DENSE_SMALL:
            return "dense-small"
        return "dense-mid" if self.parameters < DENSE_MID else "dense-large"


def _model(
    name: str,
    billions: float,
    active: float,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: float,
    vocabulary: int,
    *,
    tied: bool = False,
) -> tuple[str, TrainedModel]:
    return name, TrainedModel(
        name=name,
        parameters=billions * 1e9,
        active=(active or billions) * 1e9,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=tied,
    )


MODELS: Final = MappingProxyType(
    dict(
        (
            _model("qwen3-0.6b", 0.596, 0, 28, 1024, 16, 128, 151_936, tied=True),
            _model("qwen3-1.7b", 1.721, 0, 28, 2048, 16, 128, 151_936, tied=True),
            _model("qwen3-4b", 4.022, 0, 36, 2560, 32, 128, 151_936, tied=True),
            _model("qwen3-8b", 8.191, 0, 36, 4096, 32, 128, 151_936),
            _model("qwen3-14b", 14.768, 0, 40, 5120, 40, 128, 151_936),
            _model("qwen3-32b", 32.762, 0, 64, 5120, 64, 128, 151_936),
            _model("qwen3-30b-a3b", 30.532, 3.353, 48, 2048, 32, 128, 151_936),
            _model("qwen3-235b-a22b", 235.094, 22.19, 94, 4096, 64, 128, 151_936),
            _model("qwen2.5-1.5b", 1.544, 0, 28, 1536, 12, 128, 151_936, tied=True),
            _model("qwen2.5-7b", 7.616, 0, 28, 3584, 28, 128, 152_064),
            _model("qwen2.5-14b", 14.77, 0, 48, 5120, 40, 128, 152_064),
            _model("qwen2.5-32b", 32.764, 0, 64, 5120, 40, 128, 152_064),
            _model("qwen2.5-72b", 72.706, 0, 80, 8192, 64, 128, 152_064),
            _model("llama-3.1-8b", 8.030, 0, 32, 4096, 32, 128, 128_256),
            _model("llama-3.1-70b", 70.554, 0, 80, 8192, 64, 128, 128_256),
            _model("llama-3.1-405b", 405.853, 0, 126, 16_384, 128, 128, 128_256),
            _model("gpt-oss-120b", 116.829, 5.71, 36, 2880, 64, 64, 201_088),
            _model("deepseek-v3", 671.026, 37.55, 61, 7168, 128, 160, 129_280),
        )
    )
)
"""By the names of latency profiles, in lower case."""


def trained_model(name: str | TrainedModel) -> TrainedModel:
    """Return a model by its name or Hugging Face id; a TrainedModel is returned as it is.

    Raises UnknownModelError with the known names and the nearest.
    """
    if isinstance(name, TrainedModel):
        return name
    found = MODELS.get(short_model_name(name, MODELS))
    if found is None:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UnknownModelError(
            f"no training shape of the model {name!r}{hint} Known: {', '.join(MODELS)}; "
            "or give a TrainedModel"
        )
    return found
