"""Options of commands on RL loops that say how batches are made and trained."""

from collections.abc import Callable
from typing import Any, TypeAlias

import rich_click as click

from heddle.cli.compare import BEST
from heddle.cli.engine_options import positive_numbers

Verb: TypeAlias = Callable[..., Any]

OPTIONS: tuple[Callable[[Verb], Verb], ...] = (
    click.option(
        "--policy", default="verl", show_default=True, help="PRESET[+PART...] of rollouts"
    ),
    click.option(
        "--train-gpus",
        default=None,
        help="GPUs of the trainer; the engines have the others of --gpus. 8,16 tries each, best "
        "six shares from an eighth to three quarters; a regime's best split is shown [a quarter]",
    ),
    click.option(
        "--tp",
        default=None,
        help="TP degree of the engines of a policy that does not plan; 1,2,4 tries each, best all "
        "that fit [1]",
    ),
    click.option("--colocated", is_flag=True, help="Engines and trainer have all GPUs in turn"),
    click.option("--steps", type=int, default=10, show_default=True, help="Batches to train"),
    click.option("--groups", type=int, default=32, show_default=True, help="Prompts of a batch"),
    click.option("--samples", type=int, default=16, show_default=True, help="Samples of a prompt"),
    click.option("--repeat", is_flag=True, help="Begin the trace again after its last prompt"),
    click.option(
        "--train-backend",
        type=click.Choice(["megatron", "fsdp"]),
        default="megatron",
        show_default=True,
        help="Trainer",
    ),
    click.option("--train-tp", type=click.IntRange(1), default=None, help="Its TP degree [least]"),
    click.option("--train-pp", type=click.IntRange(1), default=None, help="Its stages [least]"),
    click.option("--optimizer-steps", type=int, default=1, show_default=True, help="Of a batch"),
    click.option(
        "--logprob-passes", type=int, default=1, show_default=True, help="Forward passes of a batch"
    ),
    click.option(
        "--update-method",
        default="nccl",
        show_default=True,
        help="How weights reach engines on GPUs of their own",
    ),
)


def trained(verb: Verb) -> Verb:
    """Add them to a verb."""
    for option in reversed(OPTIONS):
        verb = option(verb)
    return verb


def tried_numbers(flag: str, text: str | None, default: int) -> list[int] | None:
    """Read an option: numbers to try, or None for `best`.

    Raises:
        ConfigError: it is neither.
    """
    from heddle.config_files import ConfigError

    if text is None:
        return [default]
    if text.strip() == BEST:
        return None
    numbers = positive_numbers(text)
    if not numbers:
        raise ConfigError(
            f"{flag} {text}: write a number, several to try as 4,8, or {BEST}; all must be 1 or "
            "more"
        )
    return list(dict.fromkeys(numbers))
