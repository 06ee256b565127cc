"""Commands that read files, and values for their options; none starts engines or uses a network."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

import rich_click as click

from campaigns.fuzz.inputs import CLUSTER
from heddle.cli import main


@dataclass(frozen=True, slots=True)
class Template:
    """A command that succeeds on whole inputs."""

    arguments: tuple[str, ...]
    files: tuple[str, ...]
    """Of `originals`, or folders of them."""
    weight: int = 10
    """Less for a command that takes long."""


ONE_RUN: Final = ("compare", "--policies", "verl")
DIAGNOSE: Final = ("diagnose", "--set", "diagnose.budget_s=0")
LOG: Final = "LOG"
"""Stands for one of the logs."""

TEMPLATES: Final = (
    Template(("trace", "check", "in.jsonl"), ("in.jsonl",), 60),
    Template(("trace", "describe", "in.jsonl"), ("in.jsonl",), 30),
    Template(("trace", "check", "in.jsonl.gz"), ("in.jsonl.gz",), 30),
    Template(("trace", "describe", "in.jsonl.gz", "--json"), ("in.jsonl.gz",), 20),
    Template(
        ("trace", "resample", "in.jsonl", "2", "2", "-o", "out.jsonl"),
        ("in.jsonl",),
    ),
    Template(("trace", "import", LOG, "-o", "out.jsonl"), ("logs",), 60),
    Template(
        ("trace", "import", LOG, "--set", "logs.skip_bad=true", "-o", "out.jsonl"), ("logs",), 40
    ),
    Template(("trace", "extract", "run", "-o", "out.jsonl"), ("run",), 20),
    Template((*ONE_RUN, "in.jsonl", *CLUSTER), ("in.jsonl",), 20),
    Template((*ONE_RUN, "in.jsonl", "-c", "in.toml"), ("in.toml", "in.jsonl"), 30),
    Template(
        (*ONE_RUN, "in.jsonl", "--model", "profile.json", *CLUSTER),
        ("profile.json", "in.jsonl"),
        20,
    ),
    Template(
        (*ONE_RUN, "in.jsonl", "--policies", "heddle", "--history", "h.jsonl", *CLUSTER),
        ("in.jsonl",),
    ),
    Template((*DIAGNOSE, LOG), ("observed",), 60),
    Template((*DIAGNOSE, LOG, "--json", "--set", "logs.skip_bad=true"), ("observed",), 40),
    Template((*DIAGNOSE, "run"), ("run",)),
    Template(("verify", LOG, "--set", "cluster.gpus=2"), ("observed",), 30),
    Template(("verify", "run", "--json"), ("run",)),
    Template(("replay", "run"), ("run",), 30),
    Template(("report", "run", "--json"), ("run",), 1),
    Template(("profile", "check", "run"), ("run",)),
    Template(("profile", "fit", "profile.json", "-o", "out.json"), ("profile.json",)),
    Template(
        ("profile", "from-config", "model.json", "--gpu", "h100", "-o", "out.json"),
        ("model.json",),
        20,
    ),
    Template(("predict", "evaluate", "model.heddle"), ("model.heddle",), 30),
    Template(("predict", "evaluate", "model.heddle", "in.jsonl"), ("model.heddle", "in.jsonl"), 20),
    Template(("predict", "fit", "in.jsonl", "--output", "out.heddle"), ("in.jsonl",)),
)
OUTPUTS: Final = ("out.jsonl", "out.json", "out.heddle")
"""Written whole by a command that succeeds, and not at all by one that fails."""

BY_OPTIONS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("compare",): ("in.jsonl", "--policies", "verl", *CLUSTER),
    ("plan",): ("in.jsonl", *CLUSTER),
    ("loop",): (
        "in.jsonl",
        "--regimes",
        "sync",
        "--set",
        "loop.batches=2",
        "--set",
        "loop.groups=1",
        "--set",
        "loop.samples=1",
    ),
    ("trace", "synth"): ("coding", "--trajectories", "4", "-o", "out.jsonl"),
    ("trace", "resample"): ("in.jsonl", "2", "2", "-o", "out.jsonl"),
    ("trace", "import"): ("logs/openai_chat.jsonl", "-o", "out.jsonl"),
    ("trace", "check"): ("in.jsonl",),
    ("profile", "from-config"): ("model.json", "--gpu", "h100", "-o", "out.json"),
    ("predict", "evaluate"): ("model.heddle", "in.jsonl"),
    ("profile", "check"): ("run",),
    ("policies", "list"): (),
    ("prices",): (),
}
"""Commands whose options are drawn, with what they need."""
NOT_DRAWN: Final = ("jobs", "help", "figure")
"""Options that start processes or draw figures, and those that take long by their meaning."""
NO_UTF8: Final = "(no UTF-8)"
"""Stands for an argument of one byte that is no UTF-8, which a file of cases cannot hold."""
TEXTS: Final = (
    "", " ", "x", "-1", "0", "1", "2", "3", "16", "64", "0.5", "nan", "inf", "-inf", "1e308",
    "1e-300", "-0.0", "9" * 30, "1_0", "0x10", "٣", "in.jsonl", "model.json", "missing.json", ".",
    "a/b", NO_UTF8, "\u202e", "x" * 5000, "verl", "heddle", "sync",
    "areal:max_head_offpolicyness=1", "verl+", "+fcfs", "h100", "h20", "h100:4", "h100:1,h20:1",
    "h100=2.1", "=", "==", "e0@1", "e0@nan", "prefill=1,decode=1", "best", "1,2", "1,,2",
    "cluster.gpus=2", "cluster.gpus=nan", "runtime.max_context=-1", "seed=[",
    "bash=elastic:cold=0.3", "bash=0", "10,5", "median", "drop", "1,1,1,1,1,1,1,1",
)  # fmt: skip


@lru_cache
def options_of(command: tuple[str, ...]) -> tuple[tuple[str, bool, tuple[str, ...]], ...]:
    """Return the options of a command: flag, whether it takes a value, and its choices."""
    found: click.Command = main
    for name in command:
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), name)
        assert inner is not None
        found = inner
    return tuple(_options(found))


def _options(command: click.Command) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in NOT_DRAWN:
            choices = getattr(option.type, "choices", ())
            yield option.opts[-1], not option.is_flag, tuple(map(str, choices))


def any_options(rng: Random) -> tuple[str, ...]:
    """Draw a command line with odd values of its options."""
    commands = list(BY_OPTIONS)
    weights = [len(options_of(name)) * (1 if name == ("compare",) else 4) for name in commands]
    (command,) = rng.choices(commands, weights=weights)
    drawn: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        flag, has_value, choices = rng.choice(options_of(command))
        drawn.append(flag)
        if has_value:
            drawn.append(
                rng.choice(choices) if choices and rng.random() < 0.7 else rng.choice(TEXTS)
            )
    return (*command, *BY_OPTIONS[command], *drawn)
