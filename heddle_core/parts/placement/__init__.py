"""Placements: which engine becomes a trajectory's home."""
