"""The order of runs side by side: that of the comparison that made them."""

import shlex
from collections.abc import Sequence

from heddle.runs import Run


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs of one comparison as it named their policies, if they came as a folder lists them.

    Runs in any other order are left in it.
    """
    names = [run.path.name for run in runs]
    commands = [shlex.split(str(run.manifest.get("command_line", ""))) for run in runs]
    if names != sorted(names) or any(words != commands[0] for words in commands):
        return list(runs)
    listed = _policies(commands[0])
    if not all(run.manifest["policy"] in listed for run in runs):
        return list(runs)
    return sorted(
        runs, key=lambda run: (listed.index(run.manifest["policy"]), run.manifest["seed"])
    )


def _policies(words: Sequence[str]) -> list[str]:
    """The policies that a command line of `heddle compare` names, in its order."""
    text = " ".join(words[i + 1] for i, word in enumerate(words[:-1]) if word == "--policies")
    text = text or " ".join(w.partition("=")[2] for w in words if w.startswith("--policies="))
    return [name.strip() for name in text.split(",")]
