"""This is no sandbox for hostile code: commands of a model run here, with a few limits.

mini-swe-agent works on small coding tasks through a gateway, started by the words after `--`; `make
demo-agents` has the whole command. Structured output holds a model of random weights to valid
actions, which are drawn by seed. Commands run under bubblewrap where it is installed and permitted.
"""

import argparse
import json
import operator
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")  # the gateway waits itself

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SUBMIT = "python3 check.py > log && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat log"
ACTION = (
    r"THOUGHT: [a-z ]{8,64}\n\n```mswea_bash_command\n"
    r"(cat task\.py|sed -i 's/a \. b/a [-+*] b/' task\.py|python3 check\.py > log && "
    r"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat log)\n```"
)
"""What a step may say: `SUBMIT` ends the trajectory where the check of the task passes."""
LIMITS = "ulimit -t 5 -v 1000000 -f 2000 -n 64"
"""Seconds of CPU, KiB of address space, KiB of a file, open files: of each process."""
COMMAND_S, STEP_S = 20, 600


def bubblewrap(folder: Path) -> list[str]:
    """Words before a command that leave it `folder` to write and no network; none without bwrap."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/"]
    words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    words += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    if shutil.which("bwrap") is None:
        return []
    # In many containers it is installed, and namespaces are refused.
    probe = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if probe.returncode == 0 else []


class LimitedEnvironment(LocalEnvironment):
    """Runs each command in a child process with limits and without this process's environment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(cwd=str(folder), timeout=COMMAND_S)
        # Two edits of a file within a second look alike to Python's cache of compiled files.
        names = (f"PATH={os.environ['PATH']}", f"HOME={folder}", "PYTHONDONTWRITEBYTECODE=1")
        self._before = (*bubblewrap(folder), "env", "-i", *names, "bash", "-c")

    def execute(self, action: dict[str, Any], *args: Any, **options: Any) -> dict[str, Any]:
        """Run a command of the model, see `LocalEnvironment`."""
        command = shlex.join((*self._before, f"{LIMITS}; {action['command']}"))
        return dict(super().execute({**action, "command": command}, *args, **options))


def make_task(folder: Path, rng: Random) -> None:
    """Write a function with a wrong operator, and a check that fails until it is the right one."""
    folder.mkdir(parents=True)
    right, wrong = rng.sample(sorted(OPERATORS), 2)
    a, b = rng.randint(5, 99), rng.randint(5, 99)
    (folder / "task.py").write_text(f"def f(a, b):\n    return a {wrong} b\n")
    expected = OPERATORS[right](a, b)
    check = f"from task import f\n\nassert f({a}, {b}) == {expected}\nprint('{right}')\n"
    (folder / "check.py").write_text(check)


def solve(folder: Path, url: str, seed: int, steps: int) -> tuple[str, int]:
    """Let an agent work on a task; return how it ended, and its steps."""
    model = LitellmTextbasedModel(
        model_name="openai/tiny",
        model_kwargs={
            "api_base": f"{url}/v1",
            "api_key": "none",
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 300,
            "timeout": STEP_S,
            "extra_headers": {"X-Session-ID": folder.name},
            "extra_body": {"structured_outputs": {"regex": ACTION}},
        },
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LimitedEnvironment(folder),
        system_template="You mend programs. Each answer ends in one command.",
        instance_template="{{task}}",
        step_limit=steps,
        output_path=folder.with_suffix(".json"),
    )
    task = f"The function of task.py is wrong. Mend it, then submit it by: {SUBMIT}"
    status = str(agent.run(task).get("exit_status"))
    urlopen(Request(f"{url}/finish_session?session_id={folder.name}", method="POST")).close()
    return status, agent.n_calls


@contextmanager
def gateway(words: list[str], out: Path) -> Iterator[dict[str, Any]]:
    """Start a gateway; yield its `url` and `run`, and at the end add the figures of its run."""
    words = [*words, "--json", "--port", "0", "--set", "serve.names=['tiny']", "--out", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            found: dict[str, Any] = json.loads(process.stdout.readline() or sys.exit("no gateway"))
            yield found
        finally:
            process.terminate()
        found |= json.loads(process.stdout.read())


def main() -> None:
    """Run all agents at once; the exit status is 1 if one ended otherwise than an agent may."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the tasks and of the run")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2, help="agents for each task")
    parser.add_argument("--steps", type=int, default=24, help="the most of an agent")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("gateway", nargs="+", help="after --: heddle serve and its options")
    given = parser.parse_args()
    names = [(n, f"task-{n}_{s}") for n in range(given.tasks) for s in range(given.samples)]
    folders = [given.out.resolve() / "tasks" / name for _, name in names]
    for (number, _), folder in zip(names, folders, strict=True):
        make_task(folder, Random(f"{given.seed} {number}"))
    with gateway(given.gateway, given.out / "runs") as run, ThreadPoolExecutor(len(names)) as pool:
        seeds = range(given.seed, given.seed + len(names))
        limits = [given.steps] * len(names)
        ends = list(pool.map(solve, folders, [run["url"]] * len(names), seeds, limits))
    for folder, (status, steps) in zip(folders, ends, strict=True):
        print(f"{folder.name:10} {status:15} {steps:3} steps")
    print(f"makespan {run['makespan_s']:.1f} s; run in {run['run']}")
    sys.exit(any(status not in ("Submitted", "LimitsExceeded") for status, _ in ends))


if __name__ == "__main__":
    main()
