"""Models as a trainer sees them: parameters and shapes, from their public configurations.

Source of each entry: the `config.json` and the model card on Hugging Face. Parameters are counted
from these shapes; for mixture-of-experts models the active ones are attention, router, the experts
that one token uses (shared experts too) and both embeddings.
"""

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from heddle_sim.model_names import known_model, short_model_name


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
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.moe else 0


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
    moe: tuple[int, int, int] = (0, 8, 0),
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
        experts=moe[0],
        chosen=moe[1],
        dense_layers=moe[2],
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
            _model("qwen3-30b-a3b", 30.532, 3.353, 48, 2048, 32, 128, 151_936, moe=(128, 8, 0)),
            _model("qwen3-235b-a22b", 235.094, 22.19, 94, 4096, 64, 128, 151_936, moe=(128, 8, 0)),
            _model(
                "qwen3-next-80b-a3b", 79.673, 3.873, 48, 2048, 16, 64, 151_936, moe=(512, 10, 0)
            ),
            _model("qwen3.5-27b", 26.893, 0, 64, 5120, 24, 64, 248_320),
            _model("qwen3.5-35b-a3b", 34.659, 3.454, 40, 2048, 16, 64, 248_320, moe=(256, 8, 0)),
            _model("glm-4.5-air", 106.851, 13.423, 46, 4096, 96, 128, 151_552, moe=(128, 8, 1)),
            _model("glm-4.5", 352.796, 33.63, 92, 5120, 96, 128, 151_552, moe=(160, 8, 3)),
            _model("glm-5", 743.91, 41.784, 78, 6144, 64, 256, 154_880, moe=(256, 8, 3)),
            _model("kimi-k2", 1026.407, 32.86, 61, 7168, 64, 160, 163_840, moe=(384, 8, 1)),
            _model("minimax-m2.5", 228.689, 11.03, 62, 3072, 48, 128, 200_064, moe=(256, 8, 0)),
            _model("gpt-oss-20b", 20.908, 4.186, 24, 2880, 64, 64, 201_088, moe=(32, 4, 0)),
            _model("mixtral-8x7b-v0.1", 46.703, 12.88, 32, 4096, 32, 128, 32_000, moe=(8, 2, 0)),
            _model("mistral-small-24b", 23.572, 0, 40, 5120, 32, 128, 131_072),
            _model("qwen2.5-1.5b", 1.544, 0, 28, 1536, 12, 128, 151_936, tied=True),
            _model("qwen2.5-7b", 7.616, 0, 28, 3584, 28, 128, 152_064),
            _model("qwen2.5-14b", 14.77, 0, 48, 5120, 40, 128, 152_064),
            _model("qwen2.5-32b", 32.764, 0, 64, 5120, 40, 128, 152_064),
            _model("qwen2.5-72b", 72.706, 0, 80, 8192, 64, 128, 152_064),
            _model("llama-3.1-8b", 8.030, 0, 32, 4096, 32, 128, 128_256),
            _model("llama-3.1-70b", 70.554, 0, 80, 8192, 64, 128, 128_256),
            _model("llama-3.1-405b", 405.853, 0, 126, 16_384, 128, 128, 128_256),
            _model("gpt-oss-120b", 116.829, 5.71, 36, 2880, 64, 64, 201_088, moe=(128, 4, 0)),
            _model("deepseek-v3", 671.026, 37.55, 61, 7168, 128, 160, 129_280, moe=(256, 8, 3)),
        )
    )
)
"""By the names of latency profiles, in lower case."""


def trained_model(name: str | TrainedModel) -> TrainedModel:
    """Return a model by its name or Hugging Face id; a TrainedModel is returned as it is.

    A precision in the name ("-FP8") does not count.
    Raises UnknownModelError with the known names and the nearest.
    """
    if isinstance(name, TrainedModel):
        return name
    known = known_model(name)
    short = short_model_name(name, MODELS)
    found = MODELS.get(known.shape if known is not None and short not in MODELS else short)
    if found is None:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UnknownModelError(
            f"no training shape of the model {name!r}{hint} Known: {', '.join(MODELS)}; "
            "or give a TrainedModel"
        )
    return found
