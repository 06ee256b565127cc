"""A real RL loop: vLLM engines, a GRPO trainer, and what the simulator says of both."""
