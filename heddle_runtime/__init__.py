"""Real engines, agents and tools: executes the driver's calls with processes and GPUs."""
