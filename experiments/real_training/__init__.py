"""A small GRPO trainer on CPU, a toy task, and an RL loop of both on vLLM engines."""
