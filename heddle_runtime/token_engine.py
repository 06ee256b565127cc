"""What engines that make tokens have in common, in processes of ours and behind URLs."""

import asyncio

from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineListener, EngineRefusedError, EngineSample, StepRequest


class TokenEngine:
    """Base of implementations of `EngineClient`."""

    def __init__(self, spec: EngineSpec, listener: EngineListener) -> None:
        self.spec = spec
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._sample = EngineSample(0, 0, 0, 0)
        self._reason = ""
        """Why it is not there any more."""

    def sample(self) -> EngineSample:
        return self._sample

    def _refused(self, reason: str) -> EngineRefusedError:
        return EngineRefusedError(f"engine {self.spec.engine}{reason}")

    def _check_step(self, request: StepRequest, *, has_step: bool, longest: int) -> None:
        """Refuse what can never run here.

        Raises:
            EngineRefusedError: the trajectory has a step here already, or the request has wrong
                numbers, or more than the `longest` context.
        """
        step = f": {request.trajectory}"
        if has_step:
            raise self._refused(f"{step} has a step here already")
        if len(request.prompt_ids) != request.prompt_tokens or not request.prompt_tokens:
            raise self._refused(
                f"{step} has {len(request.prompt_ids)} token ids for a prompt of "
                f"{request.prompt_tokens} tokens"
            )
        if request.max_tokens < 1:
            raise self._refused(f"{step} has max_tokens below 1")
        if request.prompt_tokens + request.max_tokens > longest:
            raise self._refused(
                f"{step} needs {request.prompt_tokens} + {request.max_tokens} tokens, and the "
                f"engine holds {longest}"
            )
