"""Speculative decoding of a plan's engines, as vLLM, SkyRL and slime name it.

Keys of 2026: vLLM's `speculative_config`, which verl (`engine_kwargs.vllm`) and SkyRL
(`speculative_config`) pass on; slime's options of SGLang.
"""

from heddle.cluster.drafters import methods_of
from heddle.config_error import ConfigError
from heddle.planning.deployment import Deployment
from heddle_core.ids import EngineShape
from heddle_rollout.speculation import GROUPED


def speculative_config(plan: Deployment, shape: EngineShape) -> dict[str, object] | None:
    """vLLM's `speculative_config` for engines of a shape; None without drafts.

    Raises:
        ConfigError: vLLM has no such method.
    """
    drafts = plan.profiles.of(shape.gpu).drafts(shape.tp)
    if drafts is None:
        return None
    speculation = drafts.speculation
    if speculation.method == GROUPED:
        raise ConfigError(
            f"--export: vLLM takes no drafts from other samples, as {speculation}: plan "
            "with ngram, or another method that it has"
        )
    head = methods_of(plan.profiles.of(shape.gpu).profile).get(speculation.method, "")
    return speculation.vllm_config(head)


def sglang_options(plan: Deployment, shape: EngineShape, prefix: str = "--sglang-") -> list[str]:
    """Options of slime, or with the prefix "--" of SGLang; none without drafts."""
    config = speculative_config(plan, shape)
    if config is None:
        return []
    drafts = int(str(config["num_speculative_tokens"]))
    algorithm = {"ngram": "NGRAM", "eagle3": "EAGLE3"}.get(str(config["method"]), "EAGLE")
    options = [
        f"{prefix}speculative-algorithm {algorithm}",
        f"{prefix}speculative-num-draft-tokens {drafts + 1}",
    ]
    if algorithm != "NGRAM":
        options[1:1] = [
            f"{prefix}speculative-num-steps {drafts}",
            f"{prefix}speculative-eagle-topk 1",
        ]
    if "model" in config:
        options.append(f"{prefix}speculative-draft-model-path {config['model']}")
    return options
