"""Live agents of `heddle run`: their configuration, tasks and sandbox."""
