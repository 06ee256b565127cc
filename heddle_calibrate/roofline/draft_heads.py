"""Heads that make drafts: what a pass of one reads, by the sizes of the model or of its own file.

An MTP head is one more layer of the model (DeepSeek-V3, arXiv 2412.19437, section 2.2); an EAGLE-3
head one dense layer over three hidden states of the model (arXiv 2503.01840, section 3).
"""

from heddle_calibrate.roofline.locate import find_config
from heddle_sim.config_fields import Fields
from heddle_sim.model_shape import ModelShape, count_parameters
from heddle_sim.profile_parts import DraftHead

DRAFT_VOCABULARY = 32_000
"""Tokens that the output matrix of a published EAGLE-3 head knows."""
ELEMENT_BYTES = 2.0
"""Heads are bf16, whatever the precision of the model."""


def mtp_head(model: ModelShape) -> DraftHead:
    """A layer of the model, the projection of two inputs to one, and the output matrix."""
    counts, hidden = count_parameters(model), model.hidden
    fixed = counts.attention / model.layers + 2 * hidden * hidden + model.vocabulary * hidden
    experts = (counts.mlp + counts.experts) / model.layers
    active = (counts.mlp + counts.active_experts) / model.layers
    return DraftHead(
        read_bytes=ELEMENT_BYTES * (fixed + active),
        weight_bytes=ELEMENT_BYTES * (fixed + experts),
        kv_bytes_per_token=model.kv_bytes_per_token() / model.layers,
    )


def eagle3_head(model: ModelShape) -> DraftHead:
    """A head of the model's own sizes."""
    return _eagle3(
        hidden=model.hidden,
        intermediate=model.intermediate or 3 * model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocabulary=DRAFT_VOCABULARY,
        kv_bytes_per_token=model.kv_bytes_per_token() / model.layers,
    )


def read_eagle3_head(head: str, model: ModelShape) -> DraftHead:
    """Read the sizes of an EAGLE-3 head from its config.json, folder or Hugging Face id.

    Raises:
        ModelConfigError: it is not found, a field is missing, or the head is of a model of another
            hidden size.
    """
    fields = Fields.of_file(find_config(head))
    hidden = fields.positive("hidden_size")
    target = fields.positive("target_hidden_size", default=hidden)
    if target != model.hidden:
        raise fields.wrong(
            f"the head is of a model of hidden size {target:,}, and {model.name} has "
            f"{model.hidden:,}: take a head of this model"
        )
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", default=heads)
    head_dim = fields.positive("head_dim", default=hidden // heads)
    return _eagle3(
        hidden=hidden,
        intermediate=fields.positive("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=fields.positive("draft_vocab_size", "vocab_size"),
        kv_bytes_per_token=2 * kv_heads * head_dim * ELEMENT_BYTES,
        repository=head,
    )


def _eagle3(
    *,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    kv_bytes_per_token: float,
    repository: str = "",
) -> DraftHead:
    """Three inputs to one, attention over two, a dense MLP, and the output matrix."""
    parameters = (
        3 * hidden * hidden
        + 2 * hidden * head_dim * (heads + 2 * kv_heads)
        + heads * head_dim * hidden
        + 3 * hidden * intermediate
        + vocabulary * hidden
    )
    return DraftHead(
        read_bytes=ELEMENT_BYTES * parameters,
        weight_bytes=ELEMENT_BYTES * parameters,
        kv_bytes_per_token=kv_bytes_per_token,
        repository=repository,
    )
