"""Live agents for `heddle run`: tasks, tokenizer, sandbox and transcripts, put together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle_runtime.agents.live import AgentLimits, LiveAgent, live_agents
from heddle_runtime.agents.tasks import TaskFile, read_tasks
from heddle_runtime.agents.tokenizer import FileTokenizer, load_tokenizer
from heddle_runtime.agents.transcripts import transcript_file
from heddle_runtime.sandbox.runner import IsolationMode, Sandbox, SandboxLimits, SandboxResult
from heddle_runtime.tool_tasks import ToolTasks

TRANSCRIPTS = "transcripts.jsonl"


@dataclass(frozen=True, slots=True)
class LiveWork:
    """Tasks, tokenizer and limits of live agents, read and checked."""

    file: TaskFile
    tokenizer: FileTokenizer
    limits: AgentLimits
    sandbox_limits: SandboxLimits
    samples: int

    @property
    def trajectories(self) -> int:
        """How many there will be."""
        return len(self.file.tasks) * self.samples


class SandboxInfo(NamedTuple):
    """The isolation of programs written by a model on this machine."""

    mode: IsolationMode
    note: str
    """Limits that it does not enforce; empty if it enforces all."""


def load_live_work(config: RunConfig) -> LiveWork:
    """Read and check the inputs of live agents.

    Raises:
        ValueError: tasks, tokenizer or a limit cannot be used; in one line, with the remedy.
    """
    live, model_dir = config.live, config.runtime.model_dir
    if not model_dir:
        raise ConfigError("live agents need a model that writes: --engine vllm --model-dir DIR")
    work = LiveWork(
        read_tasks(config.trace),
        load_tokenizer(model_dir),
        AgentLimits(
            steps=live.steps,
            step_tokens=live.step_tokens,
            observation_tokens=live.observation_tokens,
            context_tokens=live.context_tokens,
        ),
        SandboxLimits(
            wall_s=live.tool_s, cpu_s=live.tool_cpu_s, memory_bytes=live.tool_memory_mib << 20
        ),
        live.samples,
    )
    _validate_prompts(work)
    return work


def probe_sandbox(work: LiveWork) -> SandboxInfo:
    """Run a first program in a sandbox, to find the isolation mode of this machine.

    Raises:
        SandboxUnavailableError: this machine permits no isolation.
    """

    async def look() -> SandboxInfo:
        async with Sandbox(work.sandbox_limits) as sandbox:
            return SandboxInfo(sandbox.mode, sandbox.note)

    return asyncio.run(look())


@asynccontextmanager
async def running_agents(
    work: LiveWork, folder: Path, sandbox_info: SandboxInfo, tool_tasks: ToolTasks
) -> AsyncIterator[Sequence[LiveAgent]]:
    """The agents of a run, with their sandbox, writing transcripts into `folder`.

    Their programs run in `tool_tasks`; close it before this context ends.

    Raises:
        SandboxUnavailableError: the isolation that `probe_sandbox` found is not permitted now.
    """
    async with Sandbox(work.sandbox_limits, mode=sandbox_info.mode) as sandbox:
        with transcript_file(folder / TRANSCRIPTS) as write:
            yield live_agents(
                work.file.tasks,
                work.samples,
                tokenizer=work.tokenizer,
                run_python=sandbox.run,
                limits=work.limits,
                sandbox_limits=work.sandbox_limits,
                tool_tasks=tool_tasks,
                on_end=write,
            )


def _validate_prompts(work: LiveWork) -> None:
    """Build every agent once, before the run: this checks that each prompt fits the limit."""
    live_agents(
        work.file.tasks,
        1,
        tokenizer=work.tokenizer,
        run_python=_never,
        limits=work.limits,
        sandbox_limits=work.sandbox_limits,
    )


async def _never(_: str) -> SandboxResult:
    raise AssertionError("no program runs while prompts are validated")
