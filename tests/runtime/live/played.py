"""An agent with chosen generations, and a tokenizer of bytes."""

import asyncio
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from heddle_rollout.agents import NextAction, ToolAnswer
from heddle_rollout.engines import StepResult
from heddle_runtime.agents.live import AgentLimits, LiveAgent
from heddle_runtime.agents.tasks import Task
from heddle_runtime.agents.tokenizer import FileTokenizer
from heddle_runtime.agents.transcripts import Transcript
from heddle_runtime.sandbox.runner import SandboxLimits, SandboxResult

END, BEGIN = 0, 1


def library() -> Any:
    """A byte-level tokenizer, one token a byte, that begins texts with <|begin|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|begin|>"]
    made = Library(models.BPE(vocab={t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN)]
    )
    return made


PRINTED = SandboxResult(status="ok", exit_code=0, signal="", stdout="42\n", stderr="", wall_s=0.25)
CALL = "Let me see.\n```python\nprint(6 * 7)\n```"


def ran(**changes: Any) -> SandboxResult:
    fields = {"status": "ok", "exit_code": 0, "signal": "", "stdout": "", "stderr": "", "wall_s": 1}
    return SandboxResult(**(fields | changes))


class Played:
    """An agent called as by a driver, with chosen generations."""

    def __init__(
        self,
        tokenizer: FileTokenizer,
        *,
        result: SandboxResult | Exception = PRINTED,
        **limits: int,
    ) -> None:
        self.tokenizer, self.result = tokenizer, result
        self.programs: list[str] = []
        self.ended: list[Transcript] = []
        self.agent = LiveAgent(
            Task(id="q", prompt="What is six times seven?", answer="42"),
            0,
            tokenizer=tokenizer,
            run_python=self._run,
            limits=AgentLimits(**limits),
            sandbox_limits=SandboxLimits(),
            on_end=self.ended.append,
        )

    async def _run(self, source: str) -> SandboxResult:
        self.programs.append(source)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def say(self, text: str, *, ends: bool = True) -> NextAction:
        request = self.agent.request()
        ids = self.tokenizer.encode(text, begins=False) + [END] * ends
        made = tuple(ids[: request.max_tokens])
        self.agent.on_step_end(
            StepResult(
                trajectory=request.trajectory, tokens=len(made), finished=True, output_ids=made
            )
        )
        return self.agent.next_action()

    def use_tool(self) -> ToolAnswer:
        return asyncio.run(self.agent.run_tool())

    @property
    def context(self) -> str:
        return self.tokenizer.decode(list(self.agent.context_ids))
