"""Examples that stand below the help of each command."""

from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Final

import rich_click as click

EXAMPLES: Final[Mapping[str, Sequence[str]]] = {
    "demo": ("heddle demo --out first-look",),
    "compare": (
        "heddle compare rollout.jsonl.gz",
        "heddle compare rollout.jsonl.gz --gpus 64 --tp best --seeds 3",
        "heddle compare rollout.jsonl.gz --policies verl,heddle,heddle+never",
        "heddle compare logs/ --tp best --set logs.groups=64 --set logs.samples=8",
    ),
    "loop": (
        "heddle loop rollout.jsonl.gz --regimes sync,areal --gpus 64 --sweep loop.train_gpus=best",
    ),
    "plan": (
        "heddle plan rollout.jsonl.gz --model qwen3-14b --gpu h100 --gpus 64",
        "heddle plan rollout.jsonl.gz --gpus 64 --regimes best",
    ),
    "diagnose": (
        "heddle diagnose logs/",
        "heddle diagnose runs/2026-11-23T10-00-00-coding-verl-s0",
        "heddle diagnose --follow logs/",
        "heddle diagnose grpo_perfetto.json --set cluster.gpus=16 --set diagnose.budget_s=60",
    ),
    "verify": (
        "heddle verify runs/2026-11-23T10-00-00-coding-verl-s0",
        "heddle verify spans.jsonl --set cluster.gpus=16 --set policy.preset=verl --fit",
    ),
    "run": (
        "heddle run rollout.jsonl.gz --engine vllm --engines 2 --model-dir models/mine",
        "heddle run rollout.jsonl.gz --engine fake --set runtime.time_scale=0.01",
    ),
    "serve": (
        "heddle serve --engine fake",
        "heddle serve check --worker http://node1:8000",
        "heddle serve --worker http://node1:8000 --policy heddle",
        "heddle serve --engine vllm --model-dir models/mine --policy heddle",
    ),
    "runs": (
        "heddle runs",
        "heddle runs coding heddle",
        "heddle runs --last 1 --page",
    ),
    "report": (
        "heddle report runs/2026-11-23T10-00-00-coding-compare -o report.html",
        "heddle report runs/2026-11-23T10-00-00-coding-verl-s0",
    ),
    "replay": ("heddle replay runs/2026-11-23T10-00-00-coding-verl-s0",),
    "trace": (
        "heddle trace import logs/ -o mine.jsonl.gz",
        "heddle trace describe mine.jsonl.gz",
        "heddle trace resample mine.jsonl.gz 32 16 -o rollout.jsonl.gz",
    ),
    "profile": (
        "heddle profile list",
        "heddle profile show qwen3-14b h100",
        "heddle profile from-config org/model --gpu h200 -o mine.json",
        "heddle profile measure --engine vllm --model-dir models/mine -o sweep.json",
        "heddle profile fit sweep.json -o mine.json",
    ),
    "predict": ("heddle predict fit earlier.jsonl.gz -o mine.heddle",),
    "policies": (
        "heddle policies list",
        "heddle policies new mine",
        "heddle policies check mine:policy",
    ),
    "regimes": ("heddle regimes list", "heddle regimes check areal:max_head_offpolicyness=1"),
    "config": (
        "heddle config init",
        "heddle config show --set cluster.gpus=16",
        "heddle config explain loop.train_gpus",
    ),
    "prices": ("heddle prices",),
}
"""Command lines by command."""


def with_examples(name: str, command: click.Command) -> click.Command:
    """Put the examples of a command at the end of its help, once."""
    examples = "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[name])])
    text = cleandoc(command.help or "")
    if not text.endswith(examples):
        command.help = f"{text}\n\n{examples}"
    return command
