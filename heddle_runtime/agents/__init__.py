"""Live agents: what a model writes becomes tool calls, and what tools answer becomes context."""
