"""vLLM engines on this machine. Only `process` imports vllm."""
