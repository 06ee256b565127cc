"""A world made of processes and GPUs: room kept for the drivers of real engines."""
