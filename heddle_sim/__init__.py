"""Simulated engines, tools and transfers on SimPy."""
