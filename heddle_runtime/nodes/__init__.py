"""Engines on other machines: an agent on each node, and the driver's side of it, over TCP."""
