"""Runs and engines on the nodes of a Ray cluster."""
