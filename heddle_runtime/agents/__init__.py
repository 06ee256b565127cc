"""Live agents: a model's text becomes tool calls, and tools' answers become context."""
