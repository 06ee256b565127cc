"""An agent loop of verl that sends steps of given lengths, as its tool would have it."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class ScriptedLoop(AgentLoopBase):
    """Runs `raw_prompt`: token ids of a prompt, and the length of each step."""

    async def run(self, sampling_params, **kwargs):
        prompt, lengths = kwargs["raw_prompt"]
        if not lengths:
            raise ValueError("a sample that fails before its first request")
        context, request_id = list(prompt), uuid4().hex
        for length in lengths:
            params = {**sampling_params, "max_tokens": length}
            output = await self.server_manager.generate(
                request_id, prompt_ids=context, sampling_params=params
            )
            context += output.token_ids
        made = context[len(prompt) :]
        return AgentLoopOutput(
            prompt_ids=list(prompt),
            response_ids=made,
            response_mask=[1] * len(made),
            num_turns=2,
            metrics={},
        )
