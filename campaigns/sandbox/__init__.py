"""Programs that try to get out of the sandbox of tool calls."""
