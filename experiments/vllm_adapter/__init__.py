"""Whether `vllm serve` behind a URL can take the place of the engine in a process of our own."""
